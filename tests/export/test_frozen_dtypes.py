"""Frozen models in other dtypes, and models that `freeze` must not merge or copy."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import spherenet as sn
from spherenet.errors import ModelError
from spherenet.export import freeze, save_model
from spherenet.export.frozen_layers import FrozenSphereConv

TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-6}


def convolution(**options):
    layers = nn.Sequential(sn.SphereConv2d(3, 8, 3, **options), nn.BatchNorm2d(8)).eval()
    layers[1].running_mean.normal_()
    layers[1].running_var.uniform_(0.5, 2)
    return layers, torch.randn(2, 3, 8, 8)


def network():
    return sn.create_model("cnn-3", in_channels=3, input_size=28, widths=(4, 4, 4), loss="w-linear")


MODELS = {
    "conv": lambda: convolution(operator="sigmoid"),
    "pointwise": lambda: (nn.Sequential(sn.SphereConv2d(64, 8, 1)).eval(), torch.randn(2, 64, 4, 4)),
    "centered, with magnitudes": lambda: convolution(center="patch", magnitude="ball", radius="learned"),
    "linear": lambda: (nn.Sequential(sn.SphereLinear(512, 64)).eval(), torch.randn(4, 512)),
    "network": lambda: (network().eval(), torch.randn(2, 3, 28, 28)),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_dtype_may_change_after_freezing(name, dtype):
    torch.manual_seed(0)
    model, x = MODELS[name]()
    with torch.no_grad():
        expected = model(x)
        frozen = freeze(model).to(dtype)
        got = frozen(x.to(dtype))
        assert (got.double() - expected.double()).abs().max() < TOLERANCES[dtype] * max(1, expected.abs().max())
        back = frozen.float()(x)
    assert (back - expected).abs().max() < max(TOLERANCES[dtype], 1e-5) * max(1, expected.abs().max())


def test_other_device_keeps_the_bits():
    model, x = convolution()
    frozen = freeze(model)
    with torch.no_grad():
        expected = frozen(x)
        assert torch.equal(frozen.to("cpu")(x), expected)
    assert frozen.to("meta")(x.to("meta")).shape == expected.shape


class Block(nn.Module):
    """A block with a sequence of a convolution and a BatchNorm, called as a whole or one by one."""

    def __init__(self, call):
        super().__init__()
        self.inner = nn.ModuleList([convolution()[0]])
        self.call = call

    def forward(self, x):
        return self.call(self.inner[0], x)


def one_by_one(sequence, x):
    features = sequence[0](x)
    return sequence[1](features) + features


def untraceable(sequence, x):
    return sequence(x) if x.sum() > 0 else sequence[0](x)


CALLS = {"whole": (lambda sequence, x: sequence(x), True), "one": (one_by_one, False), "if": (untraceable, False)}


@pytest.mark.parametrize("name", CALLS)
def test_batch_norm_is_folded_only_into_sequences_that_are_called_as_a_whole(name):
    torch.manual_seed(0)
    call, folded = CALLS[name]
    block = nn.Sequential(Block(call), nn.ReLU()).eval()
    frozen = freeze(block)
    assert isinstance(frozen[0].inner[0][0], FrozenSphereConv)
    assert isinstance(frozen[0].inner[0][1], nn.Identity) == folded
    with torch.no_grad():
        for x in (torch.rand(2, 3, 8, 8), -torch.rand(2, 3, 8, 8)):
            assert (frozen(x) - block(x)).abs().max() < 1e-5


def test_weight_that_a_hook_computes_is_refused():
    model = nn.Sequential(sn.SphereConv2d(3, 4, 3)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ModelError, match="the weight of 0 is computed by a hook"):
        freeze(model)
    prune.remove(model[0], "weight")
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        assert (freeze(model)(x) - model(x)).abs().max() < 1e-6


def test_model_with_a_gradient_history_is_refused():
    model = nn.Sequential(sn.SphereConv2d(3, 4, 3))
    model.mask = torch.ones(1, requires_grad=True) * 2
    with pytest.raises(ModelError, match="the model cannot be copied: "):
        freeze(model)


@pytest.mark.parametrize(
    ("wrap", "inside"), [(torch.compile, "_orig_mod"), (nn.DataParallel, "module")], ids=["compile", "DataParallel"]
)
def test_wrapped_model_is_not_saved(wrap, inside, tmp_path):
    model = sn.create_model("cnn-3", widths=(4, 4, 4))
    with pytest.raises(ModelError, match=f"pass model.{inside}"):
        save_model(wrap(model), tmp_path / "model")
    save_model(getattr(wrap(model), inside), tmp_path / "model")
