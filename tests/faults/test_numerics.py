"""Extreme inputs: finite input gives finite output, and results are correct if float32 can represent them."""

import pytest
import torch

import spherenet as sn
from cases import OPERATORS, WITH_MAGNITUDES, oracle_conv, oracle_linear
from faults.scale import SOAK, STRESS_DRAWS, STRESS_SCALES, STRESS_WEIGHTS
from loss_cases import COMMON, LOSSES
from spherenet.kernels import dispatch
from spherenet.kernels.settings import backend
from spherenet.layers.head import AngularHead

POINT = 12
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TINY_TO_HUGE = (0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-18, 1e-9, 1e-4, 1.0, 1e4, 1e9, 1e15, 1e18, 1e21, 1e30, 3e38)
"""Scales from denormal numbers, which bfloat16 has too, to the largest."""

ONLY_FLOAT64 = (5e-324, 1e-310, 1e-200, 1e100, 1e160, 1e300)
CORRECT = (1e-18, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e12, 1e18)
"""Scales at which results must be correct in float32 (Eq. 2)."""

by_operator = pytest.mark.parametrize("operator", [*OPERATORS, *WITH_MAGNITUDES], ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
by_loss = pytest.mark.parametrize("case", COMMON, ids=str)
by_layer = pytest.mark.parametrize("name", ["conv", "linear"])


def chosen(scales):
    """Return some of the scales, including the first and the last."""
    last = len(scales) - 1
    count = min(STRESS_SCALES, len(scales))
    return [scales[round(number * last / (count - 1))] for number in range(count)]


def scales(dtype):
    return chosen((*ONLY_FLOAT64[:3], *TINY_TO_HUGE, *ONLY_FLOAT64[3:]) if dtype == torch.float64 else TINY_TO_HUGE)


def extremes(count, *shape, scale, dtype):
    """Return 4·`count` inputs: random, constant, negative constant, and of all magnitudes up to the scale."""
    limit = torch.finfo(dtype).max
    noise = torch.rand(count, *shape, dtype=torch.float64) * 2 - 1
    spread = noise * torch.rand(count, *shape, dtype=torch.float64) ** 60
    ones = torch.ones(count, *shape, dtype=torch.float64)
    return (torch.cat([noise, ones, -ones, spread]) * scale).clamp(-limit, limit).to(dtype)


def make_layer(name, operator, dtype):
    if name == "linear":
        return sn.SphereLinear(6, 5, **operator.arguments, dtype=dtype)
    return sn.SphereConv2d(3, 4, 3, padding=1, **operator.arguments, dtype=dtype)


SHAPES = {"conv": (3, 5, 5), "linear": (6,)}


def assert_finite(tensors, message):
    for tensor in tensors:
        assert tensor is not None
        assert tensor.isfinite().all(), message


@by_operator
@by_layer
@by_dtype
@pytest.mark.parametrize("path", ["auto", "reference"])
def test_layers_are_finite(operator, name, dtype, path, tried):
    """Forward and backward, with inputs and weights of every scale."""
    with backend(path):
        for draw in range(STRESS_DRAWS):
            torch.manual_seed(draw)
            for scale in scales(dtype):
                layer = make_layer(name, operator, dtype)
                images = extremes(2, *SHAPES[name], scale=scale, dtype=dtype).requires_grad_()
                filters, *rest = layer.weight.shape
                weights = (None, *extremes(filters, *rest, scale=scale, dtype=dtype).split(filters))
                for weight in weights[:STRESS_WEIGHTS]:
                    if weight is not None:
                        with torch.no_grad():
                            layer.weight.copy_(weight)
                    out = layer(images)
                    assert (out.abs() <= 1.01).all() or not operator.is_bounded, (scale, out)
                    grads = torch.autograd.grad(out.sum(), (images, *layer.parameters()))
                    assert_finite((out, *grads), scale)
                    tried("an operator, forward and backward, on extreme input: finite")


@by_operator
@by_layer
def test_layers_are_correct(operator, name, tried):
    """float32 against the oracle in float64, from 1e-18 to 1e18. Gradients are relative to their largest value.

    Near π/2, the angle of tiny patches, the oracle rounds θ to 2e-16. There the formula of float32 is used in float64,
    for powers of the cosine also for gradients. A learned power, rounded to ε, changes |c|^p by ε·p·|log c|.
    """
    accuracy = 1e-5 if operator.name == "sharpened-cosine" else 2e-6
    oracle = oracle_conv if name == "conv" else oracle_linear
    for draw in range(STRESS_DRAWS):
        for scale in chosen(CORRECT):
            torch.manual_seed(draw)
            layer, exact = make_layer(name, operator, torch.float32), make_layer(name, operator, torch.float64)
            exact.load_state_dict(layer.state_dict())
            images = (torch.randn(2, *SHAPES[name]) * scale).requires_grad_()
            doubled = images.detach().double().requires_grad_()
            out, slow = layer(images), oracle(exact, doubled, operator)
            upstream = torch.randn(out.shape)
            grads = torch.autograd.grad(out, (images, layer.weight), upstream)
            with backend("reference"):
                fast = exact(doubled)
            precise = fast if operator.is_power and scale < 1e-12 else slow
            precise_grads = torch.autograd.grad(precise, (doubled, exact.weight), upstream.double())
            assert worst(out, fast) < accuracy, scale
            assert (out.double() - slow).abs().max() < accuracy * slow.abs().max() + 1e-15, scale
            assert max(map(worst, grads, precise_grads)) < 2e-5, scale
            tried("an operator, forward and backward, against float64: correct")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda dtype: str(dtype).removeprefix("torch."))
@by_operator
def test_native_kernels_are_finite_and_correct(operator, dtype, tried):
    """Feature maps that several threads compute are finite for all inputs and correct at the scales of `CORRECT`."""
    assert dispatch.implementation_name("cpu").startswith("native")
    for scale in scales(dtype):
        torch.manual_seed(0)
        layer = sn.SphereConv2d(3, 16, 3, padding=1, **operator.arguments, dtype=dtype)
        images = extremes(4, 3, 32, 32, scale=scale, dtype=dtype).requires_grad_()
        out = layer(images)
        upstream = torch.randn(out.shape).to(dtype)
        grads = torch.autograd.grad(out, (images, *layer.parameters()), upstream)
        assert (out.abs() <= 1.01).all() or not operator.is_bounded, scale
        assert_finite((out, *grads), scale)
        tried("an operator's native kernels, forward and backward, on extreme input: finite")
        if dtype == torch.float32 and 1e-18 <= scale <= 1e18:
            exact = sn.SphereConv2d(3, 16, 3, padding=1, **operator.arguments, dtype=torch.float64)
            exact.load_state_dict(layer.state_dict())
            doubled = images.detach().double().requires_grad_()
            expected = exact(doubled)
            expected_grads = torch.autograd.grad(expected, (doubled, exact.weight), upstream.double())
            assert (out.double() - expected).abs().max() < 5e-7 * max(1, expected.abs().max().item()), scale
            assert max(map(worst, grads, expected_grads)) < 2e-5, scale
            tried("an operator's native kernels, forward and backward, against float64: correct")


def worst(values, exact):
    """Return the largest error relative to the largest value."""
    return ((values.double() - exact).abs().max() / exact.abs().max()).item()


def head_of(weight):
    head = AngularHead(weight.shape[1], len(weight), dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


@by_loss
@by_dtype
def test_losses_are_finite(case, dtype, tried):
    labels = torch.arange(24) % 4
    for draw in range(STRESS_DRAWS):
        torch.manual_seed(draw)
        for scale in scales(dtype):
            features = extremes(6, 5, scale=scale, dtype=dtype).requires_grad_()
            for weight_scale in (scale, 1.0, 1e-30, 1e30):
                head = head_of(extremes(1, 5, scale=weight_scale, dtype=dtype))
                value = case.make()(head(features), labels)
                grads = torch.autograd.grad(value, (features, *head.parameters()))
                assert_finite((value, *grads), (scale, weight_scale))
                tried("a loss, forward and backward, on extreme input: finite")


# Without custom angle functions. A class that defines g by cos φ loses half of its digits near 0 and π. The slope of
# the parabola has a jump between two segments of ψ, and the features of 1e-18, all at π/2, are at such a point.
BUILT_IN = [case for case in (LOSSES if SOAK else COMMON) if "halved" not in case.name and "parabola" not in case.name]


@pytest.mark.parametrize("case", BUILT_IN, ids=str)
def test_losses_are_correct(case, tried):
    """float32 against float64, from 1e-18 to 1e18, relative to the largest logit: a loss is a difference of logits."""
    for draw in range(STRESS_DRAWS):
        for scale in chosen(CORRECT):
            torch.manual_seed(draw)
            features, weight = torch.randn(6, 5) * scale, torch.randn(4, 5)
            labels = torch.randint(4, (6,))
            results = []
            for dtype in (torch.float64, torch.float32):
                x, head, loss = features.to(dtype).requires_grad_(), head_of(weight.to(dtype)), case.make()
                value = loss(head(x), labels)
                results.append((value, *torch.autograd.grad(value, (x, head.weight))))
                largest = loss.logits(head(x)).abs().max().item()
            for number, (exact, single) in enumerate(zip(*results, strict=True)):
                peak = max(exact.abs().max().item(), largest if number == 0 else 0)
                assert (single.double() - exact).abs().max() <= 3e-5 * peak + 1e-12, (scale, number)
            tried("a loss, forward and backward, against float64: correct")


@by_operator
@by_dtype
def test_networks_are_finite(operator, dtype, tried):
    """Images of every scale, also constant and denormal ones, through a network and its loss."""
    for scale in chosen(TINY_TO_HUGE):
        torch.manual_seed(0)
        model = sn.create_model("cnn-3", 4, **operator.arguments, loss="ga-linear", widths=(4, 4, 4), in_channels=1,
                                input_size=8)  # fmt: skip
        model = model.to(dtype)
        images = extremes(4, 1, 8, 8, scale=scale, dtype=dtype)
        # All inputs together and each type alone, because the statistics of BatchNorm differ.
        for batch in (images, *images.split(4))[:STRESS_WEIGHTS]:
            model.zero_grad()
            loss, scores = model(batch, torch.arange(len(batch)) % 4)
            loss.backward()
            assert_finite((loss, scores, *(parameter.grad for parameter in model.parameters())), scale)
            tried("a network on extreme images: finite")
