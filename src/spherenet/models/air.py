"""The network of the speed recipe: a frozen whitening layer and three groups of two 3×3 convolutions.

"air-unwhitened" starts with a 3×3 convolution of the factory instead. The whitening layer is a plain convolution with a
bias in SphereNets, too, and so lets the light of an image through; without it every layer ignores the gain, and if
centered the offset, of its patches.

Its shape, and that of the recipe, are those of a public speed record on CIFAR-10 (K. Jordan, "94% on CIFAR-10 in 3.29
seconds on a single GPU", arXiv 2404.00498, and its successor with Muon); the code is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.errors import InvalidArgument
from spherenet.models.networks import LayerFactory, require_size

__all__ = ["AirFeatures", "Whitening"]

WHITENING_EPS = 5e-4
"""Added to the eigenvalues, relative to the mean one: directions with less variance are noise."""


class Whitening(nn.Module):
    """A 2×2 convolution whose outputs are uncorrelated for natural patches, and their negatives.

    `initialize_from` computes the filters from images: the eigenvectors of the second moments of 2×2 patches, each
    divided by the square root of its eigenvalue, then their negatives. They are not trained; the bias is.

    Args:
        in_channels: Channels of the images. There are 8 outputs per channel.

    Shape:
        [N, C, H, W] → [N, 8·C, H − 1, W − 1].
    """

    trained_until = 3 / 8
    """Fraction of the run at which the learning rate of the bias reaches 0."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, 8 * in_channels
        self.weight = nn.Parameter(torch.empty(self.out_channels, in_channels, 2, 2), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(self.out_channels))
        nn.init.orthogonal_(self.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return the whitened patches."""
        return F.conv2d(images, self.weight, self.bias)

    @torch.no_grad()
    def initialize_from(self, images: Tensor) -> None:
        """Compute the filters from images [N, C, H, W].

        Raises:
            ValueError: If there are fewer patches than entries of a patch, or if the patches are all constant or not
                finite.
        """
        patches = F.unfold(images.float(), 2).transpose(1, 2).flatten(0, 1).double()
        if len(patches) < patches.shape[1]:
            raise InvalidArgument(
                "images",
                f"must have at least {patches.shape[1]} patches of 2×2 pixels for whitening, got {len(patches)}.",
            )
        moments = patches.T @ patches / len(patches)
        mean = moments.diagonal().mean()
        if not bool(mean.isfinite() & (mean > 0)):
            raise InvalidArgument(
                "images", f"must be finite and not all 0 for whitening, got a mean square of {mean:g}."
            )
        channels = torch.unflatten(patches, 1, (self.in_channels, 4))
        if bool((channels == channels[:, :, :1]).all()):
            raise InvalidArgument(
                "images", f"must not all be constant for whitening, got {len(patches)} patches without any variation."
            )
        values, vectors = torch.linalg.eigh(moments)
        filters = vectors.T / (values + WHITENING_EPS * mean).sqrt()[:, None]
        filters = filters.flip(0).view(-1, self.in_channels, 2, 2)  # the largest eigenvalue first
        self.weight.copy_(torch.cat([filters, -filters]))

    def extra_repr(self) -> str:
        """Return the channels."""
        return f"{self.in_channels}, {self.out_channels}"


class _Group(nn.Module):
    """Convolution, 2×2 max pooling, normalization, GELU, convolution, normalization, GELU."""

    def __init__(self, layers: LayerFactory, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first, self.second = (
            _convolution(layers, channels_in, channels_out),
            _convolution(layers, channels_out, channels_out),
        )
        self.first_norm, self.second_norm = _normalization(layers, channels_out), _normalization(layers, channels_out)
        self.activation = nn.GELU() if layers.relu else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of half the size."""
        x = self.activation(self.first_norm(F.max_pool2d(self.first(x), 2)))
        out: Tensor = self.activation(self.second_norm(self.second(x)))
        return out


def _convolution(layers: LayerFactory, channels_in: int, channels_out: int) -> nn.Conv2d:
    """Return a 3×3 convolution with torch's initialization."""
    layer = layers.convolution(channels_in, channels_out, 3)
    nn.init.kaiming_uniform_(layer.weight, a=5**0.5)
    return layer


def _normalization(layers: LayerFactory, channels: int) -> nn.Module:
    """Return a BatchNorm that forgets quickly and has a fixed scale, or what the network uses instead."""
    if not layers.batch_norm:
        return nn.GroupNorm(layers.group_norm, channels) if layers.group_norm else nn.Identity()
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


class AirFeatures(nn.Module):
    """Features of the speed recipe's network: whitening, one group per width, maximum over the remaining map.

    Args:
        layers: Factory of the 3×3 convolutions. `relu=False` leaves out the activations, which are GELU.
        widths: Number of filters of each group.
        in_channels: Channels of the images.
        input_size: Height and width of the images.
        whitening: Whether the first layer is the frozen whitening; otherwise it is a 3×3 convolution of the factory.

    Shape:
        images [N, C, H, W] → features [N, widths[-1]].

    Raises:
        ValueError: If the image is too small for the poolings.
    """

    def __init__(
        self,
        layers: LayerFactory,
        widths: Sequence[int],
        in_channels: int,
        input_size: tuple[int, int],
        whitening: bool = True,
    ) -> None:
        super().__init__()
        require_size(input_size, 2 ** len(widths) + 1, f"{len(widths)} poolings after whitening")
        filters = 8 * in_channels
        self.whitening = Whitening(in_channels) if whitening else None
        self.first = None if whitening else layers.convolution(in_channels, filters, 3)
        channels = [filters, *widths]
        self.groups = nn.Sequential(*(_Group(layers, *pair) for pair in zip(channels, widths, strict=False)))
        self.activation = nn.GELU() if layers.relu else nn.Identity()
        self.out_features = widths[-1]

    @property
    def head_std(self) -> float:
        """Standard deviation of the initial class weights: logits start at about 1/√features of the features' size."""
        return 1 / self.out_features

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        first = self.first if self.whitening is None else self.whitening
        assert first is not None
        maps = self.groups(self.activation(first(images)))
        return F.adaptive_max_pool2d(maps, 1).flatten(1)
