"""Figures: creating and writing them without global state, and the panels of the conditioning lab.

matplotlib is an optional dependency (`spherenet-torch[plot]`); it is imported only when a figure is created.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spherenet.errors import InvalidArgument, require_extra
from spherenet_paper import style
from spherenet_paper.style import TEXT, color_of, with_dark_colors
from spherenet_paper.theory.conditioning import ALTERNATING, LAST, RENORMALIZED, Curve, exponent_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from spherenet_paper.theory.spectra import NetworkComparison

__all__ = [
    "LEGEND",
    "SUFFIXES",
    "TEN_COLORS",
    "draw_conditioning",
    "new_figure",
    "require_output",
    "write",
]

SUFFIXES = (".png", ".svg", ".pdf")

TEN_COLORS = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#c9a227", "#b279a2", "#ff9da6", "#9d755d",
              "#8a8f98")  # fmt: skip
"""Colors of ten classes, which are visible on light and on dark pages."""

DOTS_PER_INCH = 160
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 10, "labelcolor": TEXT.light}
"""Options of legends, which are created after the style was set."""


def require_output(path: str) -> Path:
    """Check that a figure can be written to this path, before any computation.

    Raises:
        ValueError: The suffix is not supported, the folder does not exist, or the path is a folder.
        MissingExtraError: matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InvalidArgument("--output", f"must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {path!r}.")
    if target.is_dir():
        raise InvalidArgument("--output", f"must be a file, but {path!r} is a folder.")
    if not target.parent.is_dir():
        raise InvalidArgument("--output", f"must be in an existing folder, got {path!r}.")
    require_extra("plot", "matplotlib")
    return target


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return an empty figure (size in inches) and its axes, row by row."""
    require_extra("plot", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot is not used: it keeps every figure alive and may require a display.
    with style.style("spherenet"):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def write(figure: Figure, path: Path) -> None:
    """Write a figure in the format of its suffix, atomically; the same figure gives the same bytes."""
    require_extra("plot", "matplotlib")
    from spherenet.cli.plugin import atomic_file

    format = path.suffix.lower().removeprefix(".")
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
    with atomic_file(path) as temporary, style.style("spherenet"):
        # Cropped: panels with a fixed aspect ratio leave empty space beside them.
        figure.savefig(
            temporary, format=format, dpi=DOTS_PER_INCH, metadata=metadata, bbox_inches="tight", pad_inches=0.1
        )
        if format == "svg":
            drawn = Path(temporary)
            drawn.write_text(with_dark_colors(drawn.read_text(encoding="utf-8")), encoding="utf-8")


CASES: tuple[dict[str, Any], ...] = (
    {"color": color_of("CNN"), "marker": "o"},
    {"color": color_of("other"), "marker": "s", "linestyle": "--"},
    {"color": color_of("cosine"), "marker": "^"},
)
"""Styles of the three cases: plain, normalized with raw weights, renormalized."""


def draw_conditioning(matrices: Sequence[Curve], depth: Sequence[Curve], networks: NetworkComparison | None) -> Figure:
    """Draw two panels about matrices and, if networks were trained, four about them."""
    if networks is None:
        figure, panels = new_figure(2, 1, width=style.WIDTH, height=8)
    else:
        figure, panels = new_figure(3, 2, width=style.WIDTH, height=10)
        _draw_training(panels[2], panels[3], panels[4], networks)
        _draw_rescaled(panels[5], networks)
    _draw_matrices(panels[0], matrices)
    _draw_depth(panels[1], depth)
    return figure


def _log_scales(axis: Axes, scales: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(scales, [f"{c:g}" for c in scales])
    axis.minorticks_off()
    axis.set_xlabel("c")


def _legend_above(axis: Axes) -> None:
    """Add a legend to an axis with a log scale, and space for it above the curves."""
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (high / low) ** 0.55)
    axis.legend(loc="upper left", **LEGEND)


def _draw_matrices(axis: Axes, curves: Sequence[Curve]) -> None:
    for curve, look in zip(curves, CASES, strict=True):
        kappa = [float("nan") if value is None else value for value in curve.kappa]
        axis.plot(curve.c, kappa, label=_with_exponent(curve.case, curve.exponent), **look)
    first = next((kappa for kappa in curves[0].kappa if kappa is not None), 1.0)
    bound = [first * (c / curves[0].c[0]) ** 2 for c in curves[0].c]
    axis.plot(curves[0].c, bound, color=color_of("standardized"), linestyle=":", label="the paper: $c^2$")
    _log_scales(axis, curves[0].c)
    axis.set_title("κ at (cU, V/c)")
    _legend_above(axis)


def _draw_depth(axis: Axes, curves: Sequence[Curve]) -> None:
    depths = sorted({curve.layers for curve in curves})
    for case, label, look in (
        (LAST, "c, the last $c^{-(N-1)}$", CASES[0]),
        (ALTERNATING, "c and 1/c in turn", {"color": color_of("sigmoid"), "marker": "D"}),
        (RENORMALIZED, "renormalized", CASES[2]),
    ):
        exponents = [curve.exponent for curve in curves if curve.case == case]
        axis.plot(depths, exponents, label=label, **look)
    axis.plot(depths, depths, color=color_of("standardized"), linestyle=":", label="the paper: $c^N$")
    axis.set_xticks(depths)
    axis.set_title("κ of N matrices: exponent")
    axis.set_xlabel("layers N")
    axis.set_ylim(-0.5, 1.35 * max(max(depths), *(curve.exponent for curve in curves)))  # space for the legend
    axis.legend(**LEGEND)


def _draw_training(loss: Axes, largest: Axes, spread: Axes, networks: NetworkComparison) -> None:
    names = list(dict.fromkeys(point.network for point in networks.measured))
    for name, look in zip(names, (CASES[0], CASES[2]), strict=True):
        points = [point for point in networks.measured if point.network == name]
        steps = [point.step for point in points]
        loss.plot(steps, [point.loss for point in points], label=name, **look)
        largest.plot(steps, [point.spectrum.largest for point in points], label=name, **look)
        spread.plot(steps, [point.spectrum.spread for point in points], label=name, **look)
    norms = "BatchNorm" if networks.batch_norm else "no BatchNorm"
    loss.set_title(f"loss, {norms}")
    largest.set_title("$\\lambda_{max}$ of the loss")
    spread.set_title("$\\lambda_{max}$ / mean |λ|")
    largest.set_yscale("log")
    for axis in (loss, spread):
        axis.set_ylim(bottom=0)
    for axis in (loss, largest, spread):
        axis.set_xlabel("iterations")
        axis.legend(**LEGEND)


def _draw_rescaled(axis: Axes, networks: NetworkComparison) -> None:
    for case, look in zip(networks.rescaled, CASES, strict=True):
        axis.plot(case.c, case.largest, label=_with_exponent(case.case, case.exponent), **look)
    _log_scales(axis, networks.rescaled[0].c)
    axis.set_title("$\\lambda_{max}$ at (cW₁, W₂/c)")
    _legend_above(axis)


def _with_exponent(case: str, exponent: float) -> str:
    name = case.replace("G_S", "$G_S$")
    return f"{name}: $c^{{{exponent_text(exponent)}}}$"
