"""Outputs of a SphereConv and a convolution for changing brightness and color.

When a patch of one color becomes brighter, the output of a convolution grows in proportion. The output of a SphereConv
does not change, except for eps under the root of the norm (Eq. 2 of docs/concepts.md): it is g(θ) of
cos θ/√(1 + eps/‖x‖²), which matters below ‖x‖ ≈ √eps. When the ratio of R, G and B changes at constant ‖x‖, both
outputs change, and that of the SphereConv is the same at every brightness.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spherenet.layers import SphereConv2d
from spherenet_paper.style import color_of, method_of
from spherenet_paper.theory import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ColorResponse", "color_response", "draw", "hues", "uniform_patches"]

COLOR = (0.9, 0.55, 0.25)
HUES = 73
SATURATION = 0.7
DIMMING = 0.25
BRIGHTNESS = (1e-4, 1.0)


@dataclass(frozen=True)
class ColorResponse:
    """Outputs of both layers over brightness (factors of one color) and over hue (at full and at a quarter of light).

    Attributes:
        operator: Operator of the SphereConv.
        eps: eps of the SphereConv.
        brightness: Brightness factors.
        sphere_over_brightness: Outputs of the SphereConv at these factors.
        conv_over_brightness: Outputs of the convolution at these factors.
        hue: Hues in degrees.
        sphere_over_hue: Outputs of the SphereConv at these hues.
        conv_over_hue: Outputs of the convolution at these hues.
        sphere_over_hue_dimmed: The same at a quarter of the light.
        conv_over_hue_dimmed: The same at a quarter of the light.
        sphere_change: Largest change over brightness ≥ 0.1, relative to the output at 1.
        conv_change: The same for the convolution.
        conv_nonlinearity: The same for the output of the convolution divided by the brightness.
        sphere_dimming: Largest change over hue when the light is dimmed, relative to the range of the outputs.
        conv_dimming: The same for the convolution.
    """

    operator: str
    eps: float
    brightness: list[float]
    sphere_over_brightness: list[float]
    conv_over_brightness: list[float]
    hue: list[float]
    sphere_over_hue: list[float]
    conv_over_hue: list[float]
    sphere_over_hue_dimmed: list[float]
    conv_over_hue_dimmed: list[float]
    sphere_change: float
    conv_change: float
    conv_nonlinearity: float
    sphere_dimming: float
    conv_dimming: float

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def uniform_patches(colors: Tensor) -> Tensor:
    """Return patches of 3 × 3 pixels of one color each: [N, 3] → [N, 3, 3, 3]."""
    return colors[:, :, None, None].expand(-1, -1, 3, 3)


def hues(count: int = HUES) -> Tensor:
    """Return colors around the color circle, all of unit length: float64 [count, 3]."""
    rgb = [colorsys.hsv_to_rgb(index / (count - 1), SATURATION, 1.0) for index in range(count)]
    colors = torch.tensor(rgb, dtype=torch.float64)
    lengths: Tensor = torch.linalg.vector_norm(colors, dim=1, keepdim=True)
    return colors / lengths


def color_response(operator: str = "cosine", seed: int = 0) -> ColorResponse:
    """Compute the outputs of a SphereConv2d and a Conv2d with the same random kernel in float64.

    Raises:
        ValueError: The operator is unknown.
    """
    torch.manual_seed(seed)
    sphere = SphereConv2d(3, 1, 3, operator=operator, dtype=torch.float64)
    plain = nn.Conv2d(3, 1, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        # A kernel with a clear color preference: for one nearly orthogonal to the color, rounding would dominate.
        plain.weight.copy_(torch.rand_like(plain.weight) * torch.tensor([1.0, 0.3, -0.4]).view(1, 3, 1, 1).double())
        sphere.weight.copy_(plain.weight)
    brightness = torch.logspace(math.log10(BRIGHTNESS[0]), math.log10(BRIGHTNESS[1]), 161, dtype=torch.float64)
    color = torch.tensor([COLOR], dtype=torch.float64)

    def outputs(layer: nn.Module, colors: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = layer(uniform_patches(colors))
        return output.flatten()

    lit = brightness.unsqueeze(1) * color
    sphere_lit, conv_lit = outputs(sphere, lit), outputs(plain, lit)
    bright, dimmed = hues(), DIMMING * hues()
    sphere_hue, conv_hue = outputs(sphere, bright), outputs(plain, bright)
    sphere_dim, conv_dim = outputs(sphere, dimmed), outputs(plain, dimmed)
    well_lit = brightness >= 0.1
    return ColorResponse(
        operator=operator,
        eps=sphere.eps,
        brightness=brightness.tolist(),
        sphere_over_brightness=sphere_lit.tolist(),
        conv_over_brightness=conv_lit.tolist(),
        hue=torch.linspace(0, 360, HUES).tolist(),
        sphere_over_hue=sphere_hue.tolist(),
        conv_over_hue=conv_hue.tolist(),
        sphere_over_hue_dimmed=sphere_dim.tolist(),
        conv_over_hue_dimmed=conv_dim.tolist(),
        sphere_change=_largest_change(sphere_lit[well_lit]),
        conv_change=_largest_change(conv_lit[well_lit]),
        conv_nonlinearity=_largest_change((conv_lit / brightness)[well_lit]),
        sphere_dimming=_relative_to_range(sphere_dim - sphere_hue, sphere_hue),
        conv_dimming=_relative_to_range(conv_dim - conv_hue, conv_hue),
    )


def _largest_change(values: Tensor) -> float:
    return float(((values - values[-1]) / values[-1]).abs().max())


def _relative_to_range(difference: Tensor, values: Tensor) -> float:
    return float(difference.abs().max() / (values.max() - values.min()))


def draw(response: ColorResponse) -> Figure:
    """Draw the outputs over brightness, over brightness on log scales, and over hue at two brightness levels."""
    figure, (linear, logarithmic, hue) = drawing.new_figure(3, 1, width=6.4, height=10.5)
    sphere: dict[str, Any] = {"color": color_of(method_of(response.operator))}
    conv: dict[str, Any] = {"color": color_of("CNN")}
    name = f"SphereConv ({response.operator})"
    for axis in (linear, logarithmic):
        axis.plot(response.brightness, [abs(v) for v in response.sphere_over_brightness], label=name, **sphere)
        axis.plot(response.brightness, [abs(v) for v in response.conv_over_brightness], label="convolution", **conv)
        axis.set_xlabel("brightness of the patch (factor)")
    linear.set_title("brightness: proportional or invariant")
    linear.set_ylabel("|output|")
    linear.set_xlim(0, 1)
    linear.set_ylim(bottom=-0.06 * max(response.conv_over_brightness))  # space for the strip
    _strip(linear, [[b * channel for channel in COLOR] for b in torch.linspace(0, 1, 128).tolist()])
    logarithmic.set_title("on log scales: effect of eps on dark patches")
    logarithmic.set_xscale("log")
    logarithmic.set_yscale("log")
    length = math.sqrt(9 * sum(channel * channel for channel in COLOR))
    logarithmic.axvline(
        math.sqrt(response.eps) / length, color=color_of("standardized"), linestyle=":", label="‖x‖ = √eps"
    )
    for values, dimmed, line, layer in (
        (response.sphere_over_hue, response.sphere_over_hue_dimmed, sphere, "SphereConv"),
        (response.conv_over_hue, response.conv_over_hue_dimmed, conv, "convolution"),
    ):
        hue.plot(response.hue, values, label=layer, **line)
        marks = {
            "color": line["color"],
            "linestyle": "none",
            "marker": "o",
            "markerfacecolor": "none",
            "markersize": 5,
        }
        hue.plot(response.hue[::4], dimmed[::4], label=f"{layer}, light ÷ 4", **marks)
    hue.set_title("ratio of R, G, B at constant ‖x‖: both respond")
    hue.set_xlabel("hue (degrees)")
    hue.set_xticks(range(0, 361, 60))
    hue.set_xlim(0, 360)
    low, high = hue.get_ylim()
    hue.set_ylim(low - 0.06 * (high - low), high + 0.3 * (high - low))  # space for strip and legend
    _strip(hue, hues(128).tolist())
    linear.legend(**drawing.LEGEND)
    logarithmic.legend(**drawing.LEGEND)
    hue.legend(loc="upper center", ncols=2, **drawing.LEGEND)
    return figure


def _strip(axis: Axes, colors: list[list[float]]) -> None:
    """Show the colors of the patches along the lower edge of a panel."""
    inset = axis.inset_axes((0.0, 0.0, 1.0, 0.035))
    inset.imshow([colors], aspect="auto", vmin=0, vmax=1)
    inset.set_axis_off()
