"""The conditioning lab in pictures: κ over c, exponents over depth, and the networks' spectra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spherenet.theory import drawing
from spherenet.theory.conditioning import ALTERNATING, LAST, RENORMALISED, Curve
from spherenet.theory.labs import signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from spherenet.theory.spectra import TwinReport

__all__ = ["draw"]

CASES: tuple[dict[str, Any], ...] = (
    {"color": drawing.RED, "marker": "o"},
    {"color": drawing.PURPLE, "marker": "s", "linestyle": "--"},
    {"color": drawing.BLUE, "marker": "^"},
)
"""How the three cases look in every panel: plain, normalised with raw weights, renormalised."""


def draw(matrices: Sequence[Curve], depth: Sequence[Curve], twins: TwinReport | None) -> Figure:
    """Two panels of matrices and, where networks were trained, four of those."""
    if twins is None:
        figure, panels = drawing.new_figure(1, 2, width=11, height=4.4)
    else:
        figure, panels = drawing.new_figure(2, 3, width=14, height=8.2)
        _draw_training(panels[2], panels[3], panels[4], twins)
        _draw_rescaled(panels[5], twins)
    _draw_matrices(panels[0], matrices)
    _draw_depth(panels[1], depth)
    return figure


def _over_c(axis: Axes, scales: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(scales, [f"{c:g}" for c in scales])
    axis.minorticks_off()
    axis.set_xlabel("c")
    axis.grid(alpha=0.3)


def _draw_matrices(axis: Axes, curves: Sequence[Curve]) -> None:
    for curve, look in zip(curves, CASES, strict=True):
        axis.plot(curve.c, _drawable(curve.kappa), label=_with_exponent(curve.case, curve.exponent), **look)
    first = next((kappa for kappa in curves[0].kappa if kappa is not None), 1.0)
    bound = [first * (c / curves[0].c[0]) ** 2 for c in curves[0].c]
    axis.plot(curves[0].c, bound, color=drawing.GREY, linestyle=":", label="the paper's bound, c²")
    _over_c(axis, curves[0].c)
    axis.set_title("κ of the Hessian at (cU, V/c)")
    axis.set_ylabel("restricted condition number κ")
    axis.legend(frameon=False, fontsize=9)


def _draw_depth(axis: Axes, curves: Sequence[Curve]) -> None:
    depths = sorted({curve.layers for curve in curves})
    for case, label, look in (
        (LAST, "N − 1 layers by c, the last by $c^{-(N-1)}$", CASES[0]),
        (ALTERNATING, "c and 1/c in turn", {"color": drawing.GREEN, "marker": "D"}),
        (RENORMALISED, "kernels renormalised", CASES[2]),
    ):
        exponents = [curve.exponent for curve in curves if curve.case == case]
        axis.plot(depths, exponents, label=label, **look)
    axis.plot(depths, depths, color=drawing.GREY, linestyle=":", label="the paper's $c^N$")
    axis.set_xticks(depths)
    axis.set_title("product of N matrices: exponent of κ over c")
    axis.set_xlabel("layers N")
    axis.set_ylabel("measured exponent")
    axis.set_ylim(-0.5, 1.35 * max(max(depths), *(curve.exponent for curve in curves)))  # room for the legend
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)


def _draw_training(loss: Axes, largest: Axes, spread: Axes, twins: TwinReport) -> None:
    networks = list(dict.fromkeys(point.network for point in twins.measured))
    for network, look in zip(networks, (CASES[0], CASES[2]), strict=True):
        points = [point for point in twins.measured if point.network == network]
        steps = [point.step for point in points]
        loss.plot(steps, [point.loss for point in points], label=network, **look)
        largest.plot(steps, [point.spectrum.largest for point in points], label=network, **look)
        spread.plot(steps, [point.spectrum.spread for point in points], label=network, **look)
    norms = "with BatchNorm" if twins.batch_norm else "without BatchNorm"
    loss.set_title(f"loss of 64 digits, {norms}")
    largest.set_title("steepest direction: $\\lambda_{max}$ of the loss")
    spread.set_title("spread of the spectrum: $\\lambda_{max}$ / mean |λ|")
    largest.set_yscale("log")
    for axis in (loss, spread):
        axis.set_ylim(bottom=0)
    for axis in (loss, largest, spread):
        axis.set_xlabel("iterations")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=9)


def _draw_rescaled(axis: Axes, twins: TwinReport) -> None:
    for case, look in zip(twins.rescaled, CASES, strict=True):
        axis.plot(case.c, case.largest, label=_with_exponent(case.case, case.exponent), **look)
    _over_c(axis, twins.rescaled[0].c)
    axis.set_title("$\\lambda_{max}$ with two layers at (cW₁, W₂/c)")
    axis.legend(frameon=False, fontsize=9)


def _with_exponent(case: str, exponent: float) -> str:
    name = case.replace("G_S", "$G_S$")
    return f"{name}: $c^{{{signed(exponent)}}}$"


def _drawable(kappa: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in kappa]
