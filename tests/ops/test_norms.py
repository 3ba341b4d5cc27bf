"""Norms against explicit sums, over all geometries, and for very small and large numbers."""

import pytest
import torch

from cases import GEOMETRIES, geometry_of
from oracle import sphere_conv as reference
from spherenet.ops.geometry import Geometry, convolve, pad_input, resolve_padding
from spherenet.ops.norms import direction, norm, patch_norm


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_patch_norm_equals_norm_of_each_patch(geometry):
    layer, images = geometry.layer(), geometry.images()
    norms = patch_norm(images, geometry_of(layer), eps=1e-3)
    for n, image in enumerate(pad_input(images, geometry_of(layer))):
        for group, channels in enumerate(image.chunk(layer.groups)):
            patches, size = reference.patches(channels, layer.kernel_size, layer.stride, layer.dilation)
            expected = torch.stack([(x.square().sum() + 1e-3).sqrt() for x in patches]).reshape(size)
            torch.testing.assert_close(norms[n, group], expected)
    torch.testing.assert_close(patch_norm(images[0], geometry_of(layer), eps=1e-3), norms[0])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # of the plain layer
def test_padding_equals_torch(geometry):
    layer, images = geometry.layer(), geometry.images()
    layer_class = getattr(torch.nn, f"Conv{geometry.dims}d")
    plain = layer_class(
        geometry.channels, geometry.filters, geometry.kernel, **geometry.arguments, bias=False, dtype=torch.float64
    )
    padded = pad_input(images, geometry_of(layer))
    unpadded = getattr(torch.nn.functional, f"conv{geometry.dims}d")(
        padded, plain.weight, None, plain.stride, 0, plain.dilation, plain.groups
    )
    torch.testing.assert_close(unpadded, plain(images))
    resolved, numeric = resolve_padding(images, geometry_of(layer))
    torch.testing.assert_close(convolve(resolved, plain.weight, numeric), plain(images))


def test_norm_includes_eps_and_keeps_the_dimension():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(norm(x, 1, eps=1e-4), torch.tensor([[25.0001], [1e-4]]).sqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norms_are_float32(dtype):
    x = torch.full((2, 4096), 60.0, dtype=dtype)  # Σx² = 1.5e7 overflows float16
    assert norm(x, 1).dtype == torch.float32
    torch.testing.assert_close(norm(x, 1), torch.full((2, 1), 60.0 * 64))
    assert direction(x, 1).dtype == dtype


@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e-3, 1.0, 1e9, 1e18])
def test_norms_are_accurate_from_1e_minus_18_to_1e18(scale):
    x = torch.randn(2, 600, 5, 5)  # fan-in 5,400: the sum of squares alone would overflow at 1e18
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    expected = patch_norm(x.double() * scale, geometry, eps=1e-30)
    torch.testing.assert_close(patch_norm(x * scale, geometry, eps=1e-30).double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        norm(x.flatten(1) * scale, 1, 1e-30).double(), norm(x.double().flatten(1) * scale, 1, 1e-30), rtol=1e-5, atol=0
    )


def test_overflowing_norm_is_inf_with_direction_zero():
    x = torch.full((1, 8), 1e30)
    assert norm(x, 1).isinf().all()
    assert (direction(x, 1) == 0).all()
