"""Feature extractors of the paper's networks, and the factory that creates their layers.

Networks create layers with a `LayerFactory`, the only place that chooses between sphere and plain layers. Therefore a
SphereNet and its CNN twin share one definition.

Each network takes a `LayerFactory`, widths, input channels and input size, and has the attribute `out_features`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace

from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_one_of
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument
from spherenet.kernels.dispatch import readable
from spherenet.layers import FastConv2d, SphereConv2d, SphereLinear, SphereOptions
from spherenet.layers.base import Proxy
from spherenet.layers.options import FIRST_PATCH, SphereKeywords

__all__ = ["LayerFactory", "PlainFeatures", "ResidualFeatures", "require_size"]


@dataclass
class LayerFactory:
    """Factory of the layers of a network.

    Args:
        operator: Operator as in `SphereConv2d`, or all options of the sphere layers as `SphereOptions`; None or "none"
            for plain convolutions. Kernels with a single entry are not centered. With the center "first-patch", only
            the first layer that the factory creates is.
        batch_norm: Whether `unit` adds BatchNorm.
        relu: Whether `unit` adds ReLU.
        shortcut: 1×1 shortcut convolutions: "plain", or with the "operator".
        group_norm: Number of groups of the GroupNorm that `unit` adds instead of BatchNorm; 0 for none. It must
            divide the number of channels.
        engine: "torch", or "winograd" (`FastConv2d`) for plain convolutions.

    Raises:
        ValueError: If an argument is out of range.
    """

    operator: InitVar[str | AngleFunction | SphereOptions | None]
    batch_norm: bool = True
    relu: bool = True
    shortcut: str = "plain"
    group_norm: int = 0
    engine: str = "torch"
    options: SphereOptions | None = field(init=False)
    _has_first: bool = field(init=False, default=False)

    def __post_init__(self, operator: str | AngleFunction | SphereOptions | None) -> None:
        require_one_of("shortcut", self.shortcut, ("plain", "operator"))
        require_one_of("engine", self.engine, ("torch", "winograd"))
        if type(self.group_norm) is not int or self.group_norm < 0:
            raise InvalidArgument("group_norm", f"must be an integer of at least 0, got {self.group_norm!r}.")
        if self.group_norm and self.batch_norm:
            raise InvalidArgument("group_norm", f"must be 0 unless batch_norm is False, got {self.group_norm}.")
        if operator is None or operator == "none":
            self.options = None
        else:
            options = operator if isinstance(operator, SphereOptions) else SphereOptions(operator)
            self.options = options.for_network(None, has_first=True).share_angle()

    @property
    def for_shortcuts(self) -> LayerFactory:
        """Factory of the shortcut convolutions."""
        return self if self.shortcut == "operator" else replace(self, operator=None)

    def _next_options(self, options: SphereOptions, entries: int) -> SphereKeywords:
        """Return the options of the next sphere layer, whose kernels have this size."""
        if options.center == FIRST_PATCH:
            options = replace(options, center=None if self._has_first else "patch")
        self._has_first = True
        return options.for_kernel(entries).keywords()

    def convolution(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        """Return a convolution without bias that keeps the image size, apart from its stride.

        Weights are drawn from He's normal distribution, as in the code released with the paper.
        """
        geometry = (channels_in, channels_out, kernel, stride, kernel // 2)
        layer = (
            (FastConv2d if self.engine == "winograd" else nn.Conv2d)(*geometry, bias=False)
            if self.options is None
            else SphereConv2d(*geometry, **self._next_options(self.options, channels_in * kernel * kernel))
        )
        nn.init.kaiming_normal_(layer.weight)
        return layer

    def linear(self, features_in: int, features_out: int) -> nn.Linear:
        """Return a fully connected layer without bias, initialized like `convolution`."""
        layer = (
            nn.Linear(features_in, features_out, bias=False)
            if self.options is None
            else SphereLinear(features_in, features_out, **self._next_options(self.options, features_in))
        )
        nn.init.kaiming_normal_(layer.weight)
        return layer

    def unit(
        self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, relu: bool = True
    ) -> nn.Sequential:
        """Return a convolution, followed by BatchNorm or GroupNorm and ReLU if the network uses them."""
        layers: list[nn.Module] = [self.convolution(channels_in, channels_out, kernel, stride)]
        if self.batch_norm:
            layers.append(nn.BatchNorm2d(channels_out))
        elif self.group_norm:
            if channels_out % self.group_norm:
                raise InvalidArgument(
                    "group_norm",
                    f"must divide the {channels_out} channels of every convolution, got {self.group_norm}.",
                )
            layers.append(nn.GroupNorm(self.group_norm, channels_out))
        if relu and self.relu:
            # Not in place after a SphereConv, which needs its output for backward.
            layers.append(nn.ReLU(inplace=self.batch_norm))
        return nn.Sequential(*layers)


def require_size(input_size: tuple[int, int], smallest: int, purpose: str) -> None:
    """Raise ValueError if images are smaller than a network needs."""
    if min(input_size) < smallest:
        height, width = input_size
        raise InvalidArgument(
            "input_size", f"must be at least {smallest}×{smallest} for {purpose}, got {height}×{width}."
        )


class PlainFeatures(nn.Module):
    """Plain network: one stage of 3×3 convolutions per width, then a fully connected layer.

    Each stage ends with 2×2 max pooling. The fully connected layer uses the operator too and has neither BatchNorm nor
    ReLU.

    Args:
        layers: Factory of the layers.
        widths: Number of filters of each stage.
        in_channels: Channels of the images.
        input_size: Height and width of the images.
        depth: Number of convolutions of all stages together.
        out_features: Number of features.

    Shape:
        images [N, C, H, W] → features [N, out_features].

    Raises:
        ValueError: If the image is too small for the poolings.
    """

    def __init__(
        self,
        layers: LayerFactory,
        widths: Sequence[int],
        in_channels: int,
        input_size: tuple[int, int],
        *,
        depth: int,
        out_features: int = 256,
    ) -> None:
        super().__init__()
        shrinkage = 2 ** len(widths)
        require_size(input_size, shrinkage, f"{len(widths)} poolings")
        self.out_features = out_features
        self.stages = nn.ModuleList()
        channels = in_channels
        for width in widths:
            units = []
            for _ in range(depth // len(widths)):
                units.append(layers.unit(channels, width, 3))
                channels = width
            self.stages.append(nn.Sequential(*units, nn.MaxPool2d(2, 2)))
        height, width = (side // shrinkage for side in input_size)
        self.input_size = input_size
        self.fully_connected = layers.linear(channels * height * width, out_features)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        x = images
        for stage in self.stages:
            x = stage(x)
        flat = x.flatten(1)
        if not isinstance(flat, Proxy) and readable(flat):
            expected = getattr(self.fully_connected, "in_features", flat.shape[-1])
            if flat.shape[-1] != expected:
                size = " × ".join(map(str, self.input_size))
                raise InvalidArgument(
                    "images", f"must be {size}, the input_size of this network, got shape {list(images.shape)}."
                )
        features: Tensor = self.fully_connected(flat)
        return features


class ResidualUnit(nn.Module):
    """Two 3×3 convolutions and a shortcut: out = ReLU(conv(conv(x)) + shortcut(x)).

    If the shape changes, the shortcut is a 1×1 convolution with BatchNorm, otherwise the identity.
    """

    def __init__(self, layers: LayerFactory, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = layers.unit(channels_in, channels_out, 3, stride)
        self.second = layers.unit(channels_out, channels_out, 3, relu=False)
        self.stride = stride
        if stride != 1 or channels_in != channels_out:
            self.shortcut: nn.Module = layers.for_shortcuts.unit(channels_in, channels_out, 1, relu=False)
        else:
            self.shortcut = nn.Identity()
        self.relu = layers.relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the unit."""
        # Pixels are skipped here, not by a strided 1×1 convolution, in whose gradient oneDNN corrupts the memory.
        used = x if self.stride == 1 else x[:, :, :: self.stride, :: self.stride]
        out: Tensor = self.second(self.first(x)) + self.shortcut(used)
        return F.relu(out, inplace=True) if self.relu else out


class ResidualFeatures(nn.Module):
    """Residual network: a convolution, one stage of residual units per width, global average pooling.

    The first unit of each stage except the first one halves the image size.

    Args:
        layers: Factory of the layers.
        widths: Number of filters of each stage.
        in_channels: Channels of the images.
        input_size: Ignored; the network takes images of any size.
        units_per_stage: Number of residual units of each stage.
        large_images: Start with a 7×7 convolution of stride 2 and 3×3 max pooling instead of a 3×3 convolution.

    Shape:
        images [N, C, H, W] → features [N, widths[-1]].
    """

    def __init__(
        self,
        layers: LayerFactory,
        widths: Sequence[int],
        in_channels: int,
        input_size: tuple[int, int],
        *,
        units_per_stage: int,
        large_images: bool = False,
    ) -> None:
        super().__init__()
        self.out_features = widths[-1]
        self.begin = layers.unit(in_channels, widths[0], 7 if large_images else 3, 2 if large_images else 1)
        self.pool = nn.MaxPool2d(3, 2, 1) if large_images else nn.Identity()
        channels = widths[0]
        self.stages = nn.ModuleList()
        for stage, width in enumerate(widths):
            units = []
            for index in range(units_per_stage):
                stride = 2 if stage > 0 and index == 0 else 1
                units.append(ResidualUnit(layers, channels, width, stride))
                channels = width
            self.stages.append(nn.Sequential(*units))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        x: Tensor = self.pool(self.begin(images))
        for stage in self.stages:
            x = stage(x)
        return x.mean((2, 3))
