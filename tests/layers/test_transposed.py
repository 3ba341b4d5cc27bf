"""Transposed sphere layers equal a SphereConv of the input with zeros between its pixels and the flipped kernels."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from cases import OPERATORS, finish
from oracle import sphere_conv as reference
from spherenet import functional

PLAIN = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SPHERE = {1: sn.SphereConvTranspose1d, 2: sn.SphereConvTranspose2d, 3: sn.SphereConvTranspose3d}
FUNCTIONS = {
    1: functional.sphere_conv_transpose1d,
    2: functional.sphere_conv_transpose2d,
    3: functional.sphere_conv_transpose3d,
}

# Spatial size of the input, kernel size, and arguments.
GEOMETRIES = [
    ((5,), 3, {}),
    ((4,), 4, {"stride": 2, "padding": 1}),
    ((4,), 3, {"stride": 3, "padding": 2, "output_padding": 2, "dilation": 2}),
    ((4, 3), 3, {}),
    ((4, 4), 3, {"padding": 1}),
    ((3, 4), 3, {"stride": 2, "padding": 1, "output_padding": 1}),
    ((3, 3), 2, {"stride": 2}),
    ((3, 3), 1, {"stride": 2, "output_padding": 1}),
    ((3, 3), 1, {}),
    ((3, 3), 2, {"stride": 3}),
    ((3, 4), (3, 2), {"stride": (2, 1), "padding": (2, 0), "dilation": (1, 2), "output_padding": (1, 0)}),
    ((3, 3), 3, {"groups": 2, "stride": 2}),
    ((3, 3), 3, {"groups": 4, "padding": 1, "dilation": 2, "output_padding": 1}),
    ((2, 3, 2), 2, {"stride": 2}),
    ((2, 2, 3), (2, 1, 3), {"stride": (1, 2, 2), "padding": (1, 0, 1), "output_padding": (0, 1, 1), "groups": 2}),
]
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
every_dimension = pytest.mark.parametrize("dims", [1, 2, 3])


def make_layer(geometry, dtype=torch.float64, **options):
    size, kernel, arguments = geometry
    return SPHERE[len(size)](4, 4, kernel, **arguments, **options, dtype=dtype)


def make_input(geometry, dtype=torch.float64, batch=2):
    return torch.randn(batch, 4, *geometry[0], dtype=dtype)


def stuffed_input(layer, x):
    """Return x with stride − 1 zeros between its pixels, padded for a convolution with the flipped kernels."""
    size = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)]
    stuffed = x.new_zeros(*x.shape[:2], *size)
    stuffed[(..., *(slice(None, None, s) for s in layer.stride))] = x
    amounts = []
    for k, d, p, o in zip(layer.kernel_size, layer.dilation, layer.padding, layer.output_padding, strict=True):
        amounts = [d * (k - 1) - p, d * (k - 1) - p + o, *amounts]
    return F.pad(stuffed, amounts)


def convolution_weight(layer):
    """Return the weight [C, O/groups, *kernel] as flipped kernels [O, C/groups, *kernel], filter by filter."""
    channels, filters = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    kernels = []
    for index in range(layer.out_channels):
        first = index // filters * channels
        kernels.append(layer.weight[first : first + channels, index % filters])
    return torch.stack(kernels).flip(list(range(2, layer.weight.dim())))


def oracle(layer, x, operator):
    def g(theta, index):
        parameter = layer.angle.k
        return operator.g(theta, parameter[index] if isinstance(parameter, torch.Tensor) else parameter)

    ones = [1] * (x.dim() - 2)
    weight = convolution_weight(layer)
    out = reference.sphere_conv(stuffed_input(layer, x), weight, g, ones, layer.dilation, layer.groups, layer.eps)
    return finish(layer, out, x.dim() - 2)


def convolve_with_options(layer, x):
    """Return the output of the SphereConv function, whose options are tested against separate oracles."""
    function = {3: functional.sphere_conv1d, 4: functional.sphere_conv2d, 5: functional.sphere_conv3d}[x.dim()]
    with sn.backend("reference"):
        return function(
            stuffed_input(layer, x), convolution_weight(layer), dilation=layer.dilation, groups=layer.groups,
            operator=layer.angle, center=layer.center, magnitude=layer.magnitude, eps=layer.eps,
        )  # fmt: skip


def assert_same_with_gradients(layer, x, expected_function):
    x.requires_grad_()
    out, expected = layer(x), expected_function(x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weighting = torch.randn_like(out)
    tensors = [x, *layer.parameters()]
    for gradient, other in zip(
        torch.autograd.grad(out, tensors, weighting), torch.autograd.grad(expected, tensors, weighting), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


@every_operator
@every_geometry
def test_output_and_gradients_equal_oracle(geometry, operator):
    layer = make_layer(geometry, **operator.arguments)
    assert_same_with_gradients(layer, make_input(geometry, batch=1), lambda x: oracle(layer, x, operator))


@every_operator
def test_bias_and_learned_rescaling_equal_oracle(operator):
    layer = make_layer(GEOMETRIES[5], **operator.arguments, bias=True, rescale="learned")
    nn.init.normal_(layer.beta)
    nn.init.normal_(layer.gamma)
    assert_same_with_gradients(layer, make_input(GEOMETRIES[5]), lambda x: oracle(layer, x, operator))


@pytest.mark.parametrize("magnitude", [None, "ball", "linear", "tanh"])
@pytest.mark.parametrize("center", [None, "weight", "patch"])
@pytest.mark.parametrize("geometry", [GEOMETRIES[1], GEOMETRIES[5], GEOMETRIES[11], GEOMETRIES[14]], ids=str)
def test_center_and_magnitude_equal_sphere_conv(geometry, center, magnitude):
    layer = make_layer(geometry, operator="sigmoid", center=center, magnitude=magnitude)
    assert_same_with_gradients(layer, make_input(geometry), lambda x: convolve_with_options(layer, x))


def test_learned_radius_has_gradient():
    layer = make_layer(GEOMETRIES[5], magnitude="tanh", radius="learned")
    layer(make_input(GEOMETRIES[5])).square().sum().backward()
    assert (layer.magnitude.raw_radius.grad != 0).all()


@every_geometry
def test_output_shape_equals_torch(geometry):
    layer, x = make_layer(geometry), make_input(geometry)
    size, kernel, arguments = geometry
    assert layer(x).shape == PLAIN[len(size)](4, 4, kernel, **arguments, dtype=torch.float64)(x).shape


@every_dimension
def test_unbatched_input_equals_batch_of_one(dims):
    layer, x = SPHERE[dims](4, 6, 3, 2, rescale="learned", bias=True), torch.randn(1, 4, *(3,) * dims)
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


@every_dimension
def test_functions_equal_layers(dims):
    layer = SPHERE[dims](4, 6, 3, 2, 1, 1, 2, True, 2, operator="sigmoid", k=0.4, rescale=(2.0, 0.5), center="weight")
    x = torch.randn(2, 4, *(3,) * dims)
    out = FUNCTIONS[dims](
        x, layer.weight, layer.bias, 2, 1, 1, 2, 2, operator="sigmoid", k=0.4, beta=2.0, gamma=0.5, center="weight"
    )
    torch.testing.assert_close(out, layer(x))


@every_dimension
def test_output_size_replaces_output_padding(dims):
    layer, plain = SPHERE[dims](4, 6, 3, 2, 1), PLAIN[dims](4, 6, 3, 2, 1)
    x = torch.randn(2, 4, *(3,) * dims)
    for size in (5, 6):
        out = layer(x, output_size=[size] * dims)
        assert out.shape == plain(x, output_size=[size] * dims).shape == (2, 6, *(size,) * dims)
    with pytest.raises(ValueError, match="output size"):
        layer(x, output_size=[9] * dims)


@every_dimension
def test_weights_are_initialized_like_torch(dims):
    torch.manual_seed(3)
    layer = SPHERE[dims](4, 6, 3, groups=2, bias=True)
    torch.manual_seed(3)
    plain = PLAIN[dims](4, 6, 3, groups=2)
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(layer.bias, plain.bias)


@every_operator
def test_gradients_against_finite_differences(operator):
    layer = sn.SphereConvTranspose2d(2, 3, 3, 2, 1, 1, **operator.arguments, rescale="learned", dtype=torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *values), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, (x, *values))


@pytest.mark.parametrize("center", [None, "weight", "patch"])
@every_operator
def test_zero_input_has_output_zero_and_finite_gradients(operator, center):
    layer = sn.SphereConvTranspose2d(2, 3, 3, 2, **operator.arguments, center=center)
    x = torch.zeros(1, 2, 3, 3, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_operator
def test_pixel_that_no_input_reaches_is_zero(operator):
    layer = sn.SphereConvTranspose2d(2, 3, 1, 2, output_padding=1, **operator.arguments)
    x = torch.randn(1, 2, 3, 3, requires_grad=True)
    out = layer(x)
    assert not out[:, :, 1::2].any()
    assert not out[:, :, :, 1::2].any()
    assert out[:, :, ::2, ::2].all()
    out.sum().backward()
    assert x.grad.isfinite().all()


@every_operator
def test_parallel_kernel_has_output_one_and_finite_gradient(operator):
    layer = sn.SphereConvTranspose1d(4, 1, 1, **operator.arguments)
    x = (100 * layer.weight.detach()[:, 0, 0])[None, :, None].requires_grad_()
    for sign in (1, -1):
        out = layer(sign * x)
        torch.testing.assert_close(out, torch.full_like(out, sign), rtol=0, atol=2e-2)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [1e-15, 1e15, 1e18])
def test_large_and_small_values_have_no_nan(scale):
    layer = sn.SphereConvTranspose2d(2, 3, 3, 2)
    x = torch.randn(1, 2, 3, 3)
    scaled = (scale * x).requires_grad_()
    out = layer(scaled)
    if scale > 1:
        torch.testing.assert_close(out, layer(100 * x), rtol=1e-3, atol=1e-3)
    out.sum().backward()
    assert scaled.grad.isfinite().all()


@pytest.mark.parametrize("magnitude", [None, "ball", "tanh", "linear", "log"])
@pytest.mark.parametrize("center", [None, "weight", "patch"])
@pytest.mark.parametrize("scale", [1e-18, 1e13, 1e18])
def test_small_and_large_values_have_the_gradient_of_float64(scale, center, magnitude):
    options = {"center": center, "magnitude": magnitude}
    options |= {"radius": 2 * scale} if magnitude in ("ball", "tanh") else {}
    layer = sn.SphereConvTranspose2d(2, 3, 3, 2, **options)
    double = copy.deepcopy(layer).double()
    x = (torch.randn(1, 2, 3, 3) * scale).requires_grad_()
    wide, grad = x.detach().double().requires_grad_(), torch.randn(1, 3, 7, 7)
    (gradient,) = torch.autograd.grad(layer(x), x, grad)
    (expected,) = torch.autograd.grad(double(wide), wide, grad.double())
    assert (gradient - expected).abs().max() <= 60 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_overflow_is_treated_as_zero_patch():
    layer = sn.SphereConvTranspose2d(2, 3, 2, 2)
    x = torch.randn(1, 2, 2, 2)
    x[0, 0, 0, 0] = 1e38
    x.requires_grad_()
    out = layer(x)
    assert not out[:, :, :2, :2].any()
    assert out[:, :, 2:].all()
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()


def test_nan_spreads_to_the_pixels_that_it_reaches():
    layer = sn.SphereConvTranspose1d(1, 1, 2, 2)
    out = layer(torch.tensor([[[1.0, math.nan, 2.0]]]))
    assert out.isnan().flatten().tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_operator
def test_half_precision_is_close_to_float32(operator, dtype):
    layer = sn.SphereConvTranspose2d(4, 6, 3, 2, 1, **operator.arguments, rescale="learned").to(dtype)
    x = torch.randn(2, 4, 3, 3).to(dtype).requires_grad_()
    out = layer(x)
    expected = copy.deepcopy(layer).float()(x.float())
    assert out.dtype == dtype
    steepest = max(1.0, operator.steepest())
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.02 * steepest)
    out.sum().backward()
    assert x.grad.dtype == dtype
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("center", [None, "patch"])
def test_autocast_returns_dtype_of_autocast(center):
    layer, x = sn.SphereConvTranspose2d(4, 6, 3, 2, center=center), torch.randn(2, 4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), rtol=0, atol=0.02)
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_empty_batch():
    layer = sn.SphereConvTranspose2d(4, 6, 3, 2, bias=True)
    out = layer(torch.randn(0, 4, 3, 3))
    assert out.shape == (0, 6, 7, 7)
    out.sum().backward()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_give_same_output(copier):
    layer, x = sn.SphereConvTranspose2d(4, 6, 3, 2, operator="learnable", rescale="learned"), torch.randn(1, 4, 3, 3)
    assert torch.equal(copier(layer)(x), layer(x))


def test_torch_compile_and_export_give_same_output():
    layer, x = sn.SphereConvTranspose2d(4, 6, 3, 2, operator="sigmoid").eval(), torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_freeze_keeps_output():
    model = nn.Sequential(sn.SphereConv2d(3, 4, 3), sn.SphereConvTranspose2d(4, 6, 3, 2), nn.BatchNorm2d(6)).eval()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(sn.freeze(model)(x), model(x))


def test_output_does_not_depend_on_the_norm_of_a_kernel():
    layer, x = sn.SphereConvTranspose2d(4, 6, 3, 2, groups=2, eps=1e-12), torch.randn(1, 4, 3, 3)
    before = layer(x)
    with torch.no_grad():
        layer.weight[:2, 1] *= 7  # filter 1 of the first group
    torch.testing.assert_close(layer(x), before)


def test_regularizers_and_kept_norms_use_kernels_of_filters():
    layer = sn.SphereConvTranspose2d(4, 6, 3, groups=2)
    kernels = convolution_weight(layer).flatten(1)
    expected = sum((k @ k.T - torch.eye(3)).square().sum() for k in (kernels[:3], kernels[3:]))
    torch.testing.assert_close(sn.orthogonality(layer), expected)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    sn.keep_norms(optimizer, layer)
    layer(torch.randn(1, 4, 3, 3)).square().sum().backward()
    optimizer.step()
    after = convolution_weight(layer).flatten(1)
    assert not torch.equal(after, kernels)
    torch.testing.assert_close(after.norm(dim=1), kernels.norm(dim=1))


make = sn.SphereConvTranspose2d
BAD_INPUT = {
    "unknown operator": (lambda: make(3, 4, 3, operator="cosin"), ValueError, "'cosin'.*mean 'cosine'"),
    "zero eps": (lambda: make(3, 4, 3, eps=0), ValueError, "eps must be greater than 0"),
    "center of one entry": (lambda: make(1, 4, 1, center="patch"), ValueError, "center must be None.*single entry"),
    "unknown center": (lambda: make(3, 4, 3, center="kernel"), ValueError, "center must be one of"),
    "unknown magnitude": (lambda: make(3, 4, 3, magnitude="bal"), ValueError, "magnitude must be one of"),
    "padding mode": (lambda: make(3, 4, 3, padding_mode="reflect"), ValueError, "zeros"),
    "unknown option": (lambda: make(3, 4, 3, cente="weight"), TypeError, "did you mean 'center'"),
    "groups": (lambda: make(3, 4, 3, groups=2), ValueError, "divisible by groups"),
    "channels": (lambda: make(3, 4, 3)(torch.randn(1, 2, 3, 3)), ValueError, "input must have 3 channels.*got 2"),
    "rank": (lambda: make(3, 4, 3)(torch.randn(3, 3)), ValueError, r"3 \(unbatched\) or 4 \(batched\).*got 2"),
    "dtype": (lambda: make(3, 4, 3)(torch.randn(1, 3, 3, 3).double()), TypeError, "dtype of weight"),
    "integers": (lambda: make(3, 4, 3)(torch.ones(1, 3, 3, 3).int()), TypeError, "floating point"),
    "output padding": (
        lambda: make(3, 4, 3, output_padding=1)(torch.randn(1, 3, 3, 3)), RuntimeError, "output padding",
    ),
    "weight rank of a function": (
        lambda: functional.sphere_conv_transpose2d(torch.randn(1, 3, 3, 3), torch.randn(3, 4)),
        ValueError, "weight must have 4 dimensions",
    ),
    "groups of a function": (
        lambda: functional.sphere_conv_transpose2d(torch.randn(1, 3, 3, 3), torch.randn(3, 4, 2, 2), groups=2),
        ValueError, "groups must divide the 3 input channels",
    ),
    "padding of a function": (
        lambda: functional.sphere_conv_transpose2d(torch.randn(1, 3, 3, 3), torch.randn(3, 4, 2, 2), padding="same"),
        TypeError, "padding must be a number",
    ),
    "learnable k of a function": (
        lambda: functional.sphere_conv_transpose1d(torch.randn(1, 3, 3), torch.randn(3, 4, 2), operator="learnable"),
        ValueError, "owns no k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_raises(case):
    call, error, message = BAD_INPUT[case]
    with pytest.raises(error, match=message):
        call()
