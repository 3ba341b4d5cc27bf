"""The operators g and the margins ψ_m with their slopes, and where a margin stops learning (SPEC 1 (1), (5)).

    ψ_m(θ) = g(mθ − jπ) − j·(g(0) − g(π)),  j = ⌊mθ/π⌋

is made of m copies of g. Where two meet, at θ = jπ/m, the slope of ψ is m times the slope of g at its ends: nothing for
the cosine, whose ends are flat, so a target that has come there is pushed no further; C(k)·2e^u/(k(1+e^u)²) at
u = π/(2k) for a sigmoid, which is small for small k but never nothing; all of its slope for the linear g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spherenet.angles import AngleFunction, CosineAngle, LinearAngle, SigmoidAngle
from spherenet.ops.margins import continued
from spherenet.theory import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Meeting", "draw", "meetings", "operators", "psi_slope", "saddle_points", "slope"]

FLAT = 1e-9
"""A slope below this is none: float64's sine of a multiple of π is some 1e-16."""

COLOURS = (drawing.BLUE, drawing.GREEN, drawing.PURPLE, drawing.RED, drawing.YELLOW, drawing.GREY)
SHALLOWEST = 1e-6
"""Where the log scale of slopes ends; nothing is drawn there."""

MOST_TICKS = 8
ENDS = 1e-4  # how near to 0 and π the slope of g is drawn: there itself the library sets that of θ(x) to 0


@dataclass(frozen=True)
class Meeting:
    """How steep ψ_m of one g is where its pieces meet, beside its steepest point.

    saddle: whether it is flat there, so that dψ/dθ = 0 inside (0, π).
    """

    g: str
    m: int
    theta: tuple[float, ...]
    slope_there: float
    steepest: float
    saddle: bool

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self)


def operators(k: Sequence[float]) -> dict[str, AngleFunction]:
    """The cosine, the linear and a sigmoid for every k, by the names they are drawn under.

    ValueError for a k that no sigmoid has.
    """
    sigmoids: dict[str, AngleFunction] = {f"sigmoid, k = {each:g}": SigmoidAngle(each) for each in k}
    return {"cosine": CosineAngle(), "linear": LinearAngle(), **sigmoids}


def slope(angle: AngleFunction, theta: Tensor) -> Tensor:
    """dg/dθ = −sin θ·dg/dc."""
    return -theta.sin() * angle.derivative(theta.cos())


def psi_slope(angle: AngleFunction, m: int, theta: Tensor) -> Tensor:
    """dψ_m/dθ, where two pieces meet that of the right one (of g at 0)."""
    point = theta.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(continued(angle, m * point).sum(), point)
    return gradient


def saddle_points(m: int) -> Tensor:
    """θ = jπ/m for j = 1 … m − 1: where pieces of ψ_m meet, float64 [m − 1]; the paper prints kθ/m."""
    return torch.arange(1, m, dtype=torch.float64) * math.pi / m


def meetings(angles: dict[str, AngleFunction], m: int) -> list[Meeting]:
    """How steep ψ_m is where its pieces meet, for every g; ValueError for m < 2, which has no pieces."""
    if m < 2:
        raise ValueError(f"m must be a whole number of at least 2, got {m}.")
    grid = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    found = []
    for name, angle in angles.items():
        points = saddle_points(m)
        # Of both sides: rounding decides on which piece a point lies.
        there = float(psi_slope(angle, m, torch.tensor([0.0, *points.tolist()], dtype=torch.float64)).abs().max())
        steepest = float(psi_slope(angle, m, grid).abs().max())
        found.append(Meeting(name, m, tuple(points.tolist()), there, steepest, there < FLAT))
    return found


def draw(angles: dict[str, AngleFunction], m: int) -> Figure:
    """Four panels: g and its slope, ψ_m and how steep it is, on a log scale that tells nothing from little."""
    figure, (value, steepness, margin, margin_slope) = drawing.new_figure(2, 2, width=11, height=7.5)
    theta = torch.linspace(ENDS, math.pi - ENDS, 1441, dtype=torch.float64)
    points = saddle_points(m)
    fine = torch.cat([theta, points]).sort().values
    for index, (name, angle) in enumerate(angles.items()):
        line: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.6}
        value.plot(theta, angle.at(theta), label=name, **line)
        steepness.plot(theta, slope(angle, theta), **line)
        margin.plot(theta, continued(angle, m * theta), **line)
        margin_slope.plot(fine, psi_slope(angle, m, fine).abs().clamp_min(SHALLOWEST), **line)
    flat = [angles[meeting.g] for meeting in meetings(angles, m) if meeting.saddle]
    dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6, "color": "black", "zorder": 3}
    if flat:
        margin.plot(points, continued(flat[0], m * points), label=f"saddle points, θ = jπ/{m}", **dot)
        margin_slope.plot(points, torch.full_like(points, SHALLOWEST), clip_on=False, **dot)
    value.set_title("g(θ): what a layer answers")
    steepness.set_title("dg/dθ: where it learns")
    margin.set_title(f"ψ(θ), m = {m}: what a margin loss asks of the target")
    margin_slope.set_title(f"|dψ/dθ|, m = {m}: nothing at the cosine's saddle points (●)")
    margin_slope.set_yscale("log")
    margin_slope.set_ylim(bottom=SHALLOWEST)
    for axis in (value, steepness):
        _label(axis, 2, "angle θ between kernel and patch")
    for axis in (margin, margin_slope):
        _label(axis, m, "angle θ between feature and its class")
    value.legend(frameon=False, fontsize=9)
    margin.legend(frameon=False, fontsize=9)
    return figure


def _label(axis: Axes, parts: int, what: str) -> None:
    step = next(step for step in range(1, parts + 1) if parts % step == 0 and parts // step <= MOST_TICKS)
    ticks = range(0, parts + 1, step)
    axis.set_xticks([math.pi * j / parts for j in ticks], [_multiple_of_pi(j, parts) for j in ticks])
    axis.set_xlabel(what)
    axis.grid(alpha=0.3)


def _multiple_of_pi(j: int, parts: int) -> str:
    """jπ/parts, in lowest terms."""
    divisor = math.gcd(j, parts)
    over, under = j // divisor, parts // divisor
    top = "π" if over == 1 else f"{over}π"
    return "0" if over == 0 else top if under == 1 else f"{top}/{under}"
