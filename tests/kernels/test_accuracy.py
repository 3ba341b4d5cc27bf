"""Gradients in float32 against float64, on the native and the plain path, where formulas cancel or saturate."""

import math

import pytest
import torch
from torch import nn

import spherenet as sn
from cases import OPERATORS
from spherenet.magnitudes import MAGNITUDES

every_path = pytest.mark.parametrize("path", ["native", "reference"])
LAYOUTS = {"planes": torch.contiguous_format, "rows": torch.channels_last}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def errors(path, layout, images, arguments, radius=None):
    """Return the error of the output and of each gradient relative to its largest value."""
    single, exact = (sn.SphereConv2d(3, 20, 3, **arguments, dtype=dtype) for dtype in (torch.float32, torch.float64))
    if radius is not None:
        nn.init.constant_(single.magnitude.raw_radius[:10], radius)
    exact.load_state_dict(single.state_dict())
    upstream = torch.randn(2, 20, 5, 5)
    results = [
        results_of(exact, images, upstream, "reference", layout),
        results_of(single, images, upstream, path, layout),
    ]
    return {name: relative(results[1][name], value) for name, value in results[0].items()}


def results_of(layer, images, upstream, path, layout):
    x = images.to(layer.weight.dtype, memory_format=LAYOUTS[layout]).requires_grad_()
    with sn.backend(path):
        out = layer.to(memory_format=LAYOUTS[layout])(x)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out, (x, *parameters), upstream.to(out.dtype))
    return dict(zip(("out", "input", *names), (out.detach(), *gradients), strict=True))


def relative(value, exact):
    peak = exact.abs().max().item()
    return (value.double() - exact).abs().max().item() / max(peak, 1e-30)


@every_path
@every_layout
@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("norm", [1e-6, 1e-3, 1.0, 5.0, 8.0, 1e2, 1e3, 1e4, 1e6, 1e8, 1e12, 1e17])
def test_magnitudes_at_every_norm(path, layout, magnitude, norm):
    """Norms far below and far above the radius, where tanh is close to 1 and 1 − tanh² is rounding noise."""
    images = torch.randn(2, 3, 7, 7) * (norm / 27**0.5)
    if MAGNITUDES[magnitude].has_radius:  # one half of the radii stays 1, the other is near the norms
        options, radius = {"magnitude": magnitude, "radius": "learned"}, min(norm / 2, 20.0)
    else:
        options, radius = {"magnitude": magnitude}, None
    measured = errors(path, layout, images, options, radius)
    assert max(measured.values()) < 5e-6, measured


@every_path
@every_layout
@pytest.mark.parametrize("operator", ["square-cosine", "sharpened-cosine"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12, 1e-14, 1e-16, 1e-18])
def test_powers_of_tiny_cosines(path, layout, operator, scale):
    measured = errors(path, layout, torch.randn(2, 3, 7, 7) * scale, {"operator": operator})
    assert max(measured.values()) < 1e-5, measured


@every_path
@every_layout
@pytest.mark.parametrize("rescale", [None, "learned"])
@pytest.mark.parametrize("k", [0.02, 0.1, 0.5, 1.0, 3.0, 7.0, 20.0, 100.0, 1000.0])
def test_gradient_of_learned_k(path, layout, rescale, k):
    """For large k the derivative by k is small, the difference of two terms that are not."""
    options = {"operator": "learnable", "k": k, "rescale": rescale}
    measured = errors(path, layout, torch.randn(2, 3, 7, 7), options)
    assert max(measured.values()) < 5e-6, measured


ANGULAR = [operator for operator in OPERATORS if operator.k is None or operator.k >= 0.3]


@pytest.mark.parametrize("path", ["native", "reference"])
@pytest.mark.parametrize("operator", ANGULAR, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_small_angles_are_as_accurate_as_documented(operator, path, sign):
    """The bounds of docs/reliability.md for a patch that is almost parallel to the kernel."""
    uses_cosine_only, steepest = operator.name == "cosine" or operator.is_power, operator.steepest()
    layer, exact = (
        sn.SphereLinear(64, 1, **operator.arguments, dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    for theta in (0.3, 0.1, 0.03, 0.01, 0.003, 3e-4):
        for _ in range(8):
            along, across = torch.linalg.qr(torch.randn(64, 2, dtype=torch.float64))[0].T * 100
            with torch.no_grad():
                layer.weight.copy_(along[None])
            exact.load_state_dict(layer.state_dict())
            x = (sign * (along * math.cos(theta) + across * math.sin(theta)))[None].float().requires_grad_()
            doubled = x.detach().double().requires_grad_()
            with sn.backend(path):
                out = layer(x)
            (gradient,) = torch.autograd.grad(out, x)
            expected = exact(doubled)
            (precise,) = torch.autograd.grad(expected, doubled)
            error = ((gradient - precise).norm() / precise.norm()).item()
            if theta > 1e-3:
                assert abs(out.item() - expected.item()) < steepest * 6e-7 / theta, theta
            if uses_cosine_only:
                assert error < 1e-6 / theta, theta
            elif theta > 1e-3:
                assert error < 8e-7 / theta**2, theta
            assert gradient.norm() < 1.05 * steepest / 100
