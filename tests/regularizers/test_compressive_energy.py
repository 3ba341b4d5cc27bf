"""Compressive hyperspherical energy: the energy of randomly projected kernels."""

import pytest
import torch

from spherenet.layers import SphereLinear
from spherenet.regularizers import hyperspherical_energy


def generator():
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("half_space", [False, True])
def test_equals_the_energy_of_projected_kernels(half_space):
    layer = SphereLinear(20, 6, dtype=torch.float64)
    value = hyperspherical_energy(layer, half_space=half_space, compressed_dim=4, projections=3, generator=generator())
    draw, energies = generator(), []
    for _ in range(3):
        projected = SphereLinear(4, 6, dtype=torch.float64)
        with torch.no_grad():
            projected.weight.copy_(layer.weight @ torch.randn(20, 4, generator=draw, dtype=torch.float64) / 2)
        energies.append(hyperspherical_energy(projected, half_space=half_space))
    torch.testing.assert_close(value, torch.stack(energies).mean())
    value.backward()
    assert layer.weight.grad.any()


def test_no_projection_if_the_fan_in_is_not_larger():
    layer = SphereLinear(4, 6)
    assert torch.equal(hyperspherical_energy(layer, compressed_dim=4), hyperspherical_energy(layer))


@pytest.mark.parametrize("options", [{"compressed_dim": 0}, {"compressed_dim": 4, "projections": 0}])
def test_invalid_arguments(options):
    with pytest.raises(ValueError, match=r"must be at least 1, got 0\."):
        hyperspherical_energy(SphereLinear(8, 6), **options)
