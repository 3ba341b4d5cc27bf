"""Lanczos's method against exact spectra, and the lemmas' move on the layers of networks."""

from functools import partial

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.theory import spectra as twins
from spherenet.theory.conditioning import fitted_exponent
from spherenet.theory.features import Digits
from spherenet.theory.spectra import (
    HessianProduct,
    compare_twins,
    lanczos,
    loss_hessian,
    rescaled,
    small_network,
    spectrum,
)


def product_with(matrix):
    return HessianProduct(len(matrix), lambda vector: matrix @ vector)


def whole(hessian):
    return torch.stack([hessian.times(unit) for unit in torch.eye(hessian.rows, dtype=torch.float64)])


def tiny_network(operator):
    torch.manual_seed(0)
    layer = nn.Conv2d(1, 2, 3, bias=False) if operator is None else sn.SphereConv2d(1, 2, 3, operator=operator)
    features = nn.Sequential(layer, nn.Softplus(), nn.Flatten())
    return sn.models.Classifier(features, sn.AngularHead(2 * 3 * 3, 3), sn.SoftmaxLoss(), {}).double()


@pytest.fixture
def batch():
    return torch.randn(6, 1, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])


def test_all_steps_give_all_eigenvalues():
    matrix = torch.randn(12, 12, dtype=torch.float64)
    matrix = matrix + matrix.mT
    values, weights = lanczos(product_with(matrix), 12, torch.randn(12, dtype=torch.float64))
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix), rtol=1e-9, atol=1e-9)
    assert weights.sum() == pytest.approx(1)


def test_converged_values_come_once_and_the_end_is_noticed():
    matrix = torch.diag(torch.tensor([5.0, 5.0, 2.0, 0.0, 0.0, 0.0])).double()
    values, weights = lanczos(product_with(matrix), 50, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(values, torch.tensor([0.0, 2.0, 5.0]).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(weights, torch.tensor([3.0, 1.0, 2.0]).double() / 6)


def test_a_zero_hessian_has_no_spread():
    found = spectrum(product_with(torch.zeros(4, 4, dtype=torch.float64)), probes=2)
    assert (found.largest, found.mean_magnitude, found.spread) == (0, 0, 0)


@pytest.mark.parametrize("operator", [None, "cosine", "linear", "sigmoid", "learnable"])
def test_products_are_those_of_the_exact_hessian(operator, batch):
    model = tiny_network(operator)
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]

    def loss(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        values = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(model, values, batch)[0]

    point = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    hessian = loss_hessian(model, *batch)
    torch.testing.assert_close(whole(hessian), torch.func.hessian(loss)(point), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("operator", [None, "cosine"])
def test_spectrum_is_that_of_the_exact_hessian(operator, batch):
    hessian = loss_hessian(tiny_network(operator), *batch)
    exact = torch.linalg.eigvalsh(whole(hessian))
    found = spectrum(hessian, steps=25, probes=8)
    assert found.parameters == len(exact)
    assert found.largest == pytest.approx(exact[-1].item(), rel=1e-3)
    assert found.smallest == pytest.approx(exact[0].item(), abs=1e-3 * exact[-1].item())
    mean = exact.abs().mean().item()
    assert abs(found.mean_magnitude - mean) < 4 * found.mean_error
    assert found.mean_error < 0.3 * mean
    assert found.spread == pytest.approx(found.largest / found.mean_magnitude)
    assert found == spectrum(hessian, steps=25, probes=8)


@pytest.fixture(scope="module")
def digits():
    return Digits(torch.float64, shrink=2)


@pytest.mark.parametrize(
    ("operator", "renormalise"),
    [(None, False), ("cosine", False), ("cosine", True), ("sigmoid", False), ("sigmoid", True)],
)
def test_the_move_changes_no_output(operator, renormalise, digits):
    images, _ = digits.test(16)
    model = small_network(operator, digits.side, batch_norm=False, seed=0)
    moved = rescaled(model, 4.0, renormalise=renormalise)
    # eps under the root of ‖w‖² is felt a little by the kernels that shrink.
    torch.testing.assert_close(moved(images), model(images), rtol=1e-2, atol=1e-3 if operator else 1e-12)


@pytest.mark.parametrize(
    ("operator", "renormalise", "scales", "exponent"),
    [
        (None, False, (64.0, 256.0), 2),
        ("cosine", False, (8.0, 32.0), 2),  # beyond, eps outweighs the kernels
        ("cosine", True, (8.0, 32.0), 0),
    ],
)
def test_exponents_of_the_move_on_real_layers(operator, renormalise, scales, exponent, digits):
    batch = digits.test(8)
    model = small_network(operator, digits.side, batch_norm=False, seed=0)
    largest = [
        spectrum(loss_hessian(rescaled(model, c, renormalise=renormalise), *batch), probes=1).largest for c in scales
    ]
    found = fitted_exponent(scales, largest)
    assert found == pytest.approx(exponent, abs=0.25 if exponent else 1e-6)


def test_twins_are_compared_along_the_same_way(monkeypatch):
    monkeypatch.setattr(twins, "MEASURED_DIGITS", 16)
    monkeypatch.setattr(twins, "PROBES", 1)
    monkeypatch.setattr(twins, "spectrum", partial(spectrum, steps=8))
    monkeypatch.setattr(twins, "SCALES", (1.0, 4.0, 16.0))
    seen = []
    report = compare_twins("cosine", steps=2, batch_norm=True, progress=lambda done, total: seen.append((done, total)))
    assert [(point.network, point.step) for point in report.measured] == [
        (network, step) for network in ("CNN", "SphereNet") for step in (0, 1, 2)
    ]
    assert [case.case for case in report.rescaled] == ["CNN", "SphereNet, raw", "SphereNet, renormalised"]
    assert report.rescaled[2].exponent == pytest.approx(0, abs=1e-6)
    assert seen == [(done, 15) for done in range(16)]
    with pytest.raises(ValueError, match="steps must be at least 1"):
        compare_twins(steps=0)
