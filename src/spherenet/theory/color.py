"""What a SphereConv and a convolution answer to brightness and to colour (SPEC 1 (9)).

A patch of one colour is made brighter: a convolution's answer grows in proportion; a SphereConv's does not change, but
for eps under the root of the norm, g(θ) of cos θ/√(1 + eps/‖x‖²), which is felt below ‖x‖ ≈ √eps. Then the ratio of
R, G and B is changed at constant ‖x‖: both answers change, the SphereConv's alike at every brightness.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spherenet.layers import SphereConv2d
from spherenet.theory import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ColourResponse", "colour_response", "draw", "hues", "patch_of"]

COLOUR = (0.9, 0.55, 0.25)
HUES = 73
SATURATION = 0.7
DIMMED = 0.25
BRIGHTNESS = (1e-4, 1.0)


@dataclass(frozen=True)
class ColourResponse:
    """Answers of both layers: over brightness (factors of one colour), and over hue, bright and dimmed to a quarter.

    sphere_change, conv_change: the largest change of the answer over brightness ≥ 0.1, relative to the answer at 1.
    conv_nonlinearity: the same for the convolution's answer divided by the brightness. sphere_dimming, conv_dimming:
    how far the answers over hue move when the light is dimmed, relative to their range.
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
        """Return what JSON takes."""
        return asdict(self)


def patch_of(colours: Tensor) -> Tensor:
    """Patches of 3 × 3 pixels of one colour each: [N, 3] → [N, 3, 3, 3]."""
    return colours[:, :, None, None].expand(-1, -1, 3, 3)


def hues(count: int = HUES) -> Tensor:
    """Colours around the circle of hues, all of the same length: float64 [count, 3]."""
    rgb = [colorsys.hsv_to_rgb(index / (count - 1), SATURATION, 1.0) for index in range(count)]
    colours = torch.tensor(rgb, dtype=torch.float64)
    lengths: Tensor = torch.linalg.vector_norm(colours, dim=1, keepdim=True)
    return colours / lengths


def colour_response(operator: str = "cosine", seed: int = 0) -> ColourResponse:
    """Answers of one SphereConv2d and one Conv2d with the same random kernel, in float64.

    ValueError for an unknown operator.
    """
    torch.manual_seed(seed)
    sphere = SphereConv2d(3, 1, 3, operator=operator, dtype=torch.float64)
    plain = nn.Conv2d(3, 1, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        # A kernel with a clear preference: one nearly orthogonal to the colour would show little but rounding.
        plain.weight.copy_(torch.rand_like(plain.weight) * torch.tensor([1.0, 0.3, -0.4]).view(1, 3, 1, 1).double())
        sphere.weight.copy_(plain.weight)
    brightness = torch.logspace(math.log10(BRIGHTNESS[0]), math.log10(BRIGHTNESS[1]), 161, dtype=torch.float64)
    colour = torch.tensor([COLOUR], dtype=torch.float64)

    def answers(layer: nn.Module, colours: Tensor) -> Tensor:
        with torch.no_grad():
            answered: Tensor = layer(patch_of(colours))
        return answered.flatten()

    lit = brightness.unsqueeze(1) * colour
    sphere_lit, conv_lit = answers(sphere, lit), answers(plain, lit)
    bright, dimmed = hues(), DIMMED * hues()
    sphere_hue, conv_hue = answers(sphere, bright), answers(plain, bright)
    sphere_dim, conv_dim = answers(sphere, dimmed), answers(plain, dimmed)
    well_lit = brightness >= 0.1
    return ColourResponse(
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


def draw(response: ColourResponse) -> Figure:
    """Three panels: over brightness, over brightness on log scales, over hue at two brightnesses."""
    figure, (linear, logarithmic, hue) = drawing.new_figure(1, 3, width=13, height=4.2)
    sphere: dict[str, Any] = {"color": drawing.BLUE, "linewidth": 2}
    conv: dict[str, Any] = {"color": drawing.RED, "linewidth": 2}
    name = f"SphereConv ({response.operator})"
    for axis in (linear, logarithmic):
        axis.plot(response.brightness, [abs(v) for v in response.sphere_over_brightness], label=name, **sphere)
        axis.plot(response.brightness, [abs(v) for v in response.conv_over_brightness], label="convolution", **conv)
        axis.set_xlabel("brightness of the patch (factor)")
        axis.grid(alpha=0.3)
    linear.set_title("brightness: proportional, or dropped")
    linear.set_ylabel("answer")
    linear.set_xlim(0, 1)
    linear.set_ylim(bottom=-0.06 * max(response.conv_over_brightness))  # room for the strip
    _strip(linear, [[b * channel for channel in COLOUR] for b in torch.linspace(0, 1, 128).tolist()])
    logarithmic.set_title("on log scales: eps, felt by dark patches")
    logarithmic.set_xscale("log")
    logarithmic.set_yscale("log")
    length = math.sqrt(9 * sum(channel * channel for channel in COLOUR))
    logarithmic.axvline(math.sqrt(response.eps) / length, color=drawing.GREY, linestyle=":", label="‖x‖ = √eps")
    for values, dimmed, line, what in (
        (response.sphere_over_hue, response.sphere_over_hue_dimmed, sphere, "SphereConv"),
        (response.conv_over_hue, response.conv_over_hue_dimmed, conv, "convolution"),
    ):
        hue.plot(response.hue, values, label=what, **line)
        marks = {
            "color": line["color"],
            "linestyle": "none",
            "marker": "o",
            "markerfacecolor": "white",
            "markersize": 5,
        }
        hue.plot(response.hue[::4], dimmed[::4], label=f"{what}, light ÷ 4", **marks)
    hue.set_title("ratio of R, G, B at constant ‖x‖: seen by both")
    hue.set_xlabel("hue (degrees)")
    hue.set_xticks(range(0, 361, 60))
    hue.set_xlim(0, 360)
    low, high = hue.get_ylim()
    hue.set_ylim(low - 0.06 * (high - low), high + 0.3 * (high - low))  # room for strip and legend
    hue.grid(alpha=0.3)
    _strip(hue, hues(128).tolist())
    linear.legend(frameon=False, fontsize=9)
    logarithmic.legend(frameon=False, fontsize=9)
    hue.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
    return figure


def _strip(axis: Axes, colours: list[list[float]]) -> None:
    """Show the colours of the patches along the lower edge of a panel."""
    inset = axis.inset_axes((0.0, 0.0, 1.0, 0.035))
    inset.imshow([colours], aspect="auto", vmin=0, vmax=1)
    inset.set_axis_off()
