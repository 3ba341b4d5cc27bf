"""The one place where a network decides between a SphereConv and a plain convolution.

Networks ask `Convolutions` for their layers and never look at the operator, so a SphereNet and its CNN twin are one
definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from spherenet.layers import SphereConv2d, SphereLinear
from spherenet.ops.angle_functions import AngleFunction, LearnableSigmoidAngle
from spherenet.ops.arguments import require_one_of
from spherenet.ops.norms import DEFAULT_EPS

__all__ = ["Convolutions"]


@dataclass
class Convolutions:
    """What every convolution of a network is made of.

    operator: None for plain convolutions, else as in `SphereConv2d`. k_sharing: as there, or "network" for one
    learned k in all layers. batch_norm, relu: whether `unit` adds them.
    """

    operator: str | AngleFunction | None = None
    k: float | None = None
    k_sharing: str = "filter"
    rescale: str | tuple[float, float] | None = None
    eps: float = DEFAULT_EPS
    batch_norm: bool = True
    relu: bool = True

    def __post_init__(self) -> None:
        require_one_of("k_sharing", self.k_sharing, ("filter", "layer", "network"))
        if self.operator is None:
            for name, value in (("k", self.k), ("rescale", self.rescale)):
                if value is not None:
                    raise ValueError(f"{name} must be None where operator is None (plain convolution), got {value!r}.")
        if self.k_sharing == "network":
            if self.operator != "learnable":
                raise ValueError(
                    f'k_sharing must not be "network" unless operator is "learnable", got {self.operator!r}.'
                )
            self.operator = LearnableSigmoidAngle() if self.k is None else LearnableSigmoidAngle(k=self.k)
            self.k, self.k_sharing = None, "layer"

    def _sphere_options(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "k": self.k,
            "k_sharing": self.k_sharing,
            "rescale": self.rescale,
            "eps": self.eps,
        }

    def convolution(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        """A convolution that keeps the size but for its stride, initialised as the released code does (SPEC 3)."""
        geometry = (channels_in, channels_out, kernel, stride, kernel // 2)
        layer = (
            nn.Conv2d(*geometry, bias=False)
            if self.operator is None
            else SphereConv2d(*geometry, **self._sphere_options())
        )
        nn.init.kaiming_normal_(layer.weight)
        return layer

    def linear(self, features_in: int, features_out: int) -> nn.Linear:
        """A fully connected layer without bias."""
        layer = (
            nn.Linear(features_in, features_out, bias=False)
            if self.operator is None
            else SphereLinear(features_in, features_out, **self._sphere_options())
        )
        nn.init.kaiming_normal_(layer.weight)
        return layer

    def unit(
        self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, relu: bool = True
    ) -> nn.Sequential:
        """A convolution with its BatchNorm and ReLU, where the network has them."""
        layers: list[nn.Module] = [self.convolution(channels_in, channels_out, kernel, stride)]
        if self.batch_norm:
            layers.append(nn.BatchNorm2d(channels_out))
        if relu and self.relu:
            # In place only on BatchNorm's output: a SphereConv keeps its own for backward.
            layers.append(nn.ReLU(inplace=self.batch_norm))
        return nn.Sequential(*layers)
