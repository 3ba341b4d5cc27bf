"""Names that spherenet does not have: the error suggests those that are meant, without a cost at import."""

import subprocess
import sys

import pytest

import spherenet as sn
from spherenet._util.names import SYNONYMS

MEANT = {
    "SphereFaceLoss": "ASoftmaxLoss or spherenet.SphereFace2Loss",
    "ArcFace": "ArcFaceLoss",
    "AMSoftmaxLoss": "CosFaceLoss",
    "NormalizedSoftmaxLoss": "SSoftmaxLoss",
    "SphereConv": "SphereConv2d",
    "SphereNet": "create_model",
    "create_modle": "create_model",
    "sphereconv2d": "SphereConv2d",
    "to_spere": "to_sphere",
}


@pytest.mark.parametrize("name", MEANT)
def test_missing_name_is_suggested(name):
    with pytest.raises(AttributeError) as caught:
        getattr(sn, name)
    assert str(caught.value).startswith(f"module 'spherenet' has no attribute {name!r}; did you mean spherenet.")
    assert f"spherenet.{MEANT[name]}" in str(caught.value)


def test_all_suggestions_exist():
    assert {name for names in SYNONYMS.values() for name in names} <= set(sn.__all__)
    assert all(key == key.lower().replace("_", "").removesuffix("loss") for key in SYNONYMS)


def test_other_names_and_imports():
    with pytest.raises(AttributeError, match=r"^module 'spherenet' has no attribute 'qqqqqq'\.$"):
        sn.qqqqqq  # noqa: B018
    assert not hasattr(sn, "__wrapped__")
    with pytest.raises(ImportError, match="SphereFaceLoss"):
        from spherenet import SphereFaceLoss  # noqa: F401


def test_import_of_the_package_loads_nothing_more():
    code = "import sys, spherenet; print([name for name in ('torch', 'difflib', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
