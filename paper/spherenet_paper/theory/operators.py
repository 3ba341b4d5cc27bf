"""Angle functions g and margin functions ψ_m with their slopes (Eq. 1 and 6 of docs/concepts.md).

    ψ_m(θ) = g(mθ − jπ) − j·(g(0) − g(π)),  j = ⌊mθ/π⌋

consists of m copies of g. Where two copies meet, at θ = jπ/m, the slope of ψ is m times the slope of g at its ends. It
is zero for the cosine, whose ends are flat, so the target gets no gradient there. It is C(k)·2e^u/(k(1+e^u)²) at
u = π/(2k) for a sigmoid, small for small k but never zero, and the full slope for the linear g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spherenet.angles import AngleFunction, CosineAngle, LinearAngle, SigmoidAngle
from spherenet.errors import InvalidArgument
from spherenet_paper.style import TEXT, WIDTH, color_of, method_of
from spherenet_paper.theory import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MarginSlopes", "draw", "margin_slopes", "operators", "psi_slope", "saddle_points", "slope"]

LARGEST_M = 1000
"""Largest margin: ψ_m is evaluated at m − 1 angles."""
FLAT = 1e-9
"""A smaller slope counts as zero; the sine of a multiple of π is about 1e-16 in float64."""

DASHES: tuple[Any, ...] = ("solid", (0, (1, 1)), (0, (5, 1.5)), (0, (5, 1, 1, 1)))
"""Of functions with the same color, in order."""
SHALLOWEST = 1e-6
"""Lower end of the log scale of slopes; zero slopes are drawn there."""

MOST_TICKS = 8
ENDS = 1e-4  # distance from 0 and π at which the slope of g is drawn; at 0 and π the library sets it to 0


@dataclass(frozen=True)
class MarginSlopes:
    """Slopes of ψ_m for one g.

    Attributes:
        g: Name of g.
        m: Margin.
        theta: Angles where the segments of ψ_m meet.
        slope_there: Largest |dψ/dθ| at these angles.
        steepest: Largest |dψ/dθ| on (0, π).
        saddle: Whether dψ/dθ = 0 at these angles.
    """

    g: str
    m: int
    theta: tuple[float, ...]
    slope_there: float
    steepest: float
    saddle: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def operators(k: Sequence[float]) -> dict[str, AngleFunction]:
    """Return the cosine, the linear g and a sigmoid for every k, by name.

    Raises:
        ValueError: A k is not greater than 0.
    """
    sigmoids: dict[str, AngleFunction] = {f"sigmoid, k = {each:g}": SigmoidAngle(each) for each in k}
    return {"cosine": CosineAngle(), "linear": LinearAngle(), **sigmoids}


def slope(angle: AngleFunction, theta: Tensor) -> Tensor:
    """Return dg/dθ = −sin θ·dg/dc."""
    return -theta.sin() * angle.derivative(theta.cos())


def psi_slope(angle: AngleFunction, m: int, theta: Tensor) -> Tensor:
    """Return dψ_m/dθ; where two segments meet, that of the right one (g at 0)."""
    return angle.psi_derivative(theta, m)


def saddle_points(m: int) -> Tensor:
    """Return θ = jπ/m for j = 1 … m − 1, where segments of ψ_m meet, float64 [m − 1]; the paper prints kθ/m."""
    return torch.arange(1, m, dtype=torch.float64) * math.pi / m


def margin_slopes(angles: dict[str, AngleFunction], m: int) -> list[MarginSlopes]:
    """Return the slopes of ψ_m where its segments meet, for every g.

    Raises:
        ValueError: m < 2, so that ψ_m has a single segment, or m > 1,000.
    """
    if not 2 <= m <= LARGEST_M:
        raise InvalidArgument("m", f"must be a whole number from 2 to {LARGEST_M}, got {m}.")
    grid = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    slopes = []
    for name, angle in angles.items():
        points = saddle_points(m)
        # θ = 0 gives the slope of the right segment: rounding decides on which segment the other points lie.
        there = float(psi_slope(angle, m, torch.tensor([0.0, *points.tolist()], dtype=torch.float64)).abs().max())
        steepest = float(psi_slope(angle, m, grid).abs().max())
        # A sigmoid with small k is steep at π/2 and almost flat elsewhere, but its slope is never zero.
        saddle = there < FLAT and angle.kernel_id != "sigmoid"
        slopes.append(MarginSlopes(name, m, tuple(points.tolist()), there, steepest, saddle))
    return slopes


def draw(angles: dict[str, AngleFunction], m: int) -> Figure:
    """Draw g and its slope, ψ_m and the absolute value of its slope on a log scale."""
    figure, (value, steepness, margin, margin_slope) = drawing.new_figure(2, 2, width=WIDTH, height=7.2)
    theta = torch.linspace(ENDS, math.pi - ENDS, 1441, dtype=torch.float64)
    points = saddle_points(m)
    fine = torch.cat([theta, points]).sort().values
    drawn: list[str] = []
    for name, angle in angles.items():
        method = method_of(name)
        line: dict[str, Any] = {"color": color_of(method), "linestyle": DASHES[drawn.count(method) % len(DASHES)]}
        drawn.append(method)
        value.plot(theta, angle.at(theta), label=name, **line)
        steepness.plot(theta, slope(angle, theta), **line)
        margin.plot(theta, angle.extended(m * theta), **line)
        margin_slope.plot(fine, psi_slope(angle, m, fine).abs().clamp_min(SHALLOWEST), **line)
    flat = [angles[slopes.g] for slopes in margin_slopes(angles, m) if slopes.saddle]
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6, "color": TEXT.light, "zorder": 3}
    if flat:
        margin.plot(points, flat[0].extended(m * points), label=f"θ = jπ/{m}", **dot)
        margin_slope.plot(points, torch.full_like(points, SHALLOWEST), clip_on=False, **dot)
    value.set_title("g(θ), the output")
    steepness.set_title("dg/dθ, the slope")
    margin.set_title(f"ψ(θ), m = {m}: the target's logit")
    margin_slope.set_title(f"|dψ/dθ|, m = {m}; ●: zero")
    margin_slope.set_yscale("log")
    margin_slope.set_ylim(bottom=SHALLOWEST)
    for axis in (value, steepness):
        _label(axis, 2, "θ of kernel and patch")
    for axis in (margin, margin_slope):
        _label(axis, m, "θ of feature and class")
    figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.8, **drawing.LEGEND)
    return figure


def _label(axis: Axes, divisions: int, label: str) -> None:
    step = next(step for step in range(1, divisions + 1) if divisions % step == 0 and divisions // step <= MOST_TICKS)
    ticks = range(0, divisions + 1, step)
    axis.set_xticks([math.pi * j / divisions for j in ticks], [_multiple_of_pi(j, divisions) for j in ticks])
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def _multiple_of_pi(j: int, divisions: int) -> str:
    """Return jπ/divisions in lowest terms."""
    divisor = math.gcd(j, divisions)
    numerator, denominator = j // divisor, divisions // divisor
    top = "π" if numerator == 1 else f"{numerator}π"
    return "0" if numerator == 0 else top if denominator == 1 else f"{top}/{denominator}"
