"""AngularHead: outputs against the reference, dtypes, wrong arguments."""

import math

import pytest
import torch
from torch.nn import functional as F

from oracle import sphere_conv as reference
from spherenet.kernels import dispatch
from spherenet.kernels.classes import blockwise as blocks
from spherenet.layers.head import AngularHead

EPS = 1e-4


@pytest.fixture(params=["plain", "blockwise"])
def path(request, monkeypatch):
    if request.param == "blockwise":
        monkeypatch.setattr(dispatch, "LARGE_MAP", 0)
        monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 7)
    return request.param


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_equal_reference(bias, path):
    head = AngularHead(4, 5, bias, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64)
    output = head(x)
    for i in range(3):
        assert output.feature_norm[i].item() == pytest.approx(math.sqrt((x[i] ** 2).sum() + EPS))
        for j in range(5):
            angle = reference.theta(head.weight[j], x[i], EPS)
            assert output.cosine[i, j].item() == pytest.approx(angle.cos().item())
    for j in range(5):
        assert output.weight_norm[j].item() == pytest.approx(math.sqrt((head.weight[j].detach() ** 2).sum() + EPS))
    assert output.bias is None if not bias else torch.equal(output.bias, head.bias)


def test_cosines_times_norms_equal_linear_layer(path):
    head = AngularHead(6, 5)
    x = torch.randn(4, 6)
    output = head(x)
    product = output.cosine * output.feature_norm[:, None] * output.weight_norm
    torch.testing.assert_close(product, F.linear(x, head.weight))


@pytest.mark.parametrize("power", [-2, 5], ids=["small", "large"])
def test_cosines_do_not_depend_on_lengths(power, path):
    head = AngularHead(6, 5, eps=1e-12)
    x = torch.randn(4, 6)
    cosine = head(x).cosine
    torch.testing.assert_close(head(x * 10.0**power).cosine, cosine)
    with torch.no_grad():
        head.weight.mul_(10.0**power)
    torch.testing.assert_close(head(x).cosine, cosine)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 1, 2)], ids=str)
def test_leading_dimensions(shape, path):
    output = AngularHead(4, 5, bias=True)(torch.randn(*shape, 4))
    assert output.cosine.shape == (*shape, 5)
    assert output.feature_norm.shape == shape
    assert output.weight_norm.shape == output.bias.shape == (5,)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("feature_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(weight_dtype, feature_dtype, path):
    head = AngularHead(64, 5, bias=True, dtype=weight_dtype)
    x = torch.randn(3, 64).to(feature_dtype).requires_grad_()
    output = head(x)
    assert {part.dtype for part in output} == {torch.float32}
    torch.testing.assert_close(output.cosine, in_float32(head)(x.float()).cosine)
    output.cosine.sum().backward()
    assert x.grad.dtype == feature_dtype
    assert head.weight.grad.dtype == weight_dtype


def in_float32(head):
    """Return a head with the same weights in float32."""
    other = AngularHead(head.in_features, head.num_classes, bias=head.bias is not None)
    other.load_state_dict(head.state_dict())
    return other


def test_autocast_leaves_cosines_exact(path):
    head, x = AngularHead(64, 5), torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(x).cosine, head(x).cosine.float())
        under_autocast = head(x).cosine
    assert torch.equal(under_autocast, head(x).cosine)


def test_zero_feature_has_cosine_zero_and_finite_gradient(path):
    head, x = AngularHead(4, 5), torch.zeros(2, 4, requires_grad=True)
    output = head(x)
    assert (output.cosine == 0).all()
    assert output.feature_norm.tolist() == pytest.approx([0.01, 0.01])
    (output.cosine.sum() + output.feature_norm.sum()).backward()
    assert x.grad.isfinite().all()
    assert head.weight.grad.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(bias, path):
    head = AngularHead(3, 4, bias, dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    parameters = dict(head.named_parameters())

    def function(x, *values):
        output = torch.func.functional_call(head, dict(zip(parameters, values, strict=True)), x)
        return tuple(part for part in output if part is not None)

    values = tuple(value.detach().requires_grad_() for value in parameters.values())
    assert torch.autograd.gradcheck(function, (x, *values))
    assert torch.autograd.gradgradcheck(function, (x, *values))


def test_state_dict_and_repr():
    head = AngularHead(4, 5, bias=True)
    assert {name: tuple(value.shape) for name, value in head.state_dict().items()} == {"weight": (5, 4), "bias": (5,)}
    assert AngularHead(4, 5).state_dict().keys() == {"weight"}
    assert repr(head) == "AngularHead(in_features=4, num_classes=5, bias=True, eps=0.0001)"
    assert AngularHead(4, 5, device="meta", dtype=torch.float64).weight.is_meta


def test_initial_directions_are_uniform():
    head = AngularHead(64, 5000, bias=True)
    assert head.weight.std().item() == pytest.approx((2 / 64) ** 0.5, rel=0.01)
    assert F.normalize(head.weight).mean(0).norm() < 0.03
    assert (head.bias == 0).all()
    before = head.weight.clone()
    head.reset_parameters()
    assert not torch.equal(head.weight, before)


def test_meta_device_gives_shapes():
    output = AngularHead(4, 5, device="meta")(torch.empty(3, 4, device="meta"))
    assert output.cosine.shape == (3, 5)


HEAD = AngularHead(4, 3)
WRONG = {
    "a single class": (lambda: AngularHead(4, 1), ValueError, "num_classes must be at least 2, got 1"),
    "no class": (lambda: AngularHead(4, 0), ValueError, "num_classes must be at least 2, got 0"),
    "negative features": (lambda: AngularHead(-4, 3), ValueError, "in_features must be at least 1, got -4"),
    "classes as a float": (lambda: AngularHead(4, 3.0), TypeError, "num_classes must be an integer, got 3.0"),
    "classes as a bool": (lambda: AngularHead(4, True), TypeError, "num_classes must be an integer, got True"),
    "eps of zero": (lambda: AngularHead(4, 3, eps=0), ValueError, "eps must be greater than 0, got 0"),
    "other features": (lambda: HEAD(torch.randn(2, 5)), ValueError, r"must have 4 features.*got shape \[2, 5\]"),
    "a scalar": (lambda: HEAD(torch.tensor(1.0)), ValueError, r"must have 4 features.*got shape \[\]"),
    "integers": (lambda: HEAD(torch.ones(2, 4).int()), TypeError, "floating point tensor, got torch.int32"),
    "another dtype": (lambda: HEAD(torch.randn(2, 4).double()), TypeError, "torch.float32, got torch.float64"),
    "not a tensor": (lambda: HEAD([1.0]), TypeError, "features must be a tensor, got list"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()
