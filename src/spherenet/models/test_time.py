"""Test-time augmentation: the mean score of several views of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_one_of
from spherenet.errors import InvalidArgument

__all__ = ["TEST_TIME", "require_views", "scores_of_views"]

TEST_TIME = ("none", "mirror", "mirror-shift")
"""Views: the image; with its mirror image; both, and both translated by one pixel toward two corners."""


def require_views(tta: str, height: int, width: int) -> None:
    """Raise ValueError if test-time augmentation is unknown, or images are too small to be translated."""
    require_one_of("tta", tta, TEST_TIME)
    if tta == "mirror-shift" and min(height, width) < 2:
        raise InvalidArgument("tta", f"must be none or mirror for images of {height}×{width} pixels, got {tta!r}.")


def scores_of_views(model: nn.Module, images: Tensor, tta: str) -> Tensor:
    """Return the mean scores of a model over views of the images, in float32 or float64.

    "mirror" averages the image and its mirror image. "mirror-shift" has six views: it gives half of the weight to these
    two, and a quarter each to both translated by one pixel to the upper left and to the lower right, with the border
    reflected.

    Args:
        model: Module images → scores, in eval mode.
        images: Images [N, C, H, W].
        tta: "none", "mirror" or "mirror-shift".

    Raises:
        ValueError: If `tta` is unknown, or the images are too small to be translated.
    """
    height, width = images.shape[-2:]
    require_views(tta, height, width)

    def scores(views: Tensor) -> Any:
        return model(views).to(torch.promote_types(views.dtype, torch.float32))

    def both_sides(views: Tensor) -> Tensor:
        return (scores(views) + scores(views.flip(3))) / 2  # type: ignore[no-any-return]

    if tta == "none":
        return scores(images)  # type: ignore[no-any-return]
    if tta == "mirror":
        return both_sides(images)
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    shifted = [padded[:, :, first : first + height, first : first + width] for first in (0, 2)]
    if images.is_contiguous(memory_format=torch.channels_last):
        shifted = [view.contiguous(memory_format=torch.channels_last) for view in shifted]
    return both_sides(images) / 2 + (both_sides(shifted[0]) + both_sides(shifted[1])) / 4
