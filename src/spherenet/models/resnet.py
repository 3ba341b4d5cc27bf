"""The paper's residual networks: resnet-32 and resnet-32-wide for small images, resnet-18 for large ones (SPEC 3)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.models.convolutions import Convolutions

__all__ = ["ResidualFeatures"]


class ResidualUnit(nn.Module):
    """Two 3×3 convolutions beside a shortcut: out = ReLU(conv(conv(x)) + shortcut(x)).

    The shortcut is a 1×1 convolution with BatchNorm where the shape changes, else the input itself.
    """

    def __init__(
        self, convolutions: Convolutions, shortcuts: Convolutions, channels_in: int, channels_out: int, stride: int
    ) -> None:
        super().__init__()
        self.first = convolutions.unit(channels_in, channels_out, 3, stride)
        self.second = convolutions.unit(channels_out, channels_out, 3, relu=False)
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = shortcuts.unit(channels_in, channels_out, 1, stride, relu=False) if changes else nn.Identity()
        self.relu = convolutions.relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the unit's output."""
        out: Tensor = self.second(self.first(x)) + self.shortcut(x)
        return F.relu(out, inplace=True) if self.relu else out


class ResidualFeatures(nn.Module):
    """Images [N, C, H, W] to features [N, widths[-1]]: a first convolution, stages of units, a global mean.

    large_images: a 7×7 convolution of stride 2 and a 3×3 max pooling begin the network instead of a 3×3 convolution.
    The first unit of every stage but the first halves the size.
    """

    def __init__(
        self,
        convolutions: Convolutions,
        shortcuts: Convolutions,
        units_a_stage: int,
        widths: Sequence[int],
        in_channels: int,
        large_images: bool,
    ) -> None:
        super().__init__()
        self.out_features = widths[-1]
        self.begin = convolutions.unit(in_channels, widths[0], 7 if large_images else 3, 2 if large_images else 1)
        self.pool = nn.MaxPool2d(3, 2, 1) if large_images else nn.Identity()
        channels = widths[0]
        self.stages = nn.ModuleList()
        for stage, width in enumerate(widths):
            units = []
            for index in range(units_a_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                units.append(ResidualUnit(convolutions, shortcuts, channels, width, stride))
                channels = width
            self.stages.append(nn.Sequential(*units))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        x: Tensor = self.pool(self.begin(images))
        for stage in self.stages:
            x = stage(x)
        return x.mean((2, 3))
