"""In-place activations after converted layers: gradients are right, and memory is spent only where it is needed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere

OPERATORS = ["linear", "cosine", "sigmoid", "learnable"]


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def chain(inplace, bias=False):
    layers = [
        nn.Conv2d(3, 4, 3, bias=bias),
        nn.ReLU(inplace),
        nn.Conv2d(4, 4, 3, bias=bias),
        nn.LeakyReLU(0.1, inplace),
    ]
    return nn.Sequential(nn.Sequential(*layers), nn.Conv2d(4, 2, 1)).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operator", [*OPERATORS, sn.CustomAngle(lambda theta: torch.tanh(torch.cos(theta)))], ids=str)
def test_gradients_of_in_place_chains(operator, bias):
    model, twin = chain(True, bias), chain(False, bias)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    sphere = to_sphere(model, operator)
    # With a bias the sum is overwritten, which nobody keeps: the memory stays saved.
    assert [m.inplace for m in sphere.modules() if hasattr(m, "inplace")] == [bias, bias]
    assert_same_gradients(gradients(sphere, x), gradients(to_sphere(twin, operator), x))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_where_no_chain_shows_the_in_place_activation(operator):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(inplace=True)
            self.second, self.out = nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 2, 1)
            self.inplace = True

        def forward(self, x):
            self.act.inplace = self.inplace
            x = self.act(self.first(x))
            return self.out(F.relu(self.second(x), inplace=self.inplace))

    sphere = to_sphere(Hidden().double(), operator)
    twin = copy.deepcopy(sphere)
    twin.inplace = False
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    assert_same_gradients(gradients(sphere, x), gradients(twin, x))


def test_only_what_follows_directly_changes_and_comes_back():
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.Identity(), nn.Dropout(0.1, inplace=True), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)),
    )
    sphere = to_sphere(model)
    assert [m.inplace for m in sphere if hasattr(m, "inplace")] == [False, True, True]
    assert "no longer in place" in sphere_summary(sphere)["2"].reason
    assert sphere_summary(sphere)["2"].kind == "changed"
    assert [m.inplace for m in to_plain(sphere) if hasattr(m, "inplace")] == [True, True, True]
    rescaled = to_sphere(model, rescale="learned")
    assert [m.inplace for m in rescaled if hasattr(m, "inplace")] == [True, True, True]
