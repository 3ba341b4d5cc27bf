"""Brightness is dropped by a SphereConv and kept by a convolution; the ratio of R, G, B is kept by both."""

import numpy as np
import pytest
import torch

from spherenet.theory.color import colour_response, draw, hues, patch_of

each_operator = pytest.mark.parametrize("operator", ["cosine", "linear", "sigmoid", "learnable"])


@each_operator
@pytest.mark.parametrize("seed", [0, 1])
def test_brightness(operator, seed):
    found = colour_response(operator, seed)
    brightness, sphere, conv = (
        np.array(values) for values in (found.brightness, found.sphere_over_brightness, found.conv_over_brightness)
    )
    lit = brightness >= 0.1
    np.testing.assert_allclose(sphere[lit], sphere[-1], rtol=1e-3)
    assert found.sphere_change < 1e-3
    np.testing.assert_allclose(conv, conv[-1] * brightness, rtol=1e-12)
    assert found.conv_nonlinearity < 1e-12
    assert found.conv_change == pytest.approx(0.9, abs=0.02)
    # Where eps outweighs the patch, the answer goes to g(π/2) = 0.
    assert abs(sphere[0]) < 0.1 * abs(sphere[-1])


def test_what_eps_takes_is_the_formula():
    found = colour_response("cosine")
    length = np.linalg.norm(patch_of(torch.tensor([[0.9, 0.55, 0.25]])).numpy()) * np.array(found.brightness)
    exact = found.sphere_over_brightness[-1] * np.sqrt(1 + found.eps / length[-1] ** 2)
    np.testing.assert_allclose(found.sphere_over_brightness, exact / np.sqrt(1 + found.eps / length**2), rtol=1e-6)


@each_operator
def test_the_ratio_of_colours_is_seen_at_every_brightness(operator):
    found = colour_response(operator)
    for values in (found.sphere_over_hue, found.conv_over_hue):
        assert max(values) - min(values) > 0.3
    np.testing.assert_allclose(found.sphere_over_hue_dimmed, found.sphere_over_hue, atol=1e-3)
    np.testing.assert_allclose(found.conv_over_hue_dimmed, np.array(found.conv_over_hue) / 4, rtol=1e-12)
    assert found.sphere_dimming < 1e-3
    assert found.conv_dimming > 0.5


def test_hues_have_one_length_and_close_the_circle():
    colours = hues(25)
    torch.testing.assert_close(colours.norm(dim=1), torch.ones(25).double())
    torch.testing.assert_close(colours[0], colours[-1])
    assert (colours >= 0).all()
    assert patch_of(colours).shape == (25, 3, 3, 3)


def test_unknown_operator():
    with pytest.raises(ValueError, match="operator must be one of"):
        colour_response("cos")


def test_drawing_has_three_panels():
    assert len(draw(colour_response()).axes) == 3
