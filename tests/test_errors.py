"""Errors of arguments: their names, their classes and the exit codes that follow from these."""

import pickle

import pytest

import spherenet as sn
from command_line import spherenet
from spherenet.errors import InvalidArgument, InvalidArgumentType, SphereNetError
from spherenet.training import TrainConfig


@pytest.mark.parametrize(("error", "builtin"), [(InvalidArgument, ValueError), (InvalidArgumentType, TypeError)])
def test_error_has_the_name_of_its_argument_in_every_process(error, builtin):
    raised = pickle.loads(pickle.dumps(error("k", "must be at least 1, got 0.")))
    assert isinstance(raised, SphereNetError)
    assert isinstance(raised, builtin)
    assert (raised.argument, raised.problem) == ("k", "must be at least 1, got 0.")
    assert str(raised) == "k must be at least 1, got 0."


@pytest.mark.parametrize(
    ("call", "error", "argument"),
    [
        (lambda: sn.SphereConv2d(3, 4, 3, operator="cosin"), InvalidArgument, "operator"),
        (lambda: sn.AngularHead(0, 3), InvalidArgument, "in_features"),
        (lambda: sn.AngularHead("8", 3), InvalidArgumentType, "in_features"),
        (lambda: sn.CosFaceLoss(s=-1.0), InvalidArgument, "s"),
        (lambda: TrainConfig(batch_size=0), InvalidArgument, "batch_size"),
    ],
)
def test_public_functions_name_the_argument(call, error, argument):
    with pytest.raises(error) as raised:
        call()
    assert raised.value.argument == argument
    assert str(raised.value).startswith(f"{argument} must be ")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidArgument("title", "must be short, got x."), 2, "spherenet report: --title must be short, got x.\n"),
        (InvalidArgumentType("row", "must be text, got 3."), 2, "spherenet report: row must be text, got 3.\n"),
        (ValueError("title must be short, got x."), 70, "spherenet report: internal error (ValueError: title must be"),
    ],
)
def test_class_of_an_error_decides_the_exit_code(error, code, message, monkeypatch, capsys):
    import spherenet.cli.report as verb

    def fails(arguments):
        raise error

    monkeypatch.setattr(verb, "run_report", fails)
    assert spherenet("report", "run") == code
    assert capsys.readouterr().err.startswith(message)
