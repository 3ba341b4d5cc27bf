"""Ctrl-C while a command starts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import spherenet as spherenet_package
import spherenet.cli.report as verb
from command_line import spherenet


@pytest.fixture(autouse=True)
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_interrupt_that_becomes_another_error_is_an_interrupt(tmp_path, capsys, monkeypatch):
    """For example if it interrupts the import of a library, which handles the exception and fails later."""

    def interrupted(arguments):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("maximum recursion depth exceeded") from None

    monkeypatch.setattr(verb, "run_report", interrupted)
    assert spherenet("report", tmp_path) == 130
    assert capsys.readouterr().err == "spherenet: interrupted.\n"


def test_interrupt_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verb, "run_report", lambda arguments: signal.raise_signal(signal.SIGINT))
    assert spherenet("report", tmp_path) == 130
    assert capsys.readouterr().err == "spherenet: interrupted.\n"


def test_package_imports_nothing_until_a_name_is_used():
    code = "import sys; before = set(sys.modules); import spherenet; print(sorted(set(sys.modules) - before))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "['spherenet']\n"


AT_IMPORT = """
import signal, sys
from spherenet.__main__ import run
count, last = 0, int(sys.argv.pop(1))
def interrupt(event, arguments):
    global count
    count += event == "import"
    if event == "import" and count == last:
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(interrupt)
code = run()
print(count)
sys.exit(code)
"""


def interrupted_at(number):
    """Run `spherenet doctor` with SIGINT at an import. Return exit code, number of imports and stderr."""
    command = [sys.executable, "-c", AT_IMPORT, str(number), "doctor", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_interrupted_imports_are_one_sentence():
    code, imports, error = interrupted_at(0)
    assert (code, error.count("\n")) == (2, 1)
    imports = int(imports)
    assert imports > 100
    for number in (1, 2, 3, *range(10, imports, imports // 10), imports):
        code, _, error = interrupted_at(number)
        assert (code, error) == (130, "spherenet: interrupted.\n"), number


@pytest.mark.skipif(os.name == "nt", reason="signals are those of POSIX")
def test_interrupt_at_any_time_shows_no_line_of_the_package():
    """Python prints a traceback of Python files if it is interrupted before it reaches the package."""
    for milliseconds in range(20, 400, 40):
        process = subprocess.Popen(
            [sys.executable, "-m", "spherenet", "train", "--help"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=120)[1].decode()
        assert os.path.dirname(spherenet_package.__file__) not in error, json.dumps([milliseconds, error])
        assert process.returncode in (0, 1, 130, -signal.SIGINT)
