"""The style of all figures: one color per method, no background, readable on light and dark pages and at 390 pixels.

A figure is drawn in the colors of a light page. An SVG file also contains those of a dark page, which browsers select
by the color scheme of the page.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # matplotlib is optional; it is imported when a figure is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "Color", "color_of", "method_of", "plain_axes", "save", "style", "with_dark_colors"]


class Color(NamedTuple):
    """One color on a light and on a dark page."""

    light: str
    dark: str


COLORS = {
    "CNN": Color("#60646c", "#b0b4ba"),
    "cosine": Color("#0072c6", "#70b8ff"),
    "sigmoid": Color("#218358", "#5ad89b"),
    "centered": Color("#d9560b", "#ff9f6b"),
    "learnable": Color("#8145b5", "#d19dff"),
    "linear": Color("#0e7c86", "#5cd5df"),
    "other": Color("#a1237a", "#ff8dcc"),
    "standardized": Color("#a0a4ab", "#7d828b"),
}
"""Methods and their colors: the same in every figure. "standardized" is a second CNN, "other" whatever has no color."""

TEXT, FAINT, LINE = Color("#1c2024", "#edeef0"), Color("#61656e", "#b1b5bb"), Color("#d9dbe0", "#3a3f4a")
RADIUS = 6
WIDTH = 6.4
"""Width in inches. A phone shows 390 pixels of it, 61 per inch: text of 12 points is 10 pixels high there."""


def color_of(method: str) -> str:
    """Return the color of a method on light pages; `save` adds that on dark pages."""
    return COLORS[method].light


def method_of(name: str) -> str:
    """Return the method of an operator or of a row of a grid, such as "sigmoid-0.3", or "other"."""
    if name in ("none", "CNN", "convolution"):
        return "CNN"
    words = ("centered", *(method for method in COLORS if method not in ("CNN", "other", "standardized")))
    return next((method for method in words if method in name), "other")


def style(name: str) -> AbstractContextManager[None]:
    """Return the settings of matplotlib for the figure of this name, which make its file reproducible."""
    import matplotlib

    return matplotlib.rc_context({
        "axes.axisbelow": True,
        "axes.edgecolor": LINE.light,
        "axes.grid": True,
        "axes.labelcolor": FAINT.light,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 12,
        "figure.constrained_layout.use": True,
        "font.size": 12,
        "grid.color": LINE.light,
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "legend.fontsize": 11,
        "lines.linewidth": 2,
        "savefig.dpi": 160,
        "savefig.transparent": True,
        "svg.hashsalt": name,
        "text.color": TEXT.light,
        "xtick.color": FAINT.light,
        "ytick.color": FAINT.light,
    })  # fmt: skip


def plain_axes(axes: Axes) -> None:
    """Remove spines, ticks and grid: for images and diagrams."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure; an SVG file with the colors of a dark page, too."""
    from matplotlib import pyplot as plt

    if path.suffix != ".svg":
        figure.savefig(path)
    else:
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        path.write_text(with_dark_colors(file.getvalue()), encoding="utf-8")
    plt.close(figure)


def with_dark_colors(svg: str) -> str:
    """Return an SVG with one rule per color and property that is used on dark pages; other programs ignore them."""
    rules = [
        f'[style*="{name}: {color.light}"] {{ {name}: {color.dark} !important }}'
        for color in (TEXT, FAINT, LINE, *COLORS.values())
        for name in ("fill", "stroke")
        if f"{name}: {color.light}" in svg
    ]
    sheet = "<style>@media (prefers-color-scheme: dark) { " + " ".join(rules) + " }</style>\n"
    head, defs, rest = svg.partition(" <defs>\n")
    return f"{head} {sheet}{defs}{rest}"
