"""Ctrl-C while a command starts."""

import signal

import pytest

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
