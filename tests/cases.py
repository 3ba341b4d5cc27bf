"""Tables that several tests use: operators with their reference formulas, and geometries of convolutions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import spherenet as sn
from oracle import sphere_conv as reference
from spherenet.magnitudes import MAGNITUDES
from spherenet.ops.geometry import Geometry as ConvolutionGeometry
from spherenet.ops.geometry import pad_input


@dataclass(frozen=True)
class Operator:
    """An operator and a magnitude function by name, and g by the reference formula."""

    name: str
    k: float | None = None
    magnitude: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {"operator": self.name} if self.k is None else {"operator": self.name, "k": self.k}
        if self.magnitude is not None:
            chosen["magnitude"] = self.magnitude
            if MAGNITUDES[self.magnitude].has_radius:
                chosen["radius"] = "learned"
        return chosen

    @property
    def is_bounded(self) -> bool:
        """Return whether outputs are at most 1."""
        return self.magnitude in (None, "ball", "tanh")

    def g(self, theta: Tensor, k: Tensor | float | None = None) -> Tensor:
        if self.name == "linear":
            return reference.g_linear(theta)
        if self.name == "cosine":
            return reference.g_cosine(theta)
        if self.is_power:
            return reference.g_power(theta, 2.0 if k is None else k)
        return reference.g_sigmoid(theta, self.k if k is None else k)

    @property
    def is_power(self) -> bool:
        """Return whether g is a power of the cosine; the learned power starts at 2."""
        return self.name in ("square-cosine", "sharpened-cosine")

    def steepest(self) -> float:
        """Return max |dg/dθ| over [0, π]."""
        theta = torch.linspace(0, math.pi, 100_001, dtype=torch.float64)
        slopes = {"linear": reference.slope_linear, "cosine": reference.slope_cosine}
        if self.is_power:
            slope = reference.slope_power(theta, 2.0)
        else:
            slope = slopes[self.name](theta) if self.name in slopes else reference.slope_sigmoid(theta, self.k)
        return slope.abs().max().item()

    def __str__(self) -> str:
        name = self.name if self.k is None else f"{self.name}-{self.k:g}"
        return name if self.magnitude is None else f"{name}-{self.magnitude}"


OPERATORS = [
    Operator("linear"),
    Operator("cosine"),
    Operator("sigmoid", 0.1),
    Operator("sigmoid", 0.3),
    Operator("sigmoid", 0.7),
    Operator("learnable", 0.5),
    Operator("square-cosine"),
    Operator("sharpened-cosine"),
]
"""Every angle function."""

WITH_MAGNITUDES = [Operator("linear", magnitude=name) for name in MAGNITUDES]
"""Every magnitude function, with a learned radius if it has one."""


@dataclass(frozen=True)
class Geometry:
    """Arguments of a convolution and the size of its input."""

    dims: int
    size: tuple[int, ...]
    kernel: int | tuple[int, ...] = 3
    channels: int = 3
    filters: int = 4
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def layer_class(self) -> type[nn.Module]:
        return {1: sn.SphereConv1d, 2: sn.SphereConv2d, 3: sn.SphereConv3d}[self.dims]

    def layer(self, **sphere: Any) -> nn.Module:
        sphere.setdefault("dtype", torch.float64)
        return self.layer_class(self.channels, self.filters, self.kernel, **self.arguments, **sphere)

    def images(self, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(batch, self.channels, *self.size, dtype=dtype)

    def __str__(self) -> str:
        sizes = [f"{self.dims}d", "x".join(map(str, self.size)), f"kernel={self.kernel}"]
        return "-".join(sizes + [f"{name}={value}" for name, value in self.arguments.items()])


GEOMETRIES = [
    Geometry(1, (7,)),
    Geometry(1, (9,), 4, arguments={"stride": 2, "padding": 2, "dilation": 2}),
    Geometry(1, (6,), 4, arguments={"padding": "same"}),
    Geometry(1, (6,), 3, arguments={"padding": 1, "padding_mode": "circular"}),
    Geometry(1, (5,), 1),
    Geometry(2, (5, 4)),
    Geometry(2, (5, 5), arguments={"padding": 1}),
    Geometry(2, (5, 6), arguments={"padding": "same", "dilation": 2}),
    Geometry(2, (5, 6), 2, arguments={"padding": "same"}),
    Geometry(2, (5, 6), arguments={"padding": "valid"}),
    Geometry(2, (6, 7), arguments={"stride": 2, "padding": 1}),
    Geometry(2, (7, 7), (3, 2), arguments={"stride": (2, 1), "padding": (2, 0), "dilation": (1, 2)}),
    Geometry(2, (6, 5), (2, 3), arguments={"stride": 3}),
    Geometry(2, (4, 4), 1, arguments={"stride": 2}),
    Geometry(2, (4, 4), 1),
    Geometry(2, (3, 3), 3),
    Geometry(2, (5, 5), channels=4, arguments={"groups": 2, "padding": 1}),
    Geometry(2, (5, 5), channels=4, filters=8, arguments={"groups": 4, "stride": 2}),
    Geometry(2, (5, 5), arguments={"padding": 1, "padding_mode": "reflect"}),
    Geometry(2, (5, 5), arguments={"padding": (2, 1), "padding_mode": "replicate"}),
    Geometry(2, (5, 5), arguments={"padding": 1, "padding_mode": "circular", "stride": 2}),
    Geometry(2, (5, 6), 2, arguments={"padding": "same", "padding_mode": "reflect"}),
    Geometry(3, (3, 4, 3), 2),
    Geometry(3, (4, 3, 4), (2, 1, 3), channels=2, filters=2, arguments={"padding": 1, "stride": 2}),
    Geometry(3, (3, 3, 4), 2, channels=2, filters=2, arguments={"padding": 1, "padding_mode": "replicate"}),
    Geometry(3, (4, 4, 4), 2, channels=2, filters=2, arguments={"groups": 2, "dilation": 2}),
]


def geometry_of(layer: Any) -> ConvolutionGeometry:
    """Return the geometry of a convolution layer."""
    return ConvolutionGeometry(
        layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode
    )


def oracle_conv(layer: Any, images: Tensor, operator: Operator) -> Tensor:
    """Return the layer's output by the reference formula, including rescaling and bias."""
    padded = pad_input(images, geometry_of(layer))
    g, h = functions_of(layer, operator)
    geometry = (layer.stride, layer.dilation, layer.groups)
    out = reference.sphere_conv(padded, layer.weight, g, *geometry, layer.eps, layer.center, h)
    return finish(layer, out, layer.weight.dim() - 2)


def functions_of(layer: Any, operator: Operator) -> tuple[Any, Any]:
    """Return the reference formulas of g and h with the parameters of a layer, as functions of a filter's index."""

    def of_filter(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, Tensor) and value.dim() else value

    def g(theta: Tensor, index: int) -> Tensor:
        return operator.g(theta, of_filter(getattr(layer.angle, "p", layer.k), index))

    magnitude = layer.magnitude
    if magnitude is None:
        return g, None

    def h(norm: Tensor, index: int) -> Tensor:
        radius = of_filter(magnitude.radius, index)
        return reference.MAGNITUDES[magnitude.name](norm, radius, magnitude.alpha, magnitude.beta)

    return g, h


def oracle_linear(layer: Any, rows: Tensor, operator: Operator) -> Tensor:
    """Return the layer's output by the reference formula, including rescaling and bias."""
    g, h = functions_of(layer, operator)
    return finish(layer, reference.sphere_linear(rows, layer.weight, g, layer.eps, layer.center, h), 0)


def finish(layer: Any, out: Tensor, spatial_dims: int) -> Tensor:
    """Return out with bias and rescaling of the layer."""

    def by_filter(value: Any) -> Any:
        return value.reshape(-1, *(1,) * spatial_dims) if isinstance(value, Tensor) else value

    out = out if layer.bias is None else out + by_filter(layer.bias)
    return out if layer.beta is None else out * by_filter(layer.beta) + by_filter(layer.gamma)
