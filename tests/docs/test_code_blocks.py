"""Every code block of README and docs: Python runs, `console` commands run, `bash` commands are at least understood.

Blocks of one page share a namespace and a working directory, as they do for a reader who follows the page. Warnings
are errors, as everywhere in the tests.
"""

import importlib
import os
import re
from itertools import dropwhile, pairwise

import pytest
import yaml

from command_line import spherenet
from docs.pages import PAGES, ROOT, blocks, commands, name_of, shown_output
from spherenet.cli.main import VERBS

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_CONSOLE = [page for page in PAGES if blocks(page, "console")]
COMMANDS = [(name_of(page), words) for page in PAGES for block in blocks(page, "bash", "console")
            for words in commands(block)]  # fmt: skip


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder of its own to work in, and no data but what is embedded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPHERENET_DATA", raising=False)
    return tmp_path


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_runs(page, elsewhere):
    namespace = {"__name__": "__page__"}
    for block in blocks(page, "python"):
        # Empty lines before it, so that a traceback names the line of the page.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", WITH_CONSOLE, ids=name_of)
def test_console_runs_and_prints_what_is_shown(page, elsewhere, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    make_picture(elsewhere / "digit.png")
    make_pictures(elsewhere / "pictures")
    for block in blocks(page, "console"):
        printed = ""
        for words in commands(block):
            assert words[0] == "spherenet", f"a console block runs spherenet alone, got {words}"
            assert spherenet(*words[1:]) == 0, f"{' '.join(words)}: {capsys.readouterr().err}"
            answer = capsys.readouterr()
            printed += answer.out + answer.err
        for line in shown_output(block):
            pattern = r".*".join(map(re.escape, line.strip().split("...")))
            assert re.search(pattern, printed), f"{line!r} is not in what was printed:\n{printed}"


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_command_is_understood(page, words, elsewhere):
    program, *rest = dropwhile(lambda word: "=" in word, words)  # variables of the environment
    program = program.rpartition("/")[2]  # .venv/bin/spherenet is spherenet
    if program == "torchrun":
        program, *rest = rest[rest.index("-m") + 1 :]
    if program == "spherenet":
        assert rest[0] in VERBS or rest[0].startswith("-")
        if rest[0] in VERBS:
            assert parses(rest)
    elif program == "python":
        assert rest[0] == "-m" or (ROOT / rest[0]).is_file()
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= targets()
    else:
        assert program in ("pip", "cd", "git"), f"{page} shows {words}, which nothing here can check"


def parses(words):
    """Whether a verb's parser takes these words: YAML files they name are made, for it reads them, runs are not."""
    words = ["--init-from" if word == "--resume" else word for word in words]
    for option, value in pairwise(words):
        if option == "--config":
            with open(value, "w") as file:
                yaml.safe_dump({"seed": 1}, file)
    module = importlib.import_module(f"spherenet.cli.{words[0]}")
    try:
        module.parser().parse_args(words[1:])
    except SystemExit as left:
        return left.code in (0, None)
    return True


def targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def make_picture(file):
    from PIL import Image

    Image.linear_gradient("L").resize((28, 28)).save(file)


def make_pictures(folder):
    """Two classes of three small pictures each."""
    for kind in ("bright", "dark"):
        os.makedirs(folder / kind)
        for number in range(3):
            make_picture(folder / kind / f"{number}.png")


def test_every_page_is_looked_at():
    assert ROOT / "README.md" in WITH_PYTHON
    assert len(WITH_PYTHON) >= 6
    assert len(COMMANDS) >= 30
