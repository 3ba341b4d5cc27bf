"""Centered layers and magnitude functions in the native kernels, and their behavior inside torch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import spherenet as sn
from cases import OPERATORS
from kernels.test_sphere_conv import LAYOUTS, assert_same, gradients, in_layout
from spherenet.kernels import dispatch
from spherenet.magnitudes import MAGNITUDES

CENTERS = [None, "weight", "patch"]
NAMES = [None, *MAGNITUDES]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)
every_center = pytest.mark.parametrize("center", CENTERS, ids=str)
every_form = pytest.mark.parametrize(
    "form",
    [
        {"center": "weight"},
        {"center": "patch"},
        {"magnitude": "tanh", "radius": "learned"},
        {"center": "patch", "magnitude": "ball", "radius": "learned"},
    ],
    ids=lambda form: "-".join(form.values()),
)


def radius_of(magnitude):
    return {"radius": "learned"} if magnitude is not None and MAGNITUDES[magnitude].has_radius else {}


# --- native kernels against the plain formula ----------------------------------------------------------------------


@every_operator
@every_center
@pytest.mark.parametrize("magnitude", NAMES, ids=str)
@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_all_combinations_in_float64(operator, center, magnitude, layout):
    layer = LAYOUTS[layout].layer(
        **operator.arguments, center=center, magnitude=magnitude, **radius_of(magnitude), rescale="learned", bias=True
    )
    assert_same(*in_layout(layout, layer, LAYOUTS[layout].images()), 1e-10)


@every_operator
@every_form
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_float32(operator, form, layout):
    geometry = LAYOUTS[layout]
    layer = geometry.layer(**operator.arguments, **form, dtype=torch.float32)
    assert_same(*in_layout(layout, layer, geometry.images(3, torch.float32) + 0.5), 2e-5)


@every_form
@pytest.mark.parametrize("magnitude", ["linear", "segmented", "log", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["planes", "rows", "grouped rows"])
def test_half_precision(form, magnitude, dtype, layout):
    geometry = LAYOUTS[layout]
    layer = geometry.layer(operator="sigmoid", **({"magnitude": magnitude} | form), dtype=dtype)
    # Outputs with a magnitude reach 6, where one rounding is 4ε.
    assert_same(*in_layout(layout, layer, geometry.images(3, dtype)), 32 * torch.finfo(dtype).eps)


@every_operator
@every_form
def test_autocast_with_float32_weights(operator, form):
    layer, x = sn.SphereConv2d(4, 20, 3, **operator.arguments, **form), torch.randn(3, 4, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert_same(layer, x, 8 * torch.finfo(torch.bfloat16).eps * max(1, operator.steepest()))
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@every_form
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5])
def test_number_of_threads_does_not_change_result(form, threads, batch):
    """A batch smaller than the number of threads is divided into bands of images."""
    layer = sn.SphereConv2d(8, 32, 3, padding=1, operator="learnable", **form)
    x = torch.randn(batch, 8, 40, 37)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for layout in ("planes", "rows"):
            assert_same(*in_layout(layout, layer, x), 2e-5)
    finally:
        torch.set_num_threads(before)


@every_form
@pytest.mark.parametrize("layout", ["planes", "rows", "grouped planes", "grouped rows", "depthwise rows"])
def test_mixture_of_flat_and_other_patches(form, layout):
    """Flat, zero and overflowing regions beside random ones."""
    geometry = LAYOUTS[layout]
    layer = geometry.layer(operator="linear", **form, dtype=torch.float32)
    x = geometry.images(4, torch.float32)
    x[0, :, :5] = 1.5
    x[1, :, :, :4] = 0
    x[2, :, 0, 0] = 1e30
    layer, x = in_layout(layout, layer, x)
    expected, expected_gradients, weighting = gradients(layer, x, "reference")
    got, got_gradients, _ = gradients(layer, x, "native", weighting)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    for name, value in expected_gradients.items():
        assert value.isfinite().all()
        if name != "weight":  # 1e30 in the input makes rounding visible in the gradient of the weight
            torch.testing.assert_close(got_gradients[name], value, rtol=2e-4, atol=2e-5 * value.abs().max().item())
    assert got_gradients["weight"].isfinite().all()


@every_operator
@every_form
@pytest.mark.parametrize("change", [nn.ReLU(inplace=True), lambda y: y.mul_(3)], ids=["relu", "mul"])
def test_gradients_after_in_place_change_of_output(operator, form, change):
    layer = sn.SphereConv2d(3, 4, 3, **operator.arguments, **form, dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)

    def run(backend):
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        with sn.backend(backend):
            change(layer(inputs)).square().sum().backward()
        return [inputs.grad, *(p.grad.clone() for p in layer.parameters())]

    for got, expected in zip(run("native"), run("reference"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@every_form
def test_double_backward(form):
    """A gradient penalty has the same gradients by native kernels and by the plain formula."""
    layer = sn.SphereConv2d(3, 4, 3, operator="learnable", **form, dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for backend in ("native", "reference"):
        layer.zero_grad()
        with sn.backend(backend):
            (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        results.append([p.grad.clone() for p in layer.parameters()])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


# --- inference -----------------------------------------------------------------------------------------------------


@every_form
def test_inference_equals_training(form):
    layer, x = sn.SphereConv2d(3, 4, 3, operator="sigmoid", **form), torch.randn(2, 3, 6, 6)
    expected = layer(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(layer(x), expected)


def test_layers_that_share_a_weight_do_not_share_unit_weights():
    layers = [sn.SphereConv2d(3, 4, 3, center=center) for center in CENTERS]
    for layer in layers:
        layer.weight = layers[0].weight
    x = torch.rand(2, 3, 6, 6)
    with torch.no_grad():
        outputs = [layer(x) for layer in layers * 2]
        with sn.backend("reference"):
            expected = [layer(x) for layer in layers]
    for got, right in zip(outputs, expected * 2, strict=True):
        torch.testing.assert_close(got, right)
    assert all((outputs[0] - output).abs().max() > 1e-2 for output in outputs[1:3])


# --- inside torch --------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("operator", ["cosine", "sigmoid", "square-cosine", "sharpened-cosine"])
def test_vmap_and_forward_mode(form, operator):
    layer, x = sn.SphereConv2d(3, 4, 3, operator=operator, **form).double(), torch.randn(2, 3, 5, 5).double()
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x))
    tangent = torch.randn_like(x)
    out, derivative = torch.func.jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(out, layer(x))
    quotient = (layer(x + 1e-6 * tangent) - layer(x - 1e-6 * tangent)) / 2e-6
    torch.testing.assert_close(derivative, quotient, rtol=1e-5, atol=1e-6)
    per_sample = torch.vmap(torch.func.grad(lambda x: layer(x).square().sum()))(x)
    inputs = x.clone().requires_grad_()
    layer(inputs).square().sum().backward()
    torch.testing.assert_close(per_sample, inputs.grad)


@every_form
@pytest.mark.parametrize("operator", ["linear", "sharpened-cosine"])
def test_torch_compile_and_export(form, operator):
    torch._dynamo.reset()  # its limit of recompilations counts those of all tests
    layer = sn.SphereConv2d(3, 4, 3, operator=operator, **form)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    out = compiled(x)
    torch.testing.assert_close(out, layer(x))
    (got,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    program = torch.export.export(layer, (x.detach(),))
    torch.testing.assert_close(program.module()(x.detach()), layer(x))


@every_form
def test_copies_are_independent(form):
    layer, x = sn.SphereConv2d(3, 4, 3, **form), torch.randn(2, 3, 5, 5)
    duplicate = copy.deepcopy(layer)
    torch.testing.assert_close(duplicate(x), layer(x), rtol=0, atol=0)
    nn.init.normal_(layer.weight)
    assert (duplicate(x) - layer(x)).abs().max() > 1e-3


@every_form
@pytest.mark.parametrize("operator", ["cosine", "square-cosine", "sharpened-cosine"])
def test_flop_counter_uses_the_plain_formula(form, operator):
    """Under a dispatch mode these layers consist of torch's operators, and gradients stay the same."""
    layer, x = sn.SphereConv2d(3, 4, 3, operator=operator, **form), torch.randn(2, 3, 5, 5, requires_grad=True)
    expected = layer(x)
    with FlopCounterMode(display=False) as counter:
        out = layer(x)
    assert counter.get_total_flops() > 0
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_square_cosine_has_accurate_gradients_for_small_cosines(dtype):
    """c² underflows long before c, so the kernels save the cosine."""
    layer = sn.SphereLinear(2, 1, operator="square-cosine", dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([[10.0**-power, 1.0] for power in range(1, 30)], dtype=dtype)
    results = []
    for backend in ("native", "reference"):
        inputs = x.clone().requires_grad_()
        with sn.backend(backend):
            layer(inputs).sum().backward()
        results.append(inputs.grad[:, 0])
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)
    assert (results[0] > 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("p", [0.15, 0.5, 1.0, 1.7, 2.0, 30.0])
def test_sharpened_cosine_at_all_cosines_and_powers(p, dtype, tolerance, monkeypatch):
    """From c = ±1 to numbers whose power underflows, and c = 0, where the slope of small powers is bounded."""
    sizes = torch.cat(
        [torch.linspace(0, 1, 60, dtype=torch.float64), 10.0 ** -torch.arange(1.0, 37, dtype=torch.float64)]
    )
    cosine = torch.cat([sizes, -sizes]).to(dtype)
    x = torch.stack([cosine, (1 - cosine.square()).clamp_min(0).sqrt()], 1)
    layer = sn.SphereLinear(2, 1, operator=sn.SharpenedCosineAngle(1, p), eps=1e-30, dtype=dtype).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    expected = gradients(layer, x, "reference")
    monkeypatch.setattr(dispatch.PLAIN, "forward", lambda *_: pytest.fail("the plain formula was called"))
    got = gradients(layer, x, "native", expected[2])
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=1e-36)
    for name, gradient in expected[1].items():
        bound = gradient.abs().max().item()
        torch.testing.assert_close(got[1][name], gradient, rtol=10 * tolerance, atol=tolerance * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sharpened_cosine_keeps_nan(dtype):
    x = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    layer = sn.SphereLinear(3, 2, operator="sharpened-cosine", dtype=dtype)
    rows = x * torch.tensor([[1.0], [torch.nan]], dtype=dtype)
    out = layer(rows)
    assert out.isnan().tolist() == [[False] * 2, [True] * 2]
    out.sum().backward()
    assert x.grad.isnan().tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("recurrent", [sn.SphereLSTM, sn.SphereGRU])
@pytest.mark.parametrize("rescale", [None, "learned"])
@pytest.mark.parametrize("operator", ["square-cosine", "sharpened-cosine"])
def test_recurrent_layers_with_powers(recurrent, rescale, operator):
    layer, x = recurrent(4, 5, operator=operator, rescale=rescale).double(), torch.randn(6, 3, 4).double()
    results = []
    for backend in ("auto", "reference"):
        layer.zero_grad()
        with sn.backend(backend):
            out = layer(x)[0]
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
