"""Weights of sphere layers in plain layers, in layers with other options, and fused with a BatchNorm."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import spherenet as sn
from spherenet.errors import ModelError
from spherenet.export.weights import load_matching

OTHER_OPTIONS = {
    "operator": ({"operator": "linear"}, "operator='cosine' instead of 'linear'"),
    "center": ({"center": "weight"}, "center=None instead of 'weight'"),
    "magnitude": ({"magnitude": "ball"}, "magnitude='sphere' instead of 'ball'"),
    "rescale": ({"rescale": (2.0, 0.5)}, r"rescale=None instead of \[2.0, 0.5\]"),
}
LAYERS = {
    "conv": lambda **options: sn.SphereConv2d(3, 4, 3, **options),
    "linear": lambda **options: sn.SphereLinear(3, 4, **options),
    "transposed": lambda **options: sn.SphereConvTranspose1d(3, 4, 3, **options),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
every_option = pytest.mark.parametrize(("options", "message"), OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)


def network(**options):
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(sn.SphereConv2d(3, 4, 3, **options), nn.BatchNorm2d(4)))


def plain_network():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)))


def saved_and_loaded(state, weights_only=True):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@every_option
@every_layer
def test_loading_into_layer_with_other_options_warns(make, options, message):
    layer, other = make(), make(**options)
    with pytest.warns(UserWarning, match=message):
        other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ({"magnitude": "ball", "radius": 10.0}, {"magnitude": "ball"}, r"radius=10.0 instead of 1.0:"),
        ({"magnitude": "tanh"}, {"magnitude": sn.TanhMagnitude(2.0)}, r"radius=1.0 instead of 2.0:"),
        ({"magnitude": sn.LinearMagnitude(alpha=2.0)}, {"magnitude": "linear"}, r"slopes=\[2.0, 0.0\] instead of"),
        ({"eps": 1e-2}, {}, r"eps=0.01 instead of 0.0001:"),
    ],
    ids=["radius", "radius of an object", "slopes", "eps"],
)
@every_layer
def test_loading_with_other_constants_warns(make, saved, own, message):
    with pytest.warns(UserWarning, match=message):
        make(**own).load_state_dict(make(**saved).state_dict())


def test_warning_names_the_layer_and_another_k():
    model, other = network(operator="sigmoid", k=0.3), network(operator="sigmoid", k=0.5)
    with pytest.warns(UserWarning, match=r"^1\.0 was saved by a layer with k=0\.3 instead of 0\.5: its outputs will"):
        other.load_state_dict(saved_and_loaded(model.state_dict()))


@pytest.mark.parametrize(
    "options", [{}, {"operator": "learnable", "rescale": "learned"}, {"center": "patch", "magnitude": "tanh"}], ids=str
)
@pytest.mark.parametrize(
    "copier", [lambda s: s, copy.deepcopy, saved_and_loaded, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_loading_into_same_layer_is_silent(options, copier):
    model, other = network(**options), network(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = other.load_state_dict(copier(model.state_dict()), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys


def test_state_dict_without_options_is_silent():
    model, other = network(), network(operator="linear")
    for state in (dict(model.state_dict()), plain_network().state_dict()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(state)


def test_state_dict_has_the_keys_of_the_plain_network():
    state = network().state_dict()
    assert list(state) == list(plain_network().state_dict())
    assert state._metadata["1.0"]["spherenet"] == {
        "operator": "cosine", "k": None, "eps": 1e-4, "center": None, "magnitude": "sphere", "radius": None,
        "slopes": None, "rescale": None,
    }  # fmt: skip
    assert "spherenet" not in state._metadata["0"]


def test_strict_loading_still_reports_keys():
    state = network(rescale="learned").state_dict()
    with (
        pytest.warns(UserWarning, match="rescale='learned' instead of None"),
        pytest.raises(RuntimeError, match="beta"),
    ):
        network().load_state_dict(state)


def test_plain_layer_ignores_the_options():
    """torch's own layers do not read the metadata: `load_weights` is the check for them."""
    model, plain = network(), plain_network()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain[1][0].weight, model[1][0].weight)


def test_state_dict_can_be_saved_as_safetensors(tmp_path):
    model = network()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = network()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other[1][0].weight, model[1][0].weight)


def test_load_weights_rejects_a_plain_network(tmp_path):
    plain = plain_network()
    before = copy.deepcopy(plain.state_dict())
    sn.save_weights(network(), tmp_path / "sphere.safetensors")
    with pytest.raises(ModelError, match=r"1\.0 was saved with operator='cosine' instead of a plain layer"):
        sn.load_weights(plain, tmp_path / "sphere.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in plain.state_dict().items())


@every_option
def test_load_weights_rejects_other_options(tmp_path, options, message):
    sn.save_weights(network(), tmp_path / "sphere.safetensors")
    with pytest.raises(ModelError, match=message):
        sn.load_weights(network(**options), tmp_path / "sphere.safetensors")


def test_load_weights_accepts_same_options_and_plain_files(tmp_path):
    model, other = network(center="weight"), network(center="weight")
    sn.save_weights(model, tmp_path / "sphere.safetensors")
    sn.load_weights(other, tmp_path / "sphere.safetensors")
    assert torch.equal(other[1][0].weight, model[1][0].weight)
    save_file(plain_network().state_dict(), tmp_path / "plain.safetensors")
    sn.load_weights(other, tmp_path / "plain.safetensors")


def test_load_matching_warns_about_other_options(tmp_path):
    sn.save_weights(network(), tmp_path / "sphere.safetensors")
    with pytest.warns(UserWarning, match="operator='cosine' instead of a plain layer"):
        match = load_matching(plain_network(), tmp_path / "sphere.safetensors")
    assert "1.0.weight" in match.loaded


@every_layer
@pytest.mark.parametrize("bias", [False, True])
def test_fusing_with_batch_norm_warns(make, bias):
    layer = make(bias=bias).eval()
    linear = isinstance(layer, nn.Linear)
    fuse = fuse_linear_bn_eval if linear else fuse_conv_bn_eval
    batch_norm = (nn.BatchNorm2d if isinstance(layer, nn.Conv2d) else nn.BatchNorm1d)(4).eval()
    batch_norm.running_var.uniform_(0.5, 2)
    before = copy.deepcopy(layer.state_dict())
    arguments = () if linear else (layer.transposed if hasattr(layer, "transposed") else False,)
    with pytest.warns(UserWarning, match=f"new weight of {type(layer).__name__} only rescales its kernels"):
        fuse(layer, batch_norm, *arguments)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())


def test_freeze_folds_the_batch_norm_instead():
    model, images = nn.Sequential(sn.SphereConv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(8, 3, 6, 6)
    model(images)  # running statistics that change the output
    model.eval()
    frozen = sn.freeze(model)
    assert isinstance(frozen[1], nn.Identity)
    torch.testing.assert_close(frozen(images), model(images))


@every_layer
def test_weight_can_be_assigned_otherwise(make):
    layer = make()
    weight = nn.Parameter(torch.randn_like(layer.weight))
    layer.weight = weight
    assert layer.weight is weight
    layer.bias = nn.Parameter(torch.zeros(4))
    assert "bias" in dict(layer.named_parameters())
    layer.weight = nn.Parameter(weight.detach().clone())
