"""In-place activations after converted layers: correct gradients, and `inplace` disabled only when necessary."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.angles import OPERATORS
from spherenet.convert import sphere_summary, to_plain, to_sphere


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def sequence(inplace, bias=False):
    layers = [
        nn.Conv2d(3, 4, 3, bias=bias),
        nn.ReLU(inplace),
        nn.Conv2d(4, 4, 3, bias=bias),
        nn.LeakyReLU(0.1, inplace),
    ]
    return nn.Sequential(nn.Sequential(*layers), nn.Conv2d(4, 2, 1)).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("operator", [*OPERATORS, sn.CustomAngle(lambda theta: torch.tanh(torch.cos(theta)))], ids=str)
def test_gradients_with_inplace_activations_in_sequential(operator, bias):
    model, reference = sequence(True, bias), sequence(False, bias)
    reference.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    sphere = to_sphere(model, operator)
    # With a bias the activation overwrites the sum, which the layer does not save.
    assert [m.inplace for m in sphere.modules() if hasattr(m, "inplace")] == [bias, bias]
    assert_same_gradients(gradients(sphere, x), gradients(to_sphere(reference, operator), x))


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_with_inplace_activations_outside_sequential(operator):
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
    reference = copy.deepcopy(sphere)
    reference.inplace = False
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    assert_same_gradients(gradients(sphere, x), gradients(reference, x))


def test_inplace_is_disabled_directly_after_sphere_layers_only_and_restored():
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.Identity(), nn.Dropout(0.1, inplace=True), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)),
    )
    sphere = to_sphere(model)
    assert [m.inplace for m in sphere if hasattr(m, "inplace")] == [False, True, True]
    assert "inplace disabled" in sphere_summary(sphere)["2"].reason
    assert sphere_summary(sphere)["2"].kind == "changed"
    assert [m.inplace for m in to_plain(sphere) if hasattr(m, "inplace")] == [True, True, True]
    rescaled = to_sphere(model, rescale="learned")
    assert [m.inplace for m in rescaled if hasattr(m, "inplace")] == [True, True, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_activation_stays_in_place():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), torch.jit.script(nn.ReLU(inplace=True)), nn.Conv2d(4, 2, 1))
    assert isinstance(to_sphere(model, inplace=True)[0], sn.SphereConv2d)
    assert model[1].inplace


def test_compiled_activation_is_restored_in_a_copy():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), torch.compile(nn.ReLU(inplace=True)), nn.Conv2d(4, 2, 1))
    sphere = to_sphere(model)
    assert not sphere[1].inplace
    assert to_plain(sphere)[1].inplace
