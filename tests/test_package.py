"""The package as a whole: public names, submodules and the cost of importing it."""

import subprocess
import sys
from functools import partial

import pytest
import torch

import spherenet as sn
from spherenet.data import load_dataset
from spherenet.training import TrainConfig
from spherenet.training.build import build_model

SUBMODULES = [
    *("angles", "convert", "data", "distributions", "errors", "estimators", "export", "functional", "layers"),
    *("losses", "magnitudes", "metrics", "models", "optim", "regularizers", "training"),
]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_does_not_import_torch():
    assert run("import sys, spherenet; print(spherenet.__version__ != '', 'torch' in sys.modules)") == "True False"


def test_every_public_name_resolves():
    assert sn.__all__
    for name in sn.__all__:
        assert getattr(sn, name) is not None
    assert set(sn.__all__) <= set(dir(sn))


def test_names_that_users_do_not_call_stay_in_their_modules():
    assert not set(sn.__all__) & {
        *("kernels", "ops", "report", "runs", "theory"),  # how it works, and what the command line does
        *("KeptNorms", "KernelNorms", "ShardedHead", "SphereSummary"),  # results of functions
        *("default_scale", "k_values", "sphere_layers"),
    }
    assert {"make_angle", "make_magnitude"} <= set(sn.__all__)
    pair_metrics = {"equal_error_rate", "roc_auc", "roc_curve", "true_positive_rate_at", "verification_accuracy"}
    assert pair_metrics <= set(sn.__all__)


@pytest.mark.parametrize("name", SUBMODULES)
def test_submodule_is_an_attribute(name):
    assert name in sn.__all__
    assert getattr(sn, name) is sys.modules[f"spherenet.{name}"]


def test_submodules_are_imported_on_first_use():
    """In a new process, since other tests of this process import submodules explicitly."""
    code = """
import sys
import spherenet as sn
loaded = [name for name in sys.modules if name.startswith("spherenet.")]
modules = [getattr(sn, name) for name in {names!r}]
print(loaded, all(module.__name__ == f"spherenet.{{name}}" for name, module in zip({names!r}, modules)))
print(sn.functional.sphere_conv2d.__name__, sn.losses.ArcFaceLoss is sn.ArcFaceLoss)
"""
    assert run(code.format(names=SUBMODULES)).splitlines() == ["[] True", "sphere_conv2d True"]


LAYERS = {
    "SphereConv1d": lambda **options: sn.SphereConv1d(3, 4, 3, **options),
    "SphereConv2d": lambda **options: sn.SphereConv2d(3, 4, 3, **options),
    "SphereConv3d": lambda **options: sn.SphereConv3d(3, 4, 3, **options),
    "SphereLinear": lambda **options: sn.SphereLinear(3, 4, **options),
    "LazySphereConv2d": lambda **options: sn.LazySphereConv2d(4, 3, **options),
    "LazySphereLinear": lambda **options: sn.LazySphereLinear(4, **options),
    "SphereGRUCell": lambda **options: sn.SphereGRUCell(3, 4, **options),
    "SphereLSTMCell": lambda **options: sn.SphereLSTMCell(3, 4, **options),
}


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_option_of_a_layer_names_the_class_and_suggests_a_name(name):
    with pytest.raises(TypeError, match=rf"^{name} has no option 'oprator'; did you mean 'operator'\? Allowed: "):
        LAYERS[name](oprator="cosine")
    assert type(LAYERS[name](operator="linear")).__name__ == name


def test_unknown_option_of_a_head_suggests_a_name():
    with pytest.raises(TypeError, match=r"^AngularHead has no option 'bais'; did you mean 'bias'\?"):
        sn.AngularHead(3, 4, bais=True)


def test_subclass_of_a_layer_may_have_other_options():
    class Named(sn.SphereLinear):
        def __init__(self, *args, **options):
            self.label = options.pop("label")
            super().__init__(*args, **options)

    assert Named(3, 4, label="first", operator="linear").operator == "linear"


WITHOUT_K = {
    **{name: partial(make, operator="cosine") for name, make in LAYERS.items()},
    "SphereConvTranspose2d": partial(sn.SphereConvTranspose2d, 3, 4, 3, operator="cosine"),
    "SphereLSTM": partial(sn.SphereLSTM, 3, 4, operator="cosine"),
    "an object": partial(sn.SphereLinear, 3, 4, operator=sn.CosineAngle()),
    "functional": partial(sn.functional.sphere_linear, torch.ones(2, 3), torch.ones(4, 3), operator="cosine"),
    "create_model": partial(sn.create_model, "cnn-3", operator="cosine"),
    "to_sphere": partial(sn.to_sphere, torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)), operator="cosine"),
    "WSoftmaxLoss": sn.WSoftmaxLoss,
    "WSoftmaxLoss of an object": partial(sn.WSoftmaxLoss, sn.LinearAngle()),
    "GASoftmaxLoss": partial(sn.GASoftmaxLoss, angle="cosine"),
    "SSoftmaxLoss": sn.SSoftmaxLoss,
    "make_loss": partial(sn.make_loss, "w-linear"),
    "SphereSVC": lambda k: sn.estimators.SphereSVC(k=k).fit([[0.0, 1.0], [1.0, 0.0]], [0, 1]),
    "build_model": lambda k: build_model(TrainConfig(loss=f"w-cosine:k={k}"), load_dataset("mnist5k")),
}


@pytest.mark.parametrize("name", WITHOUT_K)
def test_k_is_refused_where_the_operator_has_none(name):
    """The default k of the sigmoid is no exception."""
    with pytest.raises(ValueError, match=r"k must be (None|left out) .*got (k=)?0\.3"):
        WITHOUT_K[name](k=0.3)


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match="unknown_name"):
        _ = sn.unknown_name
