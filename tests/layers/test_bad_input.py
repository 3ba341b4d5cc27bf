"""Wrong arguments raise an error that states the argument, the value and what is allowed."""

import math
from functools import partial

import pytest
import torch

import spherenet as sn
from spherenet.functional import sphere_conv2d, sphere_conv_transpose1d, sphere_linear

conv = partial(sn.SphereConv2d, 3, 4, 3)
linear = partial(sn.SphereLinear, 3, 4)

CONSTRUCTORS = {
    "unknown operator": (lambda: conv(operator="cosin"), ValueError, "'cosin'.*mean 'cosine'"),
    "operator of another type": (lambda: conv(operator=3), TypeError, "AngleFunction object, got 3"),
    "zero k": (lambda: conv(operator="sigmoid", k=0), ValueError, "k must be greater than 0, got 0"),
    "negative k": (lambda: conv(operator="learnable", k=-0.5), ValueError, "k must.*got -0.5"),
    "NaN k": (lambda: conv(operator="sigmoid", k=math.nan), ValueError, "k must be finite, got nan"),
    "infinite k": (lambda: linear(operator="sigmoid", k=math.inf), ValueError, "k must be finite"),
    "k below use": (lambda: linear(operator="sigmoid", k=1e-9), ValueError, "at least 1e-06, got 1e-09"),
    "learned k below its floor": (lambda: linear(operator="learnable", k=0.01), ValueError, "than 0.01"),
    "k as text": (lambda: linear(operator="sigmoid", k="0.3"), TypeError, "k must be a number, got '0.3'"),
    "k for cosine": (lambda: linear(operator="cosine", k=0.3), ValueError, "k must be None.*cosine"),
    "k beside an object": (lambda: linear(operator=sn.LinearAngle(), k=0.3), ValueError, "k must be None"),
    "k_sharing": (lambda: linear(k_sharing="network"), ValueError, "'filter', 'layer', got 'network'"),
    "angle for other filters": (
        lambda: linear(operator=sn.LearnableSigmoidAngle(5)), ValueError, "must have 4 k.*with 5",
    ),
    "power for other filters": (
        lambda: linear(operator=sn.SharpenedCosineAngle(5)), ValueError, "must have 4 p.*with 5",
    ),
    "power below its floor": (lambda: sn.SharpenedCosineAngle(p=0.1), ValueError, "p must be greater than 0.1"),
    "negative power": (lambda: sn.SharpenedCosineAngle(p=-1), ValueError, "p must be greater than 0, got -1"),
    "k for a power": (lambda: linear(operator="square-cosine", k=2.0), ValueError, "k must be None.*square-cosine"),
    "unknown center": (lambda: conv(center="pach"), ValueError, "center.*'pach'.*mean 'patch'"),
    "center as a switch": (lambda: conv(center=True), ValueError, "center must be one of.*got True"),
    "center of single entries": (
        lambda: sn.SphereConv2d(1, 4, 1, center="weight"), ValueError, "center must be None.*single entry.*'weight'",
    ),
    "center of depthwise single entries": (
        lambda: sn.SphereConv2d(4, 4, 1, groups=4, center="patch"), ValueError, "center must be None.*'patch'",
    ),
    "center of one feature": (lambda: sn.SphereLinear(1, 4, center="patch"), ValueError, "center must be None"),
    "center of one hidden unit": (lambda: sn.SphereLSTM(3, 1, center="weight"), ValueError, "center must be None"),
    "negative number of k": (
        lambda: sn.LearnableSigmoidAngle(-1), ValueError, "num_filters must be at least 0, got -1",
    ),
    "number of p": (lambda: sn.SharpenedCosineAngle(2.5), TypeError, "num_filters must be an integer, got 2.5"),
    "number of radii": (lambda: sn.BallMagnitude(1.0, "4"), TypeError, "num_filters must be an integer, got '4'"),
    "radius without use": (
        lambda: sn.LinearMagnitude(5.0), ValueError, "radius must be None for the magnitude 'linear', which has none",
    ),
    "padding word of a transposed layer": (
        lambda: sn.SphereConvTranspose2d(3, 4, 3, padding="same"), TypeError, "padding must be a number or a sequence",
    ),
    "zero eps": (lambda: conv(eps=0), ValueError, "eps must be greater than 0, got 0"),
    "negative eps": (lambda: conv(eps=-1e-4), ValueError, "eps must be greater than 0, got -0.0001"),
    "rescale word": (lambda: conv(rescale="fixed"), ValueError, "rescale must.*got 'fixed'"),
    "rescale of three": (lambda: conv(rescale=(1, 2, 3)), ValueError, r"rescale must.*\(1, 2, 3\)"),
    "rescale of text": (lambda: conv(rescale=("a", 1)), TypeError, r"rescale\[0\] must be a number"),
    "padding mode": (lambda: conv(padding_mode="zero"), ValueError, "padding_mode"),
    "same with stride": (lambda: conv(padding="same", stride=2), ValueError, "same"),
    "groups": (lambda: conv(groups=2), ValueError, "in_channels must be divisible by groups"),
    "custom angle": (lambda: sn.CustomAngle(0.3), TypeError, "g must be a function of θ, got 0.3"),
}  # fmt: skip

CONV, LINEAR = conv(), linear()
IMAGE, ROW = torch.randn(1, 3, 6, 6), torch.randn(1, 3)
W2, W4 = torch.randn(4, 3), torch.randn(4, 3, 3, 3)


def call_linear(k=None, **parameters):
    return sphere_linear(ROW, W2, operator="sigmoid", k=k, **parameters)


def call_convolution(k=None, **parameters):
    return sphere_conv2d(IMAGE, W4, operator="sigmoid", k=k, **parameters)


def call_transposed(k=None, **parameters):
    return sphere_conv_transpose1d(IMAGE[0, ..., 0], torch.randn(3, 4, 2), operator="sigmoid", k=k, **parameters)


def _with_bias_of_three():
    layer = linear()
    layer.bias = torch.nn.Parameter(torch.zeros(3))
    return layer


CALLS = {
    "rank too low": (lambda: CONV(torch.randn(3, 6)), ValueError, r"3 \(unbatched\) or 4 \(batched\).*got 2"),
    "rank too high": (lambda: CONV(torch.randn(1, 1, 3, 6, 6)), ValueError, "input must have.*got 5"),
    "channels": (lambda: CONV(torch.randn(1, 2, 6, 6)), ValueError, "input must have 3 channels.*got 2"),
    "features": (lambda: LINEAR(torch.randn(2, 5)), ValueError, r"input must have 3 features.*\[2, 5\]"),
    "scalar to linear": (lambda: LINEAR(torch.tensor(1.0)), ValueError, "input must have 3 features"),
    "integers": (lambda: CONV(torch.ones(1, 3, 6, 6, dtype=torch.uint8)), TypeError, "floating point.*torch.uint8"),
    "complex": (lambda: CONV(torch.ones(1, 3, 6, 6, dtype=torch.complex64)), TypeError, "floating point.*complex64"),
    "another dtype": (lambda: CONV(torch.randn(1, 3, 6, 6).double()), TypeError, "torch.float32, got torch.float64"),
    "not a tensor": (lambda: CONV([1.0]), TypeError, "input must be a tensor, got list"),
    "image smaller than kernel": (lambda: CONV(torch.randn(1, 3, 2, 2)), RuntimeError, "Kernel size"),
    "weight rank": (lambda: sphere_conv2d(IMAGE, W2), ValueError, "weight must have 4"),
    "linear weight rank": (lambda: sphere_linear(ROW, W4), ValueError, "weight must have 2"),
    "function without k": (
        lambda: sphere_linear(ROW, W2, operator="learnable"), ValueError, "owns no k",
    ),
    "function without p": (
        lambda: sphere_linear(ROW, W2, operator="sharpened-cosine"), ValueError, "pass a SharpenedCosineAngle object",
    ),
    "center of a function": (lambda: sphere_linear(ROW, W2, center="both"), ValueError, "center must be one of"),
    "center of a function with single entries": (
        lambda: sphere_linear(ROW[:, :1], W2[:, :1], center="patch"), ValueError, "center must be None",
    ),
    "center of lazy single entries": (
        lambda: sn.LazySphereConv2d(4, 1, center="patch")(torch.randn(2, 1, 5, 5)), ValueError, "center must be None",
    ),
    "magnitude of a function": (lambda: sphere_linear(ROW, W2, magnitude="tan"), ValueError, "mean 'tanh'"),
    "function, wrong operator": (
        lambda: sphere_linear(ROW, W2, operator="tanh"), ValueError, "operator.*'tanh'",
    ),
    "tensor k at or below zero": (
        lambda: sphere_linear(ROW, W2, operator="sigmoid", k=torch.tensor(0.0)),
        ValueError, "k must be finite and at least",
    ),
    "tensor k NaN": (
        lambda: sphere_linear(ROW, W2, operator="sigmoid", k=torch.tensor(math.nan)),
        ValueError, "k must be finite and at least",
    ),
    "tensor k of integers": (
        lambda: sphere_linear(ROW, W2, operator="sigmoid", k=torch.tensor(1)),
        TypeError, "k must be a floating point tensor",
    ),
    "tensor k for cosine": (
        lambda: sphere_linear(ROW, W2, k=torch.tensor(0.3)), ValueError, "k must be None for the cosine operator",
    ),
    **{
        f"{name} of shape {shape} for {call.__name__}": (
            lambda call=call, name=name, shape=shape: call(**{name: torch.ones(shape)}),
            ValueError, rf"^{name} must have one value or 4, one per filter, got shape \[.*\]\.$",
        )
        for call in (call_linear, call_convolution, call_transposed)
        for name in ("bias", "beta", "gamma", "k")
        for shape in ((3,), (5,), (4, 1))
    },
    "radii of a function": (
        lambda: sphere_linear(ROW, W2, magnitude=sn.BallMagnitude(1.0, 3)), ValueError, "radius must have one.*or 4",
    ),
    "replaced bias": (lambda: _with_bias_of_three()(ROW), ValueError, "bias must have one value or 4.*got shape"),
    "no groups": (lambda: sphere_conv2d(IMAGE, W4, groups=0), ValueError, "groups must be at least 1, got 0"),
    "no transposed groups": (
        lambda: sphere_conv_transpose1d(IMAGE[0], W2[:3, :, None], groups=0), ValueError, "groups must be at least 1",
    ),
    "eps of a function": (lambda: sphere_linear(ROW, W2, eps=0.0), ValueError, "eps must"),
    "padding word": (
        lambda: sphere_conv2d(IMAGE, W4, padding="full"), ValueError, "'same', 'valid'",
    ),
    "same with stride": (
        lambda: sphere_conv2d(IMAGE, W4, stride=2, padding="same"),
        ValueError, r"stride=\(2, 2\)",
    ),
    **{
        f"{name}={value!r} of a function": (
            lambda name=name, value=value: sphere_conv2d(IMAGE, W4, **{name: value}),
            TypeError, rf"^{name} must be an integer or a sequence of 2 integers, got ",
        )
        for name in ("stride", "padding", "dilation")
        for value in (None, 0.5, True, (1, 1, 1), [0.5], torch.tensor(1))
    },
    **{
        f"{name} too small": (
            lambda name=name: sphere_conv2d(IMAGE, W4, **{name: -1}),
            ValueError, rf"^{name} must be at least {least} in every dimension, got -1\.$",
        )
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1))
    },
    "output padding": (
        lambda: sphere_conv_transpose1d(IMAGE[0], W2[:3, :, None], output_padding="1"),
        TypeError, r"^output_padding must be an integer or a sequence of 1 integers, got '1'\.$",
    ),
    "weight that is no tensor": (lambda: sphere_linear(ROW, 3), TypeError, r"^weight must be a tensor, got int\.$"),
    "bias that is no tensor": (
        lambda: sphere_linear(ROW, W2, bias=0.5), TypeError, r"^bias must be a tensor, got float\.$",
    ),
    "beta that is no number": (
        lambda: sphere_linear(ROW, W2, beta="1"), TypeError, r"^beta must be a number, got '1' of type str\.$",
    ),
    "gamma that is not finite": (
        lambda: sphere_linear(ROW, W2, gamma=math.nan), ValueError, r"^gamma must be finite, got nan\.$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructor_raises(case):
    call, error, message = CONSTRUCTORS[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("case", CALLS)
def test_call_raises(case):
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        call()
