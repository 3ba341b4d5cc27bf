"""Command line: help, verbs, wrong input and exit codes."""

import json
import subprocess
import sys

import pytest

from spherenet.cli import main


def spherenet(*arguments):
    return subprocess.run([sys.executable, "-m", "spherenet", *arguments], capture_output=True, text=True)


def test_help_lists_verbs_and_does_not_import_torch():
    code = "import sys; from spherenet.cli import main; main(['bench', '--help'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "examples:\n  spherenet bench" in shown.stdout
    listed = spherenet("--help")
    assert listed.returncode == 0
    assert "bench" in listed.stdout
    code = "import sys; from spherenet.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_version_is_printed():
    assert spherenet("--version").stdout.startswith("spherenet ")


WRONG = {
    "verb": (["bnech"], "unknown verb 'bnech', did you mean 'bench'?"),
    "option": (["bench", "--round", "3"], "unknown option --round, did you mean --rounds? see spherenet bench --help."),
    "network": (["bench", "--network", "cnn9"], "--network must be one of"),
    "operator": (["bench", "--operators", "cos"], "--operators must be one of"),
    "operator of the authors": (
        ["bench", "--operators", "square-cosine", "--authors"],
        "--operators with --authors must be one of",
    ),
    "rounds": (["bench", "--rounds", "1"], "--rounds must be at least 2, got 1"),
    "number": (["bench", "--rounds", "many"], "--rounds must be a whole number, got 'many'"),
    "choice": (["bench", "--mode", "fast"], "--mode must be train or inference or both, got 'fast'"),
    "device": (["bench", "--device", "nothere"], "--device 'nothere' is not available here"),
    "widths": (["bench", "--widths", "4", "--rounds", "2"], "--widths must be 3 positive"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_and_code_2(case, capsys):
    arguments, message = WRONG[case]
    try:
        code = main(arguments)
    except SystemExit as exit_error:
        code = exit_error.code
    shown = capsys.readouterr()
    assert code == 2
    assert message in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_bench_prints_json(capsys):
    arguments = ["bench", "--network", "cnn-3", "--widths", "4", "6", "8", "--operators", "cosine", "--batch-size", "2",
                 "--rounds", "2", "--mode", "inference", "--json"]  # fmt: skip
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["rows"]] == ["cnn", "cnn, winograd", "cosine"]
    assert {"processor", "threads", "torch"} <= set(result)


def test_bench_prints_a_table(capsys):
    arguments = ["bench", "--network", "cnn-3", "--widths", "4", "6", "8", "--operators", "cosine", "--batch-size", "2",
                 "--rounds", "2", "--mode", "train"]  # fmt: skip
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "relative to the CNN twin" in table
    assert "cosine" in table
    assert "same engine" in table
    assert "--convolution direct" in " ".join(table.split())


def test_bench_measures_the_direct_algorithm(capsys):
    arguments = ["bench", "--network", "cnn-3", "--widths", "4", "6", "8", "--operators", "cosine", "--batch-size", "2",
                 "--rounds", "2", "--mode", "inference", "--convolution", "direct", "--json"]  # fmt: skip
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["rows"]] == ["cnn", "cosine"]
    assert "winograd" not in result["implementation"]
