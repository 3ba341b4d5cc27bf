"""`freeze`: same outputs from fewer operations."""

import copy
import math

import pytest
import torch
from torch import nn

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, oracle_conv, oracle_linear
from spherenet.errors import ModelError
from spherenet.export import freeze
from spherenet.export.frozen_layers import FrozenSphereConv, FrozenSphereLinear

ACCURACY = {torch.float32: 1e-6, torch.float64: 1e-12}
EXTRAS = {"bare": {}, "learned": {"rescale": "learned", "bias": True}, "fixed": {"rescale": (1.7, -0.3)}}


def perturbed(layer):
    """Return the layer with all parameters but the weight changed at random."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "weight":
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def assert_equal(actual, expected, accuracy):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.isfinite().all()
    peak = max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max().item() <= accuracy * peak


@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_frozen_convolutions_match(geometry, dtype):
    for operator in OPERATORS:
        for extra in EXTRAS.values():
            layer = perturbed(geometry.layer(dtype=dtype, **operator.arguments, **extra))
            images = geometry.images(batch=3, dtype=dtype)
            images[0] = 0
            images[1] *= torch.rand_like(images[1]) > 0.7  # patches with some zeros
            frozen = freeze(layer)
            assert type(frozen) is FrozenSphereConv
            with torch.no_grad():
                expected = layer(images)
                assert_equal(frozen(images), expected, ACCURACY[dtype])
                assert_equal(frozen(images[1]), expected[1], ACCURACY[dtype])


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_frozen_layers_match_the_oracle(operator):
    for geometry in (GEOMETRIES[1], GEOMETRIES[8], GEOMETRIES[16], GEOMETRIES[19], GEOMETRIES[-1]):
        layer = perturbed(geometry.layer(**operator.arguments, **EXTRAS["learned"]))
        images = geometry.images()
        with torch.no_grad():
            assert_equal(freeze(layer)(images), oracle_conv(layer, images, operator), 1e-12)
    linear = perturbed(sn.SphereLinear(5, 4, dtype=torch.float64, **operator.arguments, **EXTRAS["learned"]))
    rows = torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        assert_equal(freeze(linear)(rows), oracle_linear(linear, rows, operator), 1e-12)


@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_frozen_linear_layers_match(operator, dtype):
    for extra in EXTRAS.values():
        layer = perturbed(sn.SphereLinear(6, 5, dtype=dtype, **operator.arguments, **extra))
        rows = torch.randn(2, 3, 6, dtype=dtype)
        rows[0, 0] = 0
        frozen = freeze(layer)
        assert type(frozen) is FrozenSphereLinear
        with torch.no_grad():
            assert_equal(frozen(rows), layer(rows), ACCURACY[dtype])
            assert_equal(frozen(rows[1, 1]), layer(rows[1, 1]), ACCURACY[dtype])


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_zero_and_overflowing_patches_match(operator):
    layer = sn.SphereConv2d(3, 4, 3, padding=1, **operator.arguments)
    frozen = freeze(layer)
    assert (frozen(torch.zeros(1, 3, 5, 5)) == 0).all()
    for size in (1e-18, 1e18, 1e25, 3.4e38):
        images = torch.randn(1, 3, 5, 5).sign() * size
        assert_equal(frozen(images), layer(images), 1e-6)
    # θ = 0 and π: rounding errors must not leave the domain of asin.
    rows = sn.SphereLinear(7, 3, eps=1e-12, **operator.arguments)
    extremes = freeze(rows)(torch.cat([rows.weight, -rows.weight]).detach() * 3)
    assert extremes.isfinite().all()
    # asin turns an error of 6e-8 at c = 1 into one of 3e-4.
    expected = torch.cat([torch.ones(3), -torch.ones(3)])
    torch.testing.assert_close(torch.cat([extremes[:3].diag(), extremes[3:].diag()]), expected, rtol=0, atol=1e-3)


def test_nan_propagates():
    images = torch.randn(1, 3, 5, 5)
    images[0, 0, 0, 0] = math.nan
    layer = sn.SphereConv2d(3, 4, 3)
    assert torch.equal(freeze(layer)(images).isnan(), layer(images).isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matches(dtype):
    layer = perturbed(sn.SphereConv2d(8, 6, 3, operator="learnable", rescale="learned")).to(dtype)
    images = torch.randn(2, 8, 6, 6).to(dtype)
    with torch.no_grad():
        expected, actual = layer(images), freeze(layer)(images)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_frozen_layers_ignore_autocast(network):
    model = network("cnn-9", operator="sigmoid").eval()
    frozen, images = freeze(model), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            assert_equal(frozen(images), expected, 1e-5)


def test_gradients_with_respect_to_images_match():
    layer = perturbed(sn.SphereConv2d(3, 4, 3, operator="sigmoid", rescale="learned", dtype=torch.float64))
    images = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layer(images).sum(), images)
    torch.testing.assert_close(torch.autograd.grad(freeze(layer)(images).sum(), images), expected)


class PerFilter(sn.AngleFunction):
    """Custom g with one parameter per filter."""

    def __init__(self, filters):
        super().__init__()
        self.power = nn.Parameter(torch.linspace(1, 2, filters, dtype=torch.float64))

    def forward(self, cosine):
        return sn.LinearAngle()(cosine) * self.power


class Doubled(sn.AngleFunction):
    """Custom g that contains a built-in one."""

    def __init__(self, k):
        super().__init__()
        self.sigmoid = sn.SigmoidAngle(k)

    def forward(self, cosine):
        return self.sigmoid(cosine) * 2


CUSTOM = {
    "function": lambda: sn.CustomAngle(lambda theta: 1 - 2 * (theta / math.pi) ** 2),
    "constant": lambda: sn.CustomAngle(lambda theta: torch.ones(()).double().expand(theta.shape)),
    "parameter": lambda: PerFilter(4),
    "subclass": lambda: Doubled(0.3),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_angle_functions_match(name):
    conv = perturbed(sn.SphereConv2d(4, 4, 3, groups=2, operator=CUSTOM[name](), bias=True, dtype=torch.float64))
    linear = perturbed(sn.SphereLinear(5, 4, operator=CUSTOM[name](), rescale="learned", dtype=torch.float64))
    images, rows = torch.randn(2, 4, 5, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    with torch.no_grad():
        assert_equal(freeze(conv)(images), conv(images), 1e-12)
        assert_equal(freeze(linear)(rows), linear(rows), 1e-12)


LOSSES = {name: (lambda name=name: sn.make_loss(name)) for name in sn.list_losses()} | {
    "w-custom": lambda: sn.WSoftmaxLoss(sn.CustomAngle(lambda theta: 1 - theta)),
    "ga-parameter": lambda: sn.GASoftmaxLoss(PerFilter(7)),
    "s-30": lambda: sn.SSoftmaxLoss("sigmoid", 30, k=0.1),
}


class Scaled(sn.WSoftmaxLoss):
    """Custom loss."""

    def scale(self, output):
        return output.feature_norm * 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*LOSSES, "custom"])
def test_frozen_heads_match(name, bias):
    head = sn.AngularHead(5, 7, bias, dtype=torch.float64)
    if bias:
        nn.init.normal_(head.bias)
    loss = Scaled() if name == "custom" else LOSSES[name]()
    model = sn.models.Classifier(nn.Flatten(), head, loss.double(), {}).eval()
    features = (
        torch.randn(4, 5, dtype=torch.float64) * torch.tensor([0.0, 1e-9, 1.0, 1e4], dtype=torch.float64)[:, None]
    )
    with torch.no_grad():
        assert_equal(freeze(model)(features), model(features), 1e-12)
        # In float32, a feature whose squares overflow counts as zero.
        large = torch.tensor([[1e25, 0, 0, 0, -1e30], [3e38] * 5])
        assert_equal(freeze(copy.deepcopy(model).float())(large), copy.deepcopy(model).float()(large), 1e-6)


@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
@pytest.mark.parametrize("operator", [None, "cosine", "linear", "sigmoid", "learnable"])
@pytest.mark.parametrize("name", ["cnn-9", "resnet-32"])
def test_frozen_networks_match(network, name, operator, dtype):
    loss = {None: "softmax", "cosine": "w-cosine", "linear": "ga-linear", "sigmoid": "s-sigmoid", "learnable": "a"}
    model = network(name, operator=operator, loss=loss[operator], shortcut="operator").to(dtype)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    frozen = freeze(model)
    assert model.training
    assert not frozen.training
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not [m for m in frozen.modules() if isinstance(m, (sn.SphereLayer, sn.AngularHead, sn.AngularLoss))]
    images = torch.randn(3, 3, 32, 32, dtype=dtype)
    with torch.no_grad():
        assert_equal(frozen(images), model.eval()(images), 5 * ACCURACY[dtype])


def test_batch_norm_after_a_sphere_conv_is_folded(network):
    frozen = freeze(network("cnn-9", operator="sigmoid"))
    assert not [m for m in frozen.modules() if isinstance(m, nn.BatchNorm2d)]
    plain = freeze(network("cnn-9"))
    assert len([m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)]) == 9


def _with_hook():
    layer = sn.SphereConv2d(3, 4, 3)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(layer, nn.BatchNorm2d(4))


def _shared(which):
    layer, norm = sn.SphereConv2d(4, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 1), layer, norm, layer if which == "layer" else norm)


KEPT = {
    "hook": _with_hook,
    "shared layer": lambda: _shared("layer"),
    "shared norm": lambda: _shared("norm"),
    "no statistics": lambda: nn.Sequential(sn.SphereConv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
    "linear layer": lambda: nn.Sequential(nn.Flatten(2), sn.SphereLinear(64, 3), nn.BatchNorm1d(3)),
    "subclass of Sequential": lambda: type("Mine", (nn.Sequential,), {})(sn.SphereConv2d(3, 4, 3), nn.BatchNorm2d(4)),
}


@pytest.mark.parametrize("case", KEPT)
def test_batch_norm_is_kept(perturb, case):
    model = KEPT[case]()
    images = torch.randn(4, 3, 8, 8)
    if case != "no statistics":
        perturb(model, images)
    frozen = freeze(model)
    assert [m for m in frozen.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]
    with torch.no_grad():
        assert_equal(frozen(images), model.eval()(images), 5e-6)


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_with_and_without_weights_is_folded(perturb, affine):
    model = nn.Sequential(sn.SphereConv1d(3, 4, 3, bias=True), nn.BatchNorm1d(4, affine=affine)).double()
    rows = torch.randn(5, 3, 9, dtype=torch.float64) * 4
    model.train()(rows)
    with torch.no_grad():
        assert_equal(freeze(model)(rows), model.eval()(rows), 1e-12)
    assert type(freeze(model)[1]) is nn.Identity


class Doubling(sn.SphereConv2d):
    """Sphere layer that overrides forward."""

    def forward(self, input):
        return super().forward(input) * 2


def test_subclasses_are_kept_and_parametrized_layers_are_frozen():
    images = torch.randn(2, 3, 6, 6)
    model = nn.Sequential(Doubling(3, 4, 3), nn.BatchNorm2d(4)).eval()
    assert torch.equal(freeze(model)(images), model(images))
    layer = nn.utils.parametrizations.weight_norm(sn.SphereConv2d(3, 4, 3, operator="linear"))
    assert type(freeze(layer)) is FrozenSphereConv
    with torch.no_grad():
        assert_equal(freeze(layer)(images), layer(images), 1e-6)


def test_shared_layer_is_frozen_once():
    layer = sn.SphereConv2d(4, 4, 3, padding=1)
    model = nn.ModuleDict({"a": nn.Sequential(layer), "b": layer})
    frozen = freeze(model)
    assert frozen["a"][0] is frozen["b"]


def test_frozen_weights_are_normalized(network):
    for module in freeze(network("cnn-9", operator="cosine")).modules():
        if isinstance(module, (FrozenSphereConv, FrozenSphereLinear)):
            norms = module.short_weight.flatten(1).norm(dim=1) * 2**20
            torch.testing.assert_close(norms, torch.ones_like(norms), rtol=2e-3, atol=0)  # the norm includes eps


def test_uninitialized_lazy_layer_raises():
    with pytest.raises(ModelError, match=r"0\.weight has no values yet: run the model once"):
        freeze(nn.Sequential(sn.LazySphereConv2d(4, 3)))
