"""The plain formula: number of operations, and derivatives of all orders in both modes."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spherenet as sn
from cases import OPERATORS

MOST_OPERATIONS = {"cosine": 35, "linear": 36, "sigmoid": 41, "learnable": 62}
FREE = (
    "detach",
    "view",
    "expand",
    "permute",
    "alias",
    "unsqueeze",
    "squeeze",
    "t",
    "new_empty",
    "empty",
    "_unsafe_view",
)
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=str)


class Operations(TorchDispatchMode):
    """Count the operations that compute; views and allocations launch nothing."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name not in FREE:
            self.counted[name] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", MOST_OPERATIONS)
def test_number_of_operations_of_forward_and_backward(operator):
    layer = sn.SphereConv2d(16, 16, 3, padding=1, operator=operator)
    x, grad = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(2, 16, 8, 8)
    with sn.backend("reference"), Operations() as operations:
        layer(x).backward(grad)
    assert x.grad is not None
    assert all(p.grad is not None for p in layer.parameters())
    total = sum(operations.counted.values())
    assert total <= MOST_OPERATIONS[operator], f"{total} operations: {dict(operations.counted)}"


def test_numbers_of_operations_equal_documentation():
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    numbers = " | ".join(map(str, MOST_OPERATIONS.values()))
    assert f"| plain formula, operations that compute | 2 | {numbers} |" in page


def functional_layer(operator, geometry):
    """Return the plain formula of a layer as a function of its tensors."""
    arguments = operator.arguments if operator.name != "learnable" else {"operator": "sigmoid"}
    if operator.name == "sharpened-cosine":  # a function takes an operator with parameters as an object
        arguments = {"operator": sn.SharpenedCosineAngle(dtype=torch.float64)}

    def function(x, weight, k=None):
        with sn.backend("reference"):
            return sn.functional.sphere_conv2d(x, weight, **geometry, **({} if k is None else {"k": k}), **arguments)

    return function


def tensors(operator, groups=1):
    x = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 2 // groups, 2, 2, dtype=torch.float64, requires_grad=True)
    if operator.name != "learnable":
        return x, weight
    return x, weight, (0.3 + torch.rand(2, dtype=torch.float64)).requires_grad_()


@every_operator
@pytest.mark.parametrize("geometry", [{"padding": 1}, {"dilation": 2, "padding": 2, "groups": 2}], ids=["box", "conv"])
def test_first_and_second_derivatives_in_both_modes(operator, geometry):
    function = functional_layer(operator, geometry)
    inputs = tensors(operator, geometry.get("groups", 1))
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@every_operator
def test_hessians_are_equal_in_every_order_of_modes(operator):
    x, *rest = (value.detach() for value in tensors(operator))
    function = functional_layer(operator, {"padding": 1})

    def loss(*values):
        return function(x, *values).square().sum()

    over = tuple(range(len(rest)))
    expected = torch.func.jacrev(torch.func.jacrev(loss, over), over)(*rest)
    for outer, inner in ((torch.func.jacfwd, torch.func.jacrev), (torch.func.jacrev, torch.func.jacfwd)):
        torch.testing.assert_close(outer(inner(loss, over), over)(*rest), expected)
