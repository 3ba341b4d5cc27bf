"""Sphere layers of a model and their kernels as matrices."""

import pytest
import torch
from torch import nn

from spherenet.layers import LazySphereConv2d, SphereConv2d, SphereLinear
from spherenet.regularizers import sphere_layers
from spherenet.regularizers.kernels import kernel_matrix


def test_names_of_sphere_layers():
    conv, linear = SphereConv2d(3, 4, 3), SphereLinear(4, 2)
    model = nn.ModuleDict({"body": nn.Sequential(conv, nn.ReLU(), nn.Conv2d(4, 4, 1)), "top": linear})
    assert sphere_layers(model) == {"body.0": conv, "top": linear}
    assert sphere_layers([model, conv]) == {"0.body.0": conv, "0.top": linear}
    assert sphere_layers(conv) == {"SphereConv2d": conv}
    assert sphere_layers(sphere_layers(model)) == sphere_layers(model)
    assert sphere_layers(nn.Conv2d(3, 4, 3)) == {}


def test_lazy_layer_is_listed_after_its_first_batch():
    layer = LazySphereConv2d(4, 3)
    with pytest.raises(ValueError, match="LazySphereConv2d is lazy"):
        sphere_layers(layer)
    layer(torch.zeros(1, 3, 5, 5))
    assert list(sphere_layers(layer)) == ["SphereConv2d"]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (SphereLinear(5, 3), (1, 3, 5)),
        (SphereConv2d(4, 6, (3, 2)), (1, 6, 24)),
        (SphereConv2d(4, 6, 3, groups=2), (2, 3, 18)),
        (SphereConv2d(4, 6, 3).to(memory_format=torch.channels_last), (1, 6, 36)),
        (SphereConv2d(4, 6, 3, groups=2).bfloat16(), (2, 3, 18)),
    ],
)
def test_kernel_matrix_has_one_kernel_per_row(layer, shape):
    matrix = kernel_matrix(layer)
    assert matrix.shape == shape
    assert matrix.dtype == torch.float32
    for row, kernel in zip(matrix.flatten(0, 1), layer.weight, strict=True):
        assert row.sort().values.equal(kernel.float().flatten().sort().values)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernel_matrix_is_a_view_in_either_memory_format(layout):
    layer = SphereConv2d(4, 6, 3).to(memory_format=layout)
    assert kernel_matrix(layer).data_ptr() == layer.weight.data_ptr()
