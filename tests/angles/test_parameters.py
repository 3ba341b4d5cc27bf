"""The parameter of an angle function: stated once, used everywhere under its own name."""

import pytest
import torch

import spherenet as sn
from spherenet._util.positive import PositiveParameter
from spherenet.angles import ANGLES, LearnedAngle, make_angle

LEARNED = [name for name, cls in ANGLES.items() if cls.is_learned]
PARAMETERS = {
    "k": sn.LearnableSigmoidAngle.parameter,
    "p": sn.SharpenedCosineAngle.parameter,
    "coarse": PositiveParameter("r", 1.0, 1e-3),
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("excess", [1e-12, 1e-6, 1e-3, 0.5, 20.0, 1e4])
def test_initial_value_is_reached(name, excess):
    parameter = PARAMETERS[name]
    initial = parameter.smallest + excess
    value = parameter.value(parameter.create(3, initial, None, torch.float64))
    torch.testing.assert_close(value, torch.full((3,), initial, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", PARAMETERS)
def test_learned_value_stays_above_the_bound(name):
    parameter = PARAMETERS[name]
    value = parameter.value(torch.tensor([-1e4, -10.0, 0.0, 1e4], dtype=torch.bfloat16))
    assert value.dtype == torch.float32
    assert bool((value >= torch.tensor(parameter.smallest)).all())


@pytest.mark.parametrize("name", LEARNED)
def test_learned_parameter_has_one_name_and_one_value(name):
    angle = make_angle(name, num_filters=3)
    assert isinstance(angle, LearnedAngle)
    own = angle.parameter.name
    assert [key for key, _ in angle.named_parameters()] == [f"raw_{own}"]
    assert torch.equal(getattr(angle, own), angle.k)
    torch.testing.assert_close(angle.k, torch.full((3,), angle.parameter.start))
    torch.nn.init.zeros_(angle.raw)
    angle.reset_parameters()
    torch.testing.assert_close(angle.k, torch.full((3,), angle.parameter.start))
    assert f"initial_{own}={angle.parameter.start:g}" in repr(angle)


def test_layer_shows_the_parameter_whatever_its_name():
    layer = sn.SphereLinear(3, 4, operator="sharpened-cosine")
    assert torch.equal(layer.k, layer.angle.p)


@pytest.mark.parametrize("operator", [name for name, cls in ANGLES.items() if not cls.has_k()])
def test_k_is_refused_everywhere_by_operators_without_k(operator):
    """One sentence, whether k goes to a layer, a function, a model or a conversion."""
    weight, linear = torch.randn(4, 3), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    calls = [
        lambda: make_angle(operator, k=0.3),
        lambda: sn.SphereLinear(3, 4, operator=operator, k=0.3),
        lambda: sn.SphereLSTM(3, 4, operator=operator, k=0.3),
        lambda: sn.create_model("cnn-3", operator=operator, k=0.3),
        lambda: sn.to_sphere(linear, operator, k=0.3),
    ]
    if not ANGLES[operator].is_learned:  # functions own no parameters
        calls += [lambda: sn.functional.sphere_linear(weight, weight, operator=operator, k=0.3)]
    for call in calls:
        with pytest.raises(ValueError, match=f"k must be None for the {operator} operator, got 0.3"):
            call()
