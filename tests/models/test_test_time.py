"""Test-time augmentation: views and weights as written, on all shapes, and its bad input."""

import pytest
import torch
from torch import nn

from spherenet.models.test_time import scores_of_views


def shifted(images, pixels):
    """Translate images by one pixel toward the lower right (1) or upper left (−1), reflecting the border."""
    height, width = images.shape[2:]

    def source(length):
        positions = [position - pixels for position in range(length)]
        return [-p if p < 0 else 2 * (length - 1) - p if p >= length else p for p in positions]

    return images[:, :, source(height)][:, :, :, source(width)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(5)).eval()


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (2, 3, 5, 9)])
def test_scores_are_the_weighted_mean_of_the_views(shape):
    model, images = network(), torch.randn(shape)
    with torch.no_grad():
        mirror = (model(images) + model(images.flip(3))) / 2
        torch.testing.assert_close(scores_of_views(model, images, "mirror"), mirror)
        torch.testing.assert_close(scores_of_views(model, images, "none"), model(images))
        expected = 0.5 * mirror
        for pixels in (1, -1):
            view = shifted(images, pixels)
            expected = expected + 0.125 * (model(view) + model(view.flip(3)))
        torch.testing.assert_close(scores_of_views(model, images, "mirror-shift"), expected)
        last = images.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(scores_of_views(model, last, "mirror-shift"), expected)


def test_a_symmetric_image_has_the_score_of_one_view():
    model, images = network(), torch.randn(1, 3, 6, 6)
    images = images + images.flip(3)
    with torch.no_grad():
        torch.testing.assert_close(scores_of_views(model, images, "mirror"), model(images))


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"^tta must be one of .*, got 'rotate'"):
        scores_of_views(network(), torch.randn(1, 3, 4, 4), "rotate")
    with pytest.raises(ValueError, match=r"^tta must be none or mirror for images of 1×4 pixels, got 'mirror-shift'"):
        scores_of_views(nn.Flatten(), torch.randn(1, 3, 1, 4), "mirror-shift")
