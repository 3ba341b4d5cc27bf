"""A SphereConv ignores brightness, a convolution is proportional to it; both respond to the ratio of R, G and B."""

import numpy as np
import pytest
import torch

from spherenet_paper.theory.color import color_response, draw, hues, uniform_patches

each_operator = pytest.mark.parametrize("operator", ["cosine", "linear", "sigmoid", "learnable"])


@each_operator
@pytest.mark.parametrize("seed", [0, 1])
def test_sphere_conv_is_invariant_and_convolution_linear_in_brightness(operator, seed):
    response = color_response(operator, seed)
    brightness, sphere, conv = (
        np.array(values)
        for values in (response.brightness, response.sphere_over_brightness, response.conv_over_brightness)
    )
    lit = brightness >= 0.1
    np.testing.assert_allclose(sphere[lit], sphere[-1], rtol=1e-3)
    assert response.sphere_change < 1e-3
    np.testing.assert_allclose(conv, conv[-1] * brightness, rtol=1e-12)
    assert response.conv_nonlinearity < 1e-12
    assert response.conv_change == pytest.approx(0.9, abs=0.02)
    # When eps dominates, the output approaches g(π/2) = 0.
    assert abs(sphere[0]) < 0.1 * abs(sphere[-1])


def test_effect_of_eps_matches_the_formula():
    response = color_response("cosine")
    length = np.linalg.norm(uniform_patches(torch.tensor([[0.9, 0.55, 0.25]])).numpy()) * np.array(response.brightness)
    exact = response.sphere_over_brightness[-1] * np.sqrt(1 + response.eps / length[-1] ** 2)
    np.testing.assert_allclose(
        response.sphere_over_brightness, exact / np.sqrt(1 + response.eps / length**2), rtol=1e-6
    )


@each_operator
def test_both_layers_respond_to_hue_at_every_brightness(operator):
    response = color_response(operator)
    for values in (response.sphere_over_hue, response.conv_over_hue):
        assert max(values) - min(values) > 0.3
    np.testing.assert_allclose(response.sphere_over_hue_dimmed, response.sphere_over_hue, atol=1e-3)
    np.testing.assert_allclose(response.conv_over_hue_dimmed, np.array(response.conv_over_hue) / 4, rtol=1e-12)
    assert response.sphere_dimming < 1e-3
    assert response.conv_dimming > 0.5


def test_hues_have_unit_length_and_form_a_circle():
    colors = hues(25)
    torch.testing.assert_close(colors.norm(dim=1), torch.ones(25).double())
    torch.testing.assert_close(colors[0], colors[-1])
    assert (colors >= 0).all()
    assert uniform_patches(colors).shape == (25, 3, 3, 3)


def test_unknown_operator_raises_value_error():
    with pytest.raises(ValueError, match="operator must be one of"):
        color_response("cos")


def test_figure_has_three_panels():
    assert len(draw(color_response()).axes) == 3
