"""The paper's plain networks, cnn-N: three stages of N/3 convolutions and a fully connected layer (SPEC 3)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from spherenet.models.convolutions import Convolutions

__all__ = ["PlainFeatures"]

POOLINGS = 3


class PlainFeatures(nn.Module):
    """Images [N, C, H, W] to features [N, out_features] by `depth` 3×3 convolutions in three stages.

    Each stage ends in a 2×2 max pooling; the fully connected layer that follows is of the operator too and has
    neither BatchNorm nor ReLU. Raises ValueError for an image that three poolings leave nothing of.
    """

    def __init__(
        self,
        convolutions: Convolutions,
        depth: int,
        widths: Sequence[int],
        in_channels: int,
        input_size: tuple[int, int],
        out_features: int = 256,
    ) -> None:
        super().__init__()
        smallest = 2**POOLINGS
        if min(input_size) < smallest:
            raise ValueError(
                f"input_size must be at least {smallest}×{smallest} for {POOLINGS} poolings, "
                f"got {input_size[0]}×{input_size[1]}."
            )
        self.out_features = out_features
        self.stages = nn.ModuleList()
        channels = in_channels
        for width in widths:
            units = []
            for _ in range(depth // len(widths)):
                units.append(convolutions.unit(channels, width, 3))
                channels = width
            self.stages.append(nn.Sequential(*units, nn.MaxPool2d(2, 2)))
        height, width = (side // smallest for side in input_size)
        self.fully_connected = convolutions.linear(channels * height * width, out_features)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        for stage in self.stages:
            images = stage(images)
        features: Tensor = self.fully_connected(images.flatten(1))
        return features
