"""Code blocks of all pages: Python and `console` blocks are run, commands of `bash` blocks are parsed.

The blocks of a page share a namespace and a working directory. Warnings are errors.
"""

import os
import re
from itertools import dropwhile, pairwise

import pytest
import yaml

from command_line import spherenet
from docs.pages import PAGES, ROOT, blocks, commands, name_of, shown_output
from spherenet.cli.main import verb_parser
from spherenet.cli.verbs import all_verbs

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_CONSOLE = [page for page in PAGES if blocks(page, "console")]
COMMANDS = [(name_of(page), words) for page in PAGES for block in blocks(page, "bash", "console")
            for words in commands(block)]  # fmt: skip


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Change to an empty folder; only embedded data are available."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPHERENET_DATA", raising=False)
    return tmp_path


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_run(page, empty_folder):
    namespace = {"__name__": "__page__"}
    for block in blocks(page, "python"):
        # Preceding empty lines make tracebacks refer to the line of the page.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", WITH_CONSOLE, ids=name_of)
def test_console_blocks_print_the_shown_output(page, empty_folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    write_image(empty_folder / "digit.png")
    write_images(empty_folder / "photos")
    for block in blocks(page, "console"):
        printed = ""
        for words in commands(block):
            assert words[0] == "spherenet", f"a console block must only contain spherenet commands, got {words}"
            assert spherenet(*words[1:]) == 0, f"{' '.join(words)}: {capsys.readouterr().err}"
            captured = capsys.readouterr()
            printed += captured.out + captured.err
        for line in shown_output(block):
            pattern = r".*".join(map(re.escape, line.strip().split("...")))
            assert re.search(pattern, printed), f"{line!r} is not in the output:\n{printed}"


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_commands_can_be_parsed(page, words, empty_folder):
    program, *rest = dropwhile(lambda word: "=" in word, words)  # environment variables
    program = program.rpartition("/")[2]  # without .venv/bin/
    if program == "torchrun":
        program, *rest = rest[rest.index("-m") + 1 :]
    if program == "spherenet":
        assert rest[0] in all_verbs() or rest[0].startswith("-")
        if rest[0] in all_verbs():
            assert parses(rest)
    elif program == "python":
        assert rest[0] == "-m" or (ROOT / rest[0]).is_file()
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= targets()
    else:
        assert program in ("pip", "cd", "git"), f"{page} contains {words}, which this test does not know"


def parses(words):
    """Return whether the parser of a command accepts these words; YAML files that they name are created first."""
    words = ["--init-from" if word == "--resume" else word for word in words]
    for option, value in pairwise(words):
        if option == "--config":
            with open(value, "w") as file:
                yaml.safe_dump({"seed": 1}, file)
    try:
        verb_parser(words[0]).parse_args(words[1:])
    except SystemExit as error:
        return error.code in (0, None)
    return True


def targets():
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def write_image(file):
    from PIL import Image

    Image.linear_gradient("L").resize((28, 28)).save(file)


def write_images(folder):
    """Write two classes with three small images each."""
    for name in ("bright", "dark"):
        os.makedirs(folder / name)
        for number in range(3):
            write_image(folder / name / f"{number}.png")


def test_pages_with_code_are_collected():
    assert ROOT / "README.md" in WITH_PYTHON
    assert len(WITH_PYTHON) >= 6
    assert len(COMMANDS) >= 30
