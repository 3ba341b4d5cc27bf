"""Verbs of other packages: found by their entry points, named with the install command where they are missing."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from command_line import spherenet
from spherenet.cli import verbs
from spherenet.cli.plugin import Parser, Verb


def count_parser():
    parser = Parser("count", "Count.", examples="  spherenet count 3")
    parser.add_argument("number", type=int)
    return parser


def run_count(arguments):
    print(arguments.number + 1)
    return 0


COUNT = Verb("count", f"{__name__}:count_parser", f"{__name__}:run_count")


@pytest.fixture
def installed(monkeypatch):
    """Return a function that replaces the installed verbs of other packages."""

    def install(**objects):
        points = [EntryPoint(name, value, verbs.GROUP) for name, value in objects.items()]

        def entry_points(*, group, name=None):
            assert group == verbs.GROUP
            return [point for point in points if name in (None, point.name)]

        monkeypatch.setattr(verbs, "entry_points", entry_points)

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))
    return install


def test_verb_of_another_package_is_listed_completed_and_run(installed, capsys):
    installed(count=f"{__name__}:COUNT")
    assert spherenet("--help") == 0
    assert "  count       count\n" in capsys.readouterr().out
    assert spherenet("completion", "bash") == 0
    assert " count " in capsys.readouterr().out
    assert spherenet("count", 3) == 0
    assert capsys.readouterr().out == "4\n"


def test_verb_of_another_package_does_not_replace_one_of_this(installed, capsys):
    installed(doctor=f"{__name__}:COUNT")
    assert verbs.all_verbs()["doctor"] is verbs.VERBS["doctor"]
    assert verbs.find_verb("doctor") is verbs.VERBS["doctor"]


@pytest.mark.parametrize("verb", verbs.ELSEWHERE)
def test_missing_verb_of_the_study_names_the_install_command(installed, verb, capsys):
    installed()
    assert spherenet(verb, "--list") == 2
    assert capsys.readouterr().err == (
        f"spherenet {verb}: this verb is part of spherenet-paper, which is not installed: "
        "pip install -e paper in a clone of the repository of spherenet.\n"
    )
    assert spherenet("--help") == 0
    assert verb not in capsys.readouterr().out


def test_help_imports_neither_torch_nor_the_study():
    code = (
        "import sys; from spherenet.cli import main; main(['--help']); print([name for name in sys.modules if name in "
    )
    code += "('torch', 'numpy', 'spherenet_paper.experiments', 'spherenet_paper.theory')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
