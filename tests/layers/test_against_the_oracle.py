"""Layers equal the reference in value and gradients, over geometries × operators, in float64."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import spherenet as sn
from cases import GEOMETRIES, OPERATORS, Geometry, oracle_conv, oracle_linear

every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


def assert_same_with_gradients(layer, inputs, expected_function):
    """Compare outputs, and the gradients of inputs and of every parameter, under a random weighting of outputs."""
    inputs.requires_grad_()
    got, expected = layer(inputs), expected_function(inputs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    weighting = torch.randn_like(got)
    tensors = [inputs, *layer.parameters()]
    names = ["input", *(name for name, _ in layer.named_parameters())]
    for name, a, b in zip(
        names,
        torch.autograd.grad(got, tensors, weighting),
        torch.autograd.grad(expected, tensors, weighting),
        strict=True,
    ):
        torch.testing.assert_close(
            a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )


@every_operator
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_convolutions_equal_oracle(geometry, operator):
    layer = geometry.layer(**operator.arguments)
    assert_same_with_gradients(layer, geometry.images(), lambda x: oracle_conv(layer, x, operator))


@every_operator
@pytest.mark.parametrize("geometry", [GEOMETRIES[0], GEOMETRIES[6], GEOMETRIES[16], GEOMETRIES[23]], ids=str)
def test_convolutions_with_bias_and_learned_rescaling(geometry, operator):
    layer = geometry.layer(**operator.arguments, bias=True, rescale="learned")
    torch.nn.init.normal_(layer.beta)
    torch.nn.init.normal_(layer.gamma)
    assert_same_with_gradients(layer, geometry.images(), lambda x: oracle_conv(layer, x, operator))


@every_operator
def test_fixed_rescaling(operator):
    geometry = GEOMETRIES[6]
    layer = geometry.layer(**operator.arguments, rescale=(2.5, -0.5))
    assert_same_with_gradients(layer, geometry.images(), lambda x: oracle_conv(layer, x, operator))
    assert not any("beta" in name for name in layer.state_dict())


@every_operator
@pytest.mark.parametrize("extras", [{}, {"bias": True, "rescale": "learned"}], ids=["plain", "bias-rescale"])
def test_linear_equals_oracle(operator, extras):
    layer = sn.SphereLinear(7, 5, **operator.arguments, **extras, dtype=torch.float64)
    assert_same_with_gradients(layer, torch.randn(6, 7).double(), lambda x: oracle_linear(layer, x, operator))


def test_linear_takes_any_leading_dimensions():
    layer = sn.SphereLinear(7, 5, operator="learnable")
    x = torch.randn(2, 3, 4, 7)
    torch.testing.assert_close(layer(x), layer(x.flatten(0, 2)).reshape(2, 3, 4, 5))
    torch.testing.assert_close(layer(x[0, 0, 0]), layer(x)[0, 0, 0])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_unbatched_input_equals_batch_of_one(geometry):
    layer, images = geometry.layer(operator="learnable", bias=True, rescale="learned"), geometry.images(1)
    torch.testing.assert_close(layer(images[0]), layer(images)[0])


def test_linear_equals_convolution_with_kernel_of_input_size():
    conv = sn.SphereConv2d(3, 5, 4, operator="sigmoid")
    linear = sn.SphereLinear(48, 5, operator="sigmoid")
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(conv(images).flatten(1), linear(images.flatten(1)))


@st.composite
def geometries(draw):
    dims = draw(st.integers(1, 3))

    def sizes(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, dilation, padding = sizes(1, 3), sizes(1, 2), sizes(0, 2)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = tuple(draw(st.integers(max(2, r - 2 * p), 5)) for r, p in zip(reach, padding, strict=True))
    groups = draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    if mode != "zeros":
        padding = tuple(min(p, n - 1) for p, n in zip(padding, size, strict=True))
        size = tuple(max(n, r - 2 * p) for n, r, p in zip(size, reach, padding, strict=True))
    arguments = {
        "stride": sizes(1, 3), "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode,
    }  # fmt: skip
    return Geometry(dims, size, kernel, groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), arguments)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(geometry=geometries(), operator=st.sampled_from(OPERATORS))
def test_random_geometries(geometry, operator):
    layer, images = geometry.layer(**operator.arguments), geometry.images(1)
    torch.testing.assert_close(layer(images), oracle_conv(layer, images, operator), rtol=1e-10, atol=1e-10)
