"""Names with options: their text, and that every argument of a loss is an option."""

import inspect
import json

import pytest

from made_runs import make_run
from spherenet.errors import InvalidArgument, RunError
from spherenet.losses import list_losses, make_loss
from spherenet.runs import RunDirectory
from spherenet.training import TrainConfig
from spherenet.training.build import ARGUMENTS_OF_OTHERS, require_valid_choices
from spherenet.training.choices import OPTIMIZERS, Choice, parse_choice
from spherenet.training.run_format import config_of


@pytest.mark.parametrize(
    ("text", "choice", "canonical"),
    [
        ("softmax", Choice("softmax"), "softmax"),
        ("a: m = 4.0 , scale=norm", Choice("a", {"m": 4, "scale": "norm"}), "a:m=4,scale=norm"),
        ("x:b=1e-5,a=-2,c=True,d=None", Choice("x", {"a": -2, "b": 1e-5, "c": True, "d": None}), None),
        ("ball:radius=learned:10", Choice("ball", {"radius": "learned:10"}), "ball:radius=learned:10"),
    ],
)
def test_text_is_parsed_and_written(text, choice, canonical):
    assert parse_choice("loss", text) == choice
    assert str(choice) == (canonical or "x:a=-2,b=1e-05,c=true,d=none")
    assert parse_choice("loss", str(choice)) == choice
    assert parse_choice("loss", choice.as_yaml()) == choice


def test_configurations_are_equal_if_their_options_are():
    first, second = TrainConfig(loss="a:scale=norm,m=4"), TrainConfig(loss={"name": "a", "m": 4.0, "scale": "norm"})
    assert first == second
    assert first.as_dict()["loss"] == "a:m=4,scale=norm"
    assert TrainConfig.from_dict(first.as_yaml()) == first


@pytest.mark.parametrize("loss", list_losses())
def test_every_argument_of_a_loss_with_a_plain_default_is_an_option(loss):
    parameters = inspect.signature(type(make_loss(loss))).parameters
    for name, parameter in parameters.items():
        default = parameter.default
        if name in ARGUMENTS_OF_OTHERS or not isinstance(default, (int, float, str)):
            continue
        try:
            make_loss(loss, **{name: default})
        except TypeError:  # fixed by the name of the loss
            continue
        require_valid_choices(TrainConfig(loss=Choice(loss, {name: default}).as_yaml()))


def test_defaults_of_optimizers_are_valid():
    for name, options in OPTIMIZERS.items():
        TrainConfig(optimizer=str(Choice(name, options)))
    with pytest.raises(InvalidArgument, match="optimizer muon has no option 'beta1', it has momentum, "):
        TrainConfig(optimizer="muon:beta1=0.5")


def test_run_with_options_of_an_earlier_format_is_refused_in_one_sentence(tmp_path):
    file = make_run(tmp_path / "run", [0.5]) / "config.json"
    description = json.loads(file.read_text())
    description["train"]["k"] = 0.3
    file.write_text(json.dumps(description))
    with pytest.raises(RunError, match="has the configuration of another version: 'k' is not an option"):
        config_of(RunDirectory.open(file.parent))
