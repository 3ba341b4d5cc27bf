"""The Lanczos method compared with exact spectra, and rescaled layers of networks."""

from functools import partial

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet_paper.theory import spectra
from spherenet_paper.theory.conditioning import fitted_exponent
from spherenet_paper.theory.features import Digits
from spherenet_paper.theory.spectra import (
    HessianProduct,
    compare_networks,
    lanczos,
    loss_hessian,
    rescaled,
    small_network,
    spectrum,
)


def product_with(matrix):
    return HessianProduct(len(matrix), lambda vector: matrix @ vector)


def full_matrix(hessian):
    return torch.stack([hessian.times(unit) for unit in torch.eye(hessian.rows, dtype=torch.float64)])


def tiny_network(operator):
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 2, 3, bias=False) if operator is None else sn.SphereConv2d(1, 2, 3, operator=operator)
    features = nn.Sequential(layer, nn.Softplus(), nn.Flatten())
    return sn.models.Classifier(features, sn.AngularHead(2 * 3 * 3, 3), sn.SoftmaxLoss(), {}).double()


@pytest.fixture
def batch():
    return torch.randn(6, 1, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])


def test_lanczos_with_all_steps_finds_all_eigenvalues():
    matrix = torch.randn(12, 12, dtype=torch.float64)
    matrix = matrix + matrix.mT
    values, weights = lanczos(product_with(matrix), 12, torch.randn(12, dtype=torch.float64))
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix), rtol=1e-9, atol=1e-9)
    assert weights.sum() == pytest.approx(1)


def test_lanczos_finds_eigenvalues_once_and_ends_early():
    matrix = torch.diag(torch.tensor([5.0, 5.0, 2.0, 0.0, 0.0, 0.0])).double()
    values, weights = lanczos(product_with(matrix), 50, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(values, torch.tensor([0.0, 2.0, 5.0]).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(weights, torch.tensor([3.0, 1.0, 2.0]).double() / 6)


def test_zero_hessian_has_zero_spread():
    estimate = spectrum(product_with(torch.zeros(4, 4, dtype=torch.float64)), probes=2)
    assert (estimate.largest, estimate.mean_magnitude, estimate.spread) == (0, 0, 0)


@pytest.mark.parametrize("operator", [None, "cosine", "linear", "sigmoid", "learnable"])
def test_products_match_the_exact_hessian(operator, batch):
    model = tiny_network(operator)
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]

    def loss(flat):
        segments = flat.split([shape.numel() for shape in shapes])
        values = {name: segment.view(shape) for name, segment, shape in zip(names, segments, shapes, strict=True)}
        return torch.func.functional_call(model, values, batch)[0]

    point = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    hessian = loss_hessian(model, *batch)
    torch.testing.assert_close(full_matrix(hessian), torch.func.hessian(loss)(point), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("operator", [None, "cosine"])
def test_spectrum_matches_the_exact_hessian(operator, batch):
    hessian = loss_hessian(tiny_network(operator), *batch)
    exact = torch.linalg.eigvalsh(full_matrix(hessian))
    estimate = spectrum(hessian, steps=25, probes=8)
    assert estimate.parameters == len(exact)
    assert estimate.largest == pytest.approx(exact[-1].item(), rel=1e-3)
    assert estimate.smallest == pytest.approx(exact[0].item(), abs=1e-3 * exact[-1].item())
    mean = exact.abs().mean().item()
    assert abs(estimate.mean_magnitude - mean) < 4 * estimate.mean_error
    assert estimate.mean_error < 0.3 * mean
    assert estimate.spread == pytest.approx(estimate.largest / estimate.mean_magnitude)
    assert estimate == spectrum(hessian, steps=25, probes=8)


@pytest.fixture(scope="module")
def digits():
    return Digits(torch.float64, shrink=2)


@pytest.mark.parametrize(
    ("operator", "renormalize"),
    [(None, False), ("cosine", False), ("cosine", True), ("sigmoid", False), ("sigmoid", True)],
)
def test_rescaling_does_not_change_the_output(operator, renormalize, digits):
    images, _ = digits.test(16)
    model = small_network(operator, digits.side, batch_norm=False, seed=0)
    moved = rescaled(model, 4.0, renormalize=renormalize)
    # eps under the root of ‖w‖² has a small effect on the shrinking kernels.
    torch.testing.assert_close(moved(images), model(images), rtol=1e-2, atol=1e-3 if operator else 1e-12)


@pytest.mark.parametrize(
    ("operator", "renormalize", "scales", "exponent"),
    [
        (None, False, (64.0, 256.0), 2),
        ("cosine", False, (8.0, 32.0), 2),  # beyond, eps dominates the kernels
        ("cosine", True, (8.0, 32.0), 0),
    ],
)
def test_exponents_of_rescaled_layers(operator, renormalize, scales, exponent, digits):
    batch = digits.test(8)
    model = small_network(operator, digits.side, batch_norm=False, seed=0)
    largest = [
        spectrum(loss_hessian(rescaled(model, c, renormalize=renormalize), *batch), probes=1).largest for c in scales
    ]
    slope = fitted_exponent(scales, largest)
    assert slope == pytest.approx(exponent, abs=0.25 if exponent else 1e-6)


def test_networks_are_compared_at_the_same_steps(monkeypatch):
    monkeypatch.setattr(spectra, "MEASURED_DIGITS", 16)
    monkeypatch.setattr(spectra, "PROBES", 1)
    monkeypatch.setattr(spectra, "spectrum", partial(spectrum, steps=8))
    monkeypatch.setattr(spectra, "SCALES", (1.0, 4.0, 16.0))
    calls = []
    report = compare_networks(
        "cosine", steps=2, batch_norm=True, progress=lambda done, total: calls.append((done, total))
    )
    assert [(point.network, point.step) for point in report.measured] == [
        (network, step) for network in ("CNN", "SphereNet") for step in (0, 1, 2)
    ]
    assert [case.case for case in report.rescaled] == ["CNN", "SphereNet, raw", "SphereNet, renormalized"]
    assert report.rescaled[2].exponent == pytest.approx(0, abs=1e-6)
    assert calls == [(done, 15) for done in range(16)]
    with pytest.raises(ValueError, match="steps must be at least 1"):
        compare_networks(steps=0)
