"""The figure of a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spherenet._util.atomic import atomic_file
from spherenet._util.text import plain
from spherenet.errors import InvalidArgument, require_extra

__all__ = ["FIGURE_SUFFIXES", "draw_confusion"]

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def draw_confusion(confusion: Sequence[Sequence[int]], classes: Sequence[str], path: str) -> None:
    """Draw a confusion matrix, colored by the fraction of each true class, with counts for up to 20 classes.

    Raises:
        ValueError: The file does not end in .png, .svg or .pdf.
        MissingExtraError: matplotlib is not installed.
    """
    if not path.lower().endswith(FIGURE_SUFFIXES):
        raise InvalidArgument("path", f"must end in one of {', '.join(FIGURE_SUFFIXES)}, got {path!r}.")
    require_extra("plot", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    side = max(4.0, min(14.0, 0.5 * len(classes) + 2))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [plain(name).replace("$", r"\$") for name in classes]  # "$" would start a formula
    fractions = [[count / max(1, sum(row)) for count in row] for row in confusion]
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="fraction of the class", shrink=0.8)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if len(classes) <= 40:
        axes.set_xticks(range(len(classes)), names, rotation=90 if len(classes) > 10 else 45, ha="right")
        axes.set_yticks(range(len(classes)), names)
    if len(classes) <= 20:
        for i, row in enumerate(confusion):
            for j, count in enumerate(row):
                if count:
                    color = "white" if fractions[i][j] > 0.5 else "black"
                    axes.text(j, i, str(count), ha="center", va="center", color=color, fontsize=8)
    with atomic_file(Path(path)) as temporary:
        figure.savefig(temporary, dpi=150)
