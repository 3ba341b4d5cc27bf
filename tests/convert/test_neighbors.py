"""Neighbors of converted layers: BatchNorm and the fast path of torch's transformer encoder."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere


class Block(nn.Module):
    """Two convolutions with BatchNorm and ReLU, and a 1×1 shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.bn3, self.calls = nn.BatchNorm2d(4), 0

    def forward(self, x, labels=None):
        self.calls += 1
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        out = self.bn3(out + self.downsample(x))
        return out if labels is None or labels.sum() < 0 else (out, labels)


def test_batch_norm_after_converted_layers_is_dropped():
    model = Block()
    sphere = to_sphere(model, drop_batch_norm=True, shortcuts=True)
    dropped = [name for name, m in sphere.named_modules() if isinstance(m, nn.Identity)]
    assert dropped == ["bn1", "bn2", "downsample.1"]
    summary = sphere_summary(sphere)
    assert summary["bn1"].reason == "BatchNorm2d dropped after conv1"
    assert summary["bn3"].reason == "BatchNorm kept: it does not directly follow a converted layer"
    assert model.calls == sphere.calls == 0  # tracing the forward had no side effect
    x = torch.randn(2, 3, 5, 5)
    for mode in (True, False):
        sphere.train(mode)(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in sphere.parameters())
    assert not sphere.eval().bn1.training


def test_plain_shortcuts_keep_their_batch_norm():
    sphere = to_sphere(Block(), drop_batch_norm=True)
    assert isinstance(sphere.downsample[1], nn.BatchNorm2d)
    assert isinstance(sphere.bn1, nn.Identity)


class NormFirst(nn.Module):
    """Block that registers the convolution first but normalizes first; the widths agree."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.conv1(F.relu(self.bn1(x)))


class Untraceable(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Padded(nn.Module):
    """Block whose padding depends on the input size, as in networks ported from TensorFlow."""

    def __init__(self, first="conv"):
        super().__init__()
        children = {"conv": nn.Conv2d(4, 4, 3), "bn": nn.BatchNorm2d(4), "act": nn.ReLU()}
        for name in (first, *children):
            self.add_module(name, children[name])

    def forward(self, x):
        pad = 1 if x.shape[-1] % 2 else 2
        return self.act(self.bn(self.conv(F.pad(x, (pad, pad)))))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x))
        return x


class SharedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.bn = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.second_input = "conv"

    def forward(self, x):
        x = self.bn(self.a(x))
        return self.bn(self.b(x) if self.second_input == "conv" else x)


def norm_with_hook():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[1].register_forward_hook(lambda *_: None)
    return model


def repeated_norm():
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(4, 4, 3), norm, nn.Conv2d(4, 4, 3), norm)


def norm_with_other_input():
    model = SharedNorm()
    model.second_input = "other"
    return model


KEPT = {
    "norm first": (NormFirst, ["bn1"], "does not directly follow"),
    "control flow": (Untraceable, ["bn1", "bn2", "bn3"], "cannot be traced"),
    "control flow, norm registered first": (lambda: Padded("bn"), ["bn"], "cannot be traced"),
    "hooks": (norm_with_hook, ["1"], "has hooks"),
    "several places": (repeated_norm, ["1"], "several places"),
    "another input too": (norm_with_other_input, ["bn"], "does not directly follow"),
    "activation between": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), ["2"], "does not directly follow",
    ),
    "first module": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)), ["0"], "does not directly follow"),
    "positions, not features": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(7)), ["1"], "does not normalize the filters",
    ),
    "subclass": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), type("MyNorm", (nn.BatchNorm2d,), {})(4)), ["1"], "is a subclass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_batch_norm_is_kept_with_a_reason(case):
    make, names, reason = KEPT[case]
    sphere = to_sphere(make(), drop_batch_norm=True, classifier=True)
    for name in names:
        assert isinstance(sphere.get_submodule(name), nn.modules.batchnorm._BatchNorm)
        assert reason in sphere_summary(sphere)[name].reason
        assert sphere_summary(sphere)[name].kind == "norm"


def test_block_of_one_layer_and_one_norm_needs_no_tracing():
    assert isinstance(to_sphere(Padded(), drop_batch_norm=True).bn, nn.Identity)


def test_norms_in_lists_and_shared_norms_are_dropped():
    sphere = to_sphere(Lists(), drop_batch_norm=True)
    assert [type(m) for m in sphere.norms] == [nn.Identity, nn.Identity]
    assert isinstance(to_sphere(SharedNorm(), drop_batch_norm=True, classifier=True).bn, nn.Identity)


def test_batch_norm_is_kept_by_default_and_dropped_after_existing_sphere_layers():
    model = nn.Sequential(sn.SphereConv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    assert isinstance(to_sphere(model)[3], nn.BatchNorm2d)
    sphere = to_sphere(model, drop_batch_norm=True)
    assert [type(m) for m in (sphere[1], sphere[3])] == [nn.Identity, nn.Identity]


@pytest.fixture
def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2).eval()


def test_inference_of_transformer_encoder_calls_the_sphere_layers(encoder):
    """The fast path uses the weights of linear1 and linear2 without calling these layers."""
    sphere = to_sphere(encoder)
    x, padding = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    expected = sphere.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        sphere.eval()
        out = sphere(x, src_key_padding_mask=padding)
        plain = encoder(x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(sphere(x), sphere.train()(x))
    assert (plain - sphere(x)).abs().max() > 0.01
    assert "fast path" in sphere_summary(sphere)["layers.0"].reason


def test_to_plain_restores_the_fast_path(encoder):
    back = to_plain(to_sphere(encoder))
    assert back.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in back.layers] == [1, 1]
    with torch.no_grad():
        torch.testing.assert_close(back(x := torch.randn(2, 5, 8)), encoder(x))
    untouched = to_sphere(nn.ModuleList([encoder, nn.Linear(3, 3)]), skip="0", classifier=True)
    assert untouched[0].use_nested_tensor


@pytest.mark.parametrize("container", [nn.ModuleList, lambda modules: nn.ModuleDict(zip("abc", modules, strict=True))])
def test_batch_norm_of_a_container_without_forward_is_kept(container):
    model = container([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)])
    sphere = sn.to_sphere(model, drop_batch_norm=True)
    assert [type(module) for module in sphere.children()] == [sn.SphereConv2d, nn.BatchNorm2d, nn.Linear]
    assert "cannot be traced" in str(sn.sphere_summary(sphere))
