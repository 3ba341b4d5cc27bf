"""1×1 kernels with a stride, whose skipped pixels are removed before the convolution."""

import subprocess
import sys

import pytest
import torch

import spherenet as sn

TRAIN = """
import torch
import spherenet as sn

images = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
for operator in ("cosine", None):
    for shortcut in ("plain", "operator"):
        model = sn.create_model("resnet-32", operator=operator, widths=(4, 4, 4), input_size=64, shortcut=shortcut)
        model = model.to(memory_format=torch.channels_last)
        for _ in range(3):
            model(images, torch.tensor([0, 1]))[0].backward()
print("done")
"""


@pytest.mark.parametrize("center", [None, "weight", "patch"])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_strided_kernels_of_one_pixel_equal_those_without_stride(dims, stride, center):
    layer_class = getattr(sn, f"SphereConv{dims}d")
    strided = layer_class(4, 5, 1, stride=stride, center=center, dtype=torch.float64)
    dense = layer_class(4, 5, 1, center=center, dtype=torch.float64)
    dense.load_state_dict(strided.state_dict())
    x = torch.randn(2, 4, *[7, 8, 9][:dims], dtype=torch.float64, requires_grad=True)
    expected = dense(x)[(..., *[slice(None, None, stride)] * dims)]
    actual = strided(x)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, [x, strided.weight], grad), torch.autograd.grad(expected, [x, dense.weight], grad)
    )
    assert torch.autograd.gradgradcheck(strided, x[:1].detach().requires_grad_(), fast_mode=True)


def test_narrow_residual_networks_do_not_corrupt_the_memory():
    """With strided 1×1 convolutions, oneDNN ends such a process with heap corruption on CPUs with AVX-512."""
    child = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr
