"""The confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spherenet.runlog.atomic import replacing
from spherenet.text import plain

__all__ = ["draw_confusion"]

ALLOWED = (".png", ".svg", ".pdf")


def draw_confusion(confusion: Sequence[Sequence[int]], classes: Sequence[str], path: str) -> None:
    """Draw counts of (truth, answer) pairs as a map of shares of each truth, with the counts where there is room.

    Raises ValueError for a file of another kind than .png, .svg and .pdf, or without matplotlib.
    """
    if not path.lower().endswith(ALLOWED):
        raise ValueError(f"--picture must end in one of {', '.join(ALLOWED)}, got {path!r}.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--picture needs the package matplotlib: pip install 'spherenet[plot]'.") from None
    side = max(4.0, min(14.0, 0.5 * len(classes) + 2))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # A dollar sign would begin a formula.
    names = [plain(name).replace("$", r"\$") for name in classes]
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the class", shrink=0.8)
    axes.set_xlabel("answer")
    axes.set_ylabel("truth")
    if len(classes) <= 40:
        axes.set_xticks(range(len(classes)), names, rotation=90 if len(classes) > 10 else 45, ha="right")
        axes.set_yticks(range(len(classes)), names)
    if len(classes) <= 20:
        for i, row in enumerate(confusion):
            for j, count in enumerate(row):
                if count:
                    colour = "white" if shares[i][j] > 0.5 else "black"
                    axes.text(j, i, str(count), ha="center", va="center", color=colour, fontsize=8)
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=150)
