"""`TrainConfig`: checks of values, the learning rate schedule, and earlier names of options."""

import json
import math

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.data import load_dataset
from spherenet.losses import list_losses
from spherenet.training import TrainConfig
from spherenet.training.build import build_model, lambda_setter
from spherenet.training.config import option_name
from spherenet.training.effects import options_without_effect
from spherenet.training.optimizers import build_optimizer
from training_problem import config


def test_learning_rate_is_divided_at_the_milestones():
    chosen = config(milestones=(4, 8), learning_rate=1.0)
    assert [chosen.learning_rate_at(step) for step in (0, 3, 4, 7, 8)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_default_milestones_are_those_of_the_paper():
    assert TrainConfig(iterations=64_000).resolved_milestones == (34_000, 54_000)
    assert TrainConfig(milestones=[]).resolved_milestones == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"seed": -1}, "seed must be a finite number of at least 0, got -1"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, adamw, sgd, muon, got 'lion'"),
        ({"precision": "half"}, "precision must be one of"),
        ({"timeout": 0.0}, "timeout must be greater than 0"),
        ({"batch_size": 10**9}, "batch_size must be at most"),
    ],
)
def test_value_out_of_range_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        config(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iterations": "12"}, "iterations must be int, got '12'"),
        ({"relu": 1}, "relu must be bool, got 1"),
        ({"seed": True}, "seed must be int, got True"),
        ({"widths": [4, "4"]}, "widths must be list"),
    ],
)
def test_wrong_type_is_rejected(change, message):
    with pytest.raises(TypeError, match=message):
        config(**change)


def test_dictionary_round_trip():
    chosen = config(widths=(4, 4, 4))
    assert TrainConfig.from_dict(json.loads(json.dumps(chosen.as_dict()))) == chosen


def test_operator_none_is_a_plain_network():
    assert TrainConfig(operator="none") == TrainConfig(operator=None)


def test_unknown_option_is_rejected():
    with pytest.raises(TypeError, match="'rounds' is not an option"):
        TrainConfig.from_dict({"rounds": 3})


def test_margin_options_reach_the_loss_and_the_model():
    dataset = load_dataset("mnist5k")
    options = {"scale": "norm", "margin_gradient": "full", "feature_penalty": 0.01, "feature_norm": 20.0}
    loss = "ga-linear:m=1.3,form=r1," + ",".join(f"{name}={value}" for name, value in options.items())
    margins = TrainConfig(loss=loss, widths=[2, 2, 2], feature_batch_norm=True)
    model = build_model(margins, dataset)
    assert {name: getattr(model.criterion, name) for name in options} == options
    assert (model.criterion.m, model.criterion.form) == (1.3, "r1")
    assert isinstance(model.features[-1], torch.nn.BatchNorm1d)
    assert TrainConfig.from_dict(margins.as_dict()) == margins


@pytest.mark.parametrize(
    ("options", "annealed"),
    [
        ({}, False),
        ({"loss": "ga-linear:margin_gradient=full"}, True),
        ({"loss": "ga-linear:margin_gradient=full", "annealing": False}, False),
        ({"annealing": True}, True),
    ],
)
def test_annealing_is_the_default_of_the_full_margin_gradient_only(options, annealed):
    margins = TrainConfig(**{"loss": "ga-linear", "widths": [2, 2, 2], **options})
    model = build_model(margins, load_dataset("mnist5k"))
    lambda_setter(margins, model)
    assert (model.criterion.annealing is not None) == annealed


def test_mode_of_kept_norms_is_checked():
    assert TrainConfig().keep_norms_mode == "renormalize"
    with pytest.raises(ValueError, match="keep_norms_mode must be one of renormalize, project, got 'sphere'"):
        TrainConfig(keep_norms_mode="sphere")


def test_center_and_magnitude_reach_the_model():
    dataset = load_dataset("mnist5k")
    options = {"center": "weight", "magnitude": "ball", "radius": "learned:20"}
    chosen = TrainConfig(widths=[2, 2, 2], center="weight", magnitude="ball:radius=learned:20")
    model = build_model(chosen, dataset)
    assert {name: model.config[name] for name in options} == options
    torch.testing.assert_close(model.features.stages[0][0][0].magnitude.radius, torch.full((2,), 20.0))
    with pytest.raises(ValueError, match=r"magnitude ball: radius must be .*, got 'large'"):
        build_model(TrainConfig(magnitude="ball:radius=large"), dataset)
    assert TrainConfig.from_dict(json.loads(json.dumps(chosen.as_dict()))) == chosen
    assert build_model(TrainConfig(widths=[2, 2, 2]), dataset).config["center"] is None
    assert build_model(TrainConfig(widths=[2, 2, 2], batch_norm=False), dataset).config["center"] == "patch"
    grouped = TrainConfig(widths=[2, 2, 2], batch_norm=False, group_norm=2)
    assert build_model(grouped, dataset).config["center"] is None
    assert TrainConfig(center=None) == TrainConfig(center="none")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"center": "kernel"},
            ValueError,
            "center must be one of auto, none, weight, patch, first-patch, got 'kernel'",
        ),
        ({"magnitude": "cube"}, ValueError, "magnitude must be one of sphere, ball, .*, got 'cube'"),
        ({"magnitude": 3}, TypeError, "magnitude must be .* or str or None, got 3"),
        ({"group_norm": -1}, ValueError, "group_norm must be a finite number of at least 0, got -1"),
    ],
)
def test_wrong_center_magnitude_and_group_norm_are_rejected(change, error, message):
    with pytest.raises(error, match=message):
        config(**change)


def test_options_of_the_optimizer_reach_it():
    dataset = load_dataset("mnist5k")
    for name, expected in (
        ("adam:beta1=0.8,eps=1e-6", {"betas": (0.8, 0.999), "eps": 1e-6}),
        ("adamw:beta2=0.9", {"betas": (0.9, 0.9), "eps": 1e-8}),
        ("sgd", {"momentum": 0.9}),
        ("sgd:momentum=0.5", {"momentum": 0.5}),
    ):
        chosen = TrainConfig(optimizer=name, widths=[2, 2, 2])
        group = build_optimizer(chosen, build_model(chosen, dataset)).param_groups[0]
        assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize("operator", ["cosine", None])
def test_orthogonal_initialization(operator):
    """Kernels of a layer are orthogonal if their number does not exceed their entries, else the entries are."""
    chosen = TrainConfig(operator=operator, widths=[4, 8, 80], initialization="orthogonal")
    dataset = load_dataset("mnist5k")
    model = build_model(chosen, dataset)
    for layer in model.features.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            kernels = layer.weight.flatten(1)
            kernels = kernels if len(kernels) <= kernels.shape[1] else kernels.T
            torch.testing.assert_close(kernels @ kernels.T, 2 * torch.eye(len(kernels)), atol=1e-5, rtol=0)
    assert build_model(chosen, dataset).features.stages[0][0][0].weight.equal(model.features.stages[0][0][0].weight)
    with pytest.raises(ValueError, match="initialization must be one of he, orthogonal, dirac, got 'xavier'"):
        TrainConfig(initialization="xavier")


OUT_OF_RANGE = {
    "orthogonality": (float("nan"), "orthogonality must be a finite number of at least 0, got nan"),
    "energy": (-1.0, "energy must be a finite number of at least 0, got -1.0"),
    "optimizer": ("sgd:momentum=2", "optimizer sgd: momentum must be from 0 to less than 1, got 2"),
    "milestones": ([5, -5], "milestones must be at least 1, got -5"),
    "lambda_floor": (-3.0, "lambda_floor must be greater than 0, got -3.0"),
    "lambda_floor_at": (3.0, "lambda_floor_at must be greater than 0 and at most 1, got 3.0"),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_of_a_training_run_have_ranges(name):
    value, message = OUT_OF_RANGE[name]
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{name: value})


def test_options_without_effect_are_named():
    unused = {"resize": "squash", "fold": 1, "energy": 0.5,
              "shortcut": "operator", "lambda_floor": 2.0, "bn_precise_images": 10}  # fmt: skip
    config = TrainConfig(operator=None, orthogonality=0.0, bn_eval=["running"], **unused)
    named = [sentence.split()[0] for sentence in options_without_effect(config)]
    assert named == [option_name(name) for name in unused]
    needed = {"data": "folder", "folds": 3, "model": "resnet-32", "operator": "learnable",
              "loss": "ga-linear", "annealing": True, "bn_eval": ["precise", "lagging"]}  # fmt: skip
    used = TrainConfig(**needed, **unused, bn_lag_variance=0.5)
    assert options_without_effect(used) == []
    assert options_without_effect(TrainConfig(operator=None)) == []
    detached = TrainConfig(loss="a", lambda_floor=1.0, lambda_floor_at=0.9)  # the default gradient is not annealed
    assert [sentence.split()[0] for sentence in options_without_effect(detached)] == [
        "lambda_floor",
        "lambda_floor_at",
    ]
    assert options_without_effect(TrainConfig(loss="a:margin_gradient=full", lambda_floor=1.0)) == []
    assert options_without_effect(TrainConfig(loss="w-sigmoid:k=0.5")) == []


def test_engine_of_a_plain_network():
    dataset = load_dataset("mnist5k")
    types = {}
    for engine in ("torch", "winograd"):
        model = build_model(config(operator=None, orthogonality=0.0, engine=engine), dataset)
        types[engine] = {type(module) for module in model.modules() if isinstance(module, nn.Conv2d)}
        assert model.config["engine"] == engine
    assert types == {"torch": {nn.Conv2d}, "winograd": {sn.FastConv2d}}
    (sentence,) = options_without_effect(config(operator="cosine", engine="winograd"))
    assert sentence.startswith("engine has no effect on a SphereNet")


def test_help_names_all_losses():
    text = TrainConfig.__dataclass_fields__["loss"].metadata["help"]
    for name in list_losses():
        prefix, _, angle = name.partition("-")
        assert name in text or (f"{prefix}-" in text and angle in text), name
