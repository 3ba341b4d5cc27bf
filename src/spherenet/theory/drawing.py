"""Figures without global state: made, drawn and written whole, in colours that the colour-blind tell apart.

matplotlib is an option of the package (`spherenet[plot]`), so it is imported where a figure is made and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "PURPLE",
    "RED",
    "SUFFIXES",
    "TEN",
    "YELLOW",
    "new_figure",
    "require_output",
    "write",
]

SUFFIXES = (".png", ".svg", ".pdf")

# Paul Tol's "bright" scheme, and ten of his "muted" one for ten classes.
BLUE, RED, GREEN, YELLOW, PURPLE, GREY = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#777777"
TEN = ("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499", "#777777")

DOTS_AN_INCH = 150


def require_output(path: str) -> Path:
    """Return the path of a figure that can be written; ValueError before any work is done for one that cannot.

    Checked: the suffix, that the folder exists and no folder has the name, and that matplotlib is there.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--output must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {path!r}.")
    if target.is_dir():
        raise ValueError(f"--output must be a file, but {path!r} is a folder.")
    if not target.parent.is_dir():
        raise ValueError(f"--output must lie in a folder that exists, got {path!r}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--output needs the package matplotlib: pip install 'spherenet[plot]'.") from None
    return target


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return an empty figure of so many inches and its axes, row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: that keeps every figure alive and may ask for a screen.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as its suffix says: complete or not at all, and the same bytes for the same figure."""
    import matplotlib

    from spherenet.files import replacing

    kind = path.suffix.lower().removeprefix(".")
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(path) as temporary, matplotlib.rc_context({"svg.hashsalt": "spherenet"}):
        # Cut to what is drawn: panels that keep the shape of a picture leave room beside them.
        figure.savefig(temporary, format=kind, dpi=DOTS_AN_INCH, metadata=date, bbox_inches="tight", pad_inches=0.1)
