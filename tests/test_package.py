"""The package as a whole: public names, submodules and the cost of importing it."""

import subprocess
import sys

import pytest

import spherenet as sn

SUBMODULES = [
    *("angles", "convert", "data", "errors", "estimators", "export", "functional", "kernels", "layers", "losses"),
    *("metrics", "models", "ops", "optim", "regularizers", "report", "runs", "theory", "training"),
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


def test_unknown_attribute_raises():
    with pytest.raises(AttributeError, match="unknown_name"):
        _ = sn.unknown_name
