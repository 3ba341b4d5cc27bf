"""The only place where a network chooses between SphereConv and plain convolution.

Networks create their layers with a `LayerFactory` and never look at the operator, so that a SphereNet and its CNN twin
have one definition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spherenet.angles import AngleFunction, LearnableSigmoidAngle
from spherenet.layers import SphereConv2d, SphereLinear
from spherenet.ops.norms import DEFAULT_EPS
from spherenet.validation import require_one_of

__all__ = ["LayerFactory"]


@dataclass
class LayerFactory:
    """Factory of the layers of a network.

    Args:
        operator: Operator as in `SphereConv2d`; None or "none" for plain convolutions.
        k: Parameter of the sigmoid, as in `SphereConv2d`.
        k_sharing: "filter" or "layer" as in `SphereConv2d`, or "network" for one learned k in all layers.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        batch_norm: Whether `unit` adds BatchNorm.
        relu: Whether `unit` adds ReLU.
        shortcut: 1×1 shortcut convolutions: "plain", or with the "operator".

    Raises:
        ValueError: If an argument is out of range, or k or rescale are given for plain convolutions.
    """

    operator: str | AngleFunction | None = "cosine"
    k: float | None = None
    k_sharing: str = "filter"
    rescale: str | tuple[float, float] | None = None
    eps: float = DEFAULT_EPS
    batch_norm: bool = True
    relu: bool = True
    shortcut: str = "plain"

    def __post_init__(self) -> None:
        if self.operator == "none":
            self.operator = None
        require_one_of("k_sharing", self.k_sharing, ("filter", "layer", "network"))
        require_one_of("shortcut", self.shortcut, ("plain", "operator"))
        if self.operator is None:
            for name, value in (("k", self.k), ("rescale", self.rescale)):
                if value is not None:
                    raise ValueError(f"{name} must be None if operator is None (plain convolution), got {value!r}.")
        if self.k_sharing == "network":
            if self.operator != "learnable":
                raise ValueError(
                    f'k_sharing must not be "network" unless operator is "learnable", got {self.operator!r}.'
                )
            self.operator = LearnableSigmoidAngle() if self.k is None else LearnableSigmoidAngle(k=self.k)
            self.k, self.k_sharing = None, "layer"

    @property
    def for_shortcuts(self) -> LayerFactory:
        """Factory of the shortcut convolutions."""
        return self if self.shortcut == "operator" else replace(self, operator=None, k=None, rescale=None)

    def convolution(self, channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        """Return a convolution without bias that keeps the image size, apart from its stride.

        Weights are drawn from He's normal distribution, as in the code released with the paper.
        """
        geometry = (channels_in, channels_out, kernel, stride, kernel // 2)
        layer = (
            nn.Conv2d(*geometry, bias=False)
            if self.operator is None
            else SphereConv2d(*geometry, **self._sphere_options())
        )
        nn.init.kaiming_normal_(layer.weight)
        return layer

    def linear(self, features_in: int, features_out: int) -> nn.Linear:
        """Return a fully connected layer without bias, initialized like `convolution`."""
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
        """Return a convolution followed by BatchNorm and ReLU, as far as the network has them."""
        layers: list[nn.Module] = [self.convolution(channels_in, channels_out, kernel, stride)]
        if self.batch_norm:
            layers.append(nn.BatchNorm2d(channels_out))
        if relu and self.relu:
            # Not in place after a SphereConv, which needs its output for backward.
            layers.append(nn.ReLU(inplace=self.batch_norm))
        return nn.Sequential(*layers)

    def _sphere_options(self) -> dict[str, Any]:
        return {
            "operator": self.operator,
            "k": self.k,
            "k_sharing": self.k_sharing,
            "rescale": self.rescale,
            "eps": self.eps,
        }
