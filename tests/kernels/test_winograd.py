"""The Winograd engine against float64: plain convolutions and sphere layers, bad input, determinism, threads."""

import ctypes
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cases import OPERATORS, Operator
from spherenet.kernels import library
from spherenet.kernels.sphere_conv import native, winograd

pytestmark = pytest.mark.skipif(not library.available(), reason="needs the native kernels")

EPS = 1e-4
PLAIN_OPERATORS = [operator for operator in OPERATORS if operator.magnitude is None]
LINEAR, COSINE, SIGMOID = Operator("linear"), Operator("cosine"), Operator("sigmoid", 0.1)
LEARNABLE = Operator("learnable", 0.5)
ANGLES = {"cosine": 0, "linear": 1, "sigmoid": 2, "learnable": 2, "square-cosine": 3, "sharpened-cosine": 4}
FORWARD_BOUND = {4: 5e-6, 2: 1e-6}
"""Errors of the largest absolute value of the result, by the size of tiles. Measured: at most 3e-6 and 4e-7."""
GRADIENT_BOUND = {4: 1e-5, 2: 2e-6}

SHAPES = [  # batch, channels, filters, height, width, padding
    (2, 16, 16, 8, 8, 1),
    (3, 17, 33, 7, 9, 1),
    (1, 64, 48, 32, 32, 1),
    (5, 3, 70, 5, 6, 0),
    (2, 4, 1, 1, 2, 1),
    (2, 40, 16, 13, 35, 2),
    (1, 20, 20, 3, 3, 0),
    (3, 96, 128, 4, 4, 1),
    (1, 8, 8, 130, 270, 1),
    (2, 5, 7, 1, 1, 2),
]
SPHERE_SHAPES = [(3, 17, 33, 7, 9, 1), (1, 40, 16, 13, 18, 2), (5, 16, 20, 5, 6, 0)]


def of_peak(result, expected):
    """Return the largest error relative to the largest absolute value."""
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


def rows(*shape):
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def plan(x, filters, padding, tile):
    return winograd.make_plan(x.shape, filters, (padding, padding), tile, torch.get_num_threads())


def direct(grad, x, weight, padding):
    """Return the gradients of a plain convolution by torch, in the dtype of its arguments."""
    arguments = (None, (1, 1), (padding, padding), (1, 1), False, (0, 0), 1, (True, True, False))
    return torch.ops.aten.convolution_backward(grad, x, weight, *arguments)[:2]


@pytest.mark.parametrize("tile", [4, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_convolution_and_its_gradients(shape, tile):
    batch, channels, filters, height, width, padding = shape
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(batch, channels, height, width).contiguous(memory_format=layout)
        weight = (torch.randn(filters, channels, 3, 3) / math.sqrt(9 * channels)).contiguous(memory_format=layout)
        bias = torch.randn(filters)
        expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=padding)
        used = plan(x, filters, padding, tile)
        out = winograd.forward(x, weight, used, winograd.Layer(bias=bias)).out
        assert of_peak(out, expected) < FORWARD_BOUND[tile]
        grad = torch.randn(out.shape)
        of_x, of_weight = direct(grad.double(), x.double(), weight.double(), padding)
        for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
            gradients = winograd.backward(grad, x, weight, used, winograd.Needs(needs_x, needs_weight))
            assert (gradients.x is not None, gradients.weight is not None) == (needs_x, needs_weight)
            assert not needs_x or of_peak(gradients.x, of_x) < GRADIENT_BOUND[tile]
            assert not needs_weight or of_peak(gradients.weight, of_weight) < GRADIENT_BOUND[tile]


@pytest.mark.parametrize("tile", [4, 2])
def test_every_map_size_and_number_of_channels(tile):
    for size in range(1, 36):
        channels, filters, width = 2 * size - 1, 71 - size, 36 - size
        x, weight = torch.randn(2, channels, size, width), torch.randn(filters, channels, 3, 3)
        used = plan(x, filters, 1, tile)
        out = winograd.forward(x, weight, used).out
        assert of_peak(out, F.conv2d(x.double(), weight.double(), padding=1)) < FORWARD_BOUND[tile]
        grad = torch.randn(out.shape)
        result = winograd.backward(grad, x, weight, used, winograd.Needs())
        for gradient, expected in zip(result, direct(grad.double(), x.double(), weight.double(), 1), strict=False):
            assert of_peak(gradient, expected) < GRADIENT_BOUND[tile]


class Layer:
    """A sphere layer as the engine takes it, and the same in float64 by the formula."""

    def __init__(self, operator, channels, filters, center=None, affine=False):
        weight = torch.randn(filters, channels, 3, 3)
        if center:
            weight -= weight.mean((1, 2, 3), keepdim=True)
        self.weight = (weight / weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).contiguous(
            memory_format=torch.channels_last
        )
        self.operator, self.center_patch = operator, center == "patch"
        self.k = None
        if operator.name in ("sigmoid", "learnable", "sharpened-cosine"):
            self.k = torch.full((filters,), operator.k or 2.0)
        self.affine = [torch.randn(filters), torch.rand(filters) + 0.5, torch.randn(filters)] if affine else []
        self.save_cosine = affine or operator.is_power
        pointers = [value if value is None else value.data_ptr() for value in (self.k, *self.affine)]
        pointers += [None] * (4 - len(pointers))
        self.struct = library.AngleStruct(ANGLES[operator.name], 0 if self.k is None else filters, *pointers)
        arguments = SimpleNamespace(struct=ctypes.byref(self.struct))
        self.layer = winograd.Layer(arguments, EPS, self.center_patch)

    def forward(self, x, padding, tile, training=True):
        used = plan(x, len(self.weight), padding, tile)
        save_cosine = training and self.save_cosine
        return winograd.forward(x, self.weight, used, self.layer, keep_norms=training, save_cosine=save_cosine)

    def backward(self, grad, x, padding, tile, results):
        used, needs = plan(x, len(self.weight), padding, tile), winograd.Needs(sums=self.k is not None)
        return winograd.backward(grad, x, self.weight, used, needs, self.layer, results)

    def reference(self, x, padding, weight=None, k=None):
        weight = self.weight.double() if weight is None else weight
        ones = torch.ones(1, *weight.shape[1:], dtype=torch.float64)
        squares = F.conv2d(x * x, ones, padding=padding)
        if self.center_patch:
            squares = squares - F.conv2d(x, ones, padding=padding).square() / ones.numel()
        cosine = F.conv2d(x, weight, padding=padding) / torch.sqrt(squares + EPS)
        out = self.operator.g(torch.acos(cosine), k)
        if self.affine:
            bias, beta, gamma = (value.double().view(1, -1, 1, 1) for value in self.affine)
            out = beta * (out + bias) + gamma
        return out


@pytest.mark.parametrize("affine", [False, True], ids=["", "affine"])
@pytest.mark.parametrize("center", [None, "weight", "patch"])
@pytest.mark.parametrize("operator", PLAIN_OPERATORS, ids=str)
def test_sphere_layers_and_their_gradients(operator, center, affine):
    for batch, channels, filters, height, width, padding in SPHERE_SHAPES:
        layer = Layer(operator, channels, filters, center, affine)
        for tile in (4, 2):
            x = rows(batch, channels, height, width) + 0.5
            x64, weight64 = x.double().requires_grad_(), layer.weight.double().requires_grad_()
            k64 = None if layer.k is None else layer.k.double().view(1, -1, 1, 1).requires_grad_()
            expected = layer.reference(x64, padding, weight64, k64)
            results = layer.forward(x, padding, tile)
            assert of_peak(results.out, expected.detach()) < FORWARD_BOUND[tile]
            grad = torch.randn(results.out.shape)
            expected.backward(grad.double())
            gradients = layer.backward(grad, x, padding, tile, results)
            assert of_peak(gradients.x, x64.grad) < 2 * GRADIENT_BOUND[4]
            assert of_peak(gradients.weight, weight64.grad) < 2 * GRADIENT_BOUND[4]
            if k64 is not None:
                by_k = gradients.sums[2].double() * (layer.affine[1] if affine else 1)
                assert of_peak(by_k, k64.grad.flatten()) < 2 * GRADIENT_BOUND[4]


@pytest.mark.parametrize("scale", [1e-3, 1, 1e3])
@pytest.mark.parametrize("center", [None, "patch"])
def test_errors_do_not_grow_with_the_magnitude_of_the_input(scale, center):
    layer = Layer(COSINE, 24, 24, center)
    x = scale * rows(2, 24, 9, 10)
    x64, weight64 = x.double().requires_grad_(), layer.weight.double().requires_grad_()
    expected = layer.reference(x64, 1, weight64)
    results = layer.forward(x, 1, 4)
    assert of_peak(results.out, expected.detach()) < FORWARD_BOUND[4]
    grad = torch.randn(results.out.shape)
    expected.backward(grad.double())
    gradients = layer.backward(grad, x, 1, 4, results)
    assert of_peak(gradients.x, x64.grad) < GRADIENT_BOUND[4]
    assert of_peak(gradients.weight, weight64.grad) < GRADIENT_BOUND[4]


def test_inference_returns_the_output_alone():
    layer, x = Layer(SIGMOID, 16, 16, "patch"), rows(2, 16, 9, 9)
    results = layer.forward(x, 1, 4, training=False)
    assert results[1:] == (None, None, None)
    assert torch.equal(results.out, layer.forward(x, 1, 4).out)


# --- patches that a tile cannot hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [4, 2])
@pytest.mark.parametrize("center", [None, "patch"])
@pytest.mark.parametrize("darkness", [1e-2, 1e-4, 1e-8, 0])
def test_dark_patches_beside_bright_ones_keep_their_direction(darkness, center, tile):
    layer, x = Layer(LINEAR, 20, 18, center), rows(2, 20, 11, 14)
    x[..., 5:] *= darkness
    x[:, :, 3:5] *= darkness
    x *= 1000  # far above eps
    x64, weight64 = x.double().requires_grad_(), layer.weight.double().requires_grad_()
    expected = layer.reference(x64, 1, weight64)
    results = layer.forward(x, 1, tile)
    assert (results.out - expected).abs().max() < 1e-4
    grad = torch.randn(results.out.shape)
    expected.backward(grad.double())
    gradients = layer.backward(grad, x, 1, tile, results)
    assert of_peak(gradients.x, x64.grad) < 5e-5
    assert of_peak(gradients.weight, weight64.grad) < 5e-5


def test_patches_without_direction_give_zero():
    x = rows(1, 16, 12, 12)
    x[..., 6:] = 0
    assert (Layer(COSINE, 16, 16).forward(x, 1, 4).out[..., 7:] == 0).all()
    x[..., 6:] = 3
    flat = Layer(COSINE, 16, 16, "patch").forward(x, 1, 4).out[:, :, 1:-1, 7:-1]
    assert (flat == 0).all()


@pytest.mark.parametrize("tile", [4, 2])
@pytest.mark.parametrize("center", [None, "patch"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 3e38])
def test_a_pixel_that_is_not_finite_or_overflows_reaches_the_patches_that_contain_it(value, center, tile):
    layer, x = Layer(COSINE, 16, 16, center), rows(2, 16, 13, 11)
    clean = layer.forward(x, 1, tile).out
    x[0, 3, 5, 6] = value
    results = layer.forward(x, 1, tile)
    touched = torch.zeros(2, 1, 13, 11, dtype=torch.bool)
    touched[0, :, 4:7, 5:8] = True
    inside = results.out[touched.expand_as(clean)]
    assert inside.isnan().all() if math.isnan(value) else (inside == 0).all()
    assert (results.out - clean).abs()[~touched.expand_as(clean)].max() < 1e-5
    grad = rows(*clean.shape)
    gradients = layer.backward(grad, x, 1, tile, results)
    spoiled = torch.zeros_like(touched)
    if math.isnan(value):
        spoiled[0, :, 3:8, 4:9] = True
    elif math.isinf(value):
        spoiled[0, :, 5, 6] = True
    assert torch.equal(gradients.x.isfinite().all(1, keepdim=True), ~spoiled)
    if math.isfinite(value):
        assert gradients.weight.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_the_pixels_of_its_patch(value):
    layer, x = Layer(COSINE, 16, 16), rows(2, 16, 13, 11)
    results, grad = layer.forward(x, 1, 4), rows(2, 16, 13, 11)
    grad[1, 2, 7, 3] = value
    touched = torch.zeros(2, 13, 11, dtype=torch.bool)
    touched[1, 6:9, 2:5] = True
    assert torch.equal(layer.backward(grad, x, 1, 4, results).x.isfinite().all(1), ~touched)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere zeros that are only read may take memory")
def test_more_than_2_31_elements():
    """The zeros between two images are only read: the system maps one page for all of them."""
    images = 2**31 // (512 * 16 * 16) + 2
    x = torch.from_numpy(np.zeros((images, 16, 16, 512), np.float32)).permute(0, 3, 1, 2)
    x[0], x[-1] = torch.randn(2, 512, 16, 16)
    both, layer = x[[0, -1]], Layer(COSINE, 512, 8)
    results, expected = layer.forward(x, 1, 4), layer.forward(both, 1, 4)
    assert torch.equal(results.out[[0, -1]], expected.out)
    assert results.out[1:-1].abs().max() == 0
    grad = torch.zeros_like(results.out)
    grad[0], grad[-1] = torch.randn(2, 8, 16, 16)
    needs = winograd.Needs(x=False)
    gradient, of_both = (
        winograd.backward(g, a, layer.weight, plan(a, 8, 1, 4), needs, layer.layer, r).weight
        for g, a, r in ((grad, x, results), (grad[[0, -1]], both, expected))
    )
    assert of_peak(gradient, of_both.double()) < 2e-6


# --- determinism and threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_results_are_the_same_bits_for_the_same_number_of_threads(batch):
    before = torch.get_num_threads()
    layer, x = Layer(LEARNABLE, 24, 40, "patch"), rows(batch, 24, 30, 21)
    grad, outputs = rows(batch, 40, 30, 21), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            first, second = (
                (results := layer.forward(x, 1, 4), layer.backward(grad, x, 1, 4, results)) for _ in range(2)
            )
            for a, b in zip(first, second, strict=True):
                assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True) if s is not None)
            outputs.append(first)
    finally:
        torch.set_num_threads(before)
    for results, gradients in outputs[1:]:
        assert torch.equal(results.out, outputs[0][0].out)
        assert of_peak(gradients.x, outputs[0][1].x.double()) < 2e-6
        assert of_peak(gradients.weight, outputs[0][1].weight.double()) < 2e-6


def test_calls_from_several_threads_do_not_disturb_each_other():
    layer = Layer(SIGMOID, 16, 24)
    inputs = [rows(2, 16, 10 + i % 3, 12) for i in range(24)]

    def step(x):
        results = layer.forward(x, 1, 4)
        gradients = layer.backward(torch.ones_like(results.out), x, 1, 4, results)
        native.release_scratch()
        return results.out, gradients.x, gradients.weight

    expected = [step(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for results, values in zip(pool.map(step, inputs), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, values, strict=True))
