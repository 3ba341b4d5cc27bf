"""Draw `protocol.svg`: the authors' curves beside those of the runs of fig-protocol, by BatchNorm statistics.

python docs/images/protocol.py [FILE]

authors_logs.csv has averages of the logs that the authors released with their code (github.com/wy1iu/SphereNet):
training and test accuracy over 1,000 iterations each (10 batches, 2 evaluations). Our curves beside them are averaged
in the same way. The authors' networks are wider; their residual one is resnet-32-wide.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from spherenet.report import Curve
from spherenet_paper.report.grids import Grid, stored_grid
from spherenet_paper.style import FAINT, WIDTH, color_of, save, style

HERE = Path(__file__).parent
LAST, EVERY = 5000, 1000
NETWORKS = {
    "cnn-9": {"none_cnn-9": "CNN", "cosine_cnn-9": "cosine"},
    "resnet-32": {"none_resnet-32": "CNN", "linear_resnet-32": "linear"},
}
"""Cells of the networks with their methods."""

PANELS = {
    "the authors' logs": {"training": "training", "lagging": "test, lagging"},
    "ours": {"training": "training", "lagging": "test, lagging"},
    "ours, other statistics": {"running": "test, running", "precise": "test, precise"},
}
DASHES: dict[str, Any] = {"training": (0, (1, 1.2)), "lagging": "solid", "running": (0, (1, 1.2)), "precise": "solid"}


def read_authors_logs(path: Path = HERE / "authors_logs.csv") -> dict[str, dict[str, Curve]]:
    """Return training and test accuracy by the name of our cell, at the middle of each interval.

    Their test accuracy is one with lagging statistics.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    curves: dict[str, dict[str, Curve]] = {}
    for row in rows:
        own = curves.setdefault(row["cell"], {"training": Curve([], []), "lagging": Curve([], [])})
        for curve, column in ((own["training"], "mean training accuracy"), (own["lagging"], "mean test accuracy")):
            curve.steps.append(int(row["up to iteration"]) - EVERY // 2)
            curve.values.append(float(row[column]))
    return curves


def our_curves(grid: Grid, cell: str, name: str) -> list[Curve]:
    """Return a curve per seed: test accuracy with BatchNorm statistics, or training accuracy.

    Those that are drawn beside the authors' are averaged over the same intervals.
    """
    found = grid.cell(cell)
    if found is None or not found.runs:
        sys.exit(f"The figure needs finished runs of {cell}, found none.")
    curves = [
        run.curve("train", "accuracy") if name == "training" else run.curve("test", "accuracy", name)
        for run in found.runs.values()
    ]
    return [_averaged(curve) for curve in curves] if name in ("training", "lagging") else curves


def _averaged(curve: Curve) -> Curve:
    """Return the means over `EVERY` iterations, at the middle of each interval."""
    ends = range(EVERY, max(curve.steps) + 1, EVERY)
    points = list(zip(curve.steps, curve.values, strict=True))
    means = [fmean(value for step, value in points if end - EVERY < step <= end) for end in ends]
    return Curve([end - EVERY // 2 for end in ends], means)


def draw(axes: Axes, seeds: Sequence[Curve], color: str, dashes: Any) -> None:
    """Draw the mean of these curves up to iteration `LAST`, with their range as a band."""
    steps = [step for step in seeds[0].steps if step <= LAST]
    points = [[100 * value for value in values] for values in zip(*(curve.values for curve in seeds), strict=True)]
    points = points[: len(steps)]
    axes.plot(steps, [fmean(values) for values in points], color=color, linestyle=dashes)
    if len(seeds) > 1:
        axes.fill_between(steps, [*map(min, points)], [*map(max, points)], color=color, alpha=0.18, linewidth=0)


def main(path: Path) -> None:
    """Draw a row per network and a column each for the authors' curves, the same ones of ours, and other statistics."""
    grid, theirs = stored_grid("long", "fig-protocol"), read_authors_logs()
    with style("protocol"):
        figure, axes = plt.subplots(2, 3, figsize=(WIDTH, 5.6), sharex=True, sharey=True)
        for row, (model, cells) in zip(axes, NETWORKS.items(), strict=True):
            for ax, (title, curves) in zip(row, PANELS.items(), strict=True):
                for cell, method in cells.items():
                    for name in curves:
                        seeds = our_curves(grid, cell, name) if "ours" in title else [theirs[cell][name]]
                        draw(ax, seeds, color_of(method), DASHES[name])
            row[0].set_ylabel(f"{model}, accuracy %")
        for ax, (title, curves) in zip(axes[0], PANELS.items(), strict=True):
            ax.set_title(title, fontsize=11)
            lines = [Line2D([], [], color=FAINT.light, linestyle=DASHES[name], label=text)
                     for name, text in curves.items()]  # fmt: skip
            below = axes[1, list(PANELS).index(title)]
            below.set_xlabel("iterations", fontsize=11)
            below.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.32), fontsize=10)
        axes[0, 0].set(ylim=(0, 100), xticks=[0, 2500, 5000])
        axes[0, 0].set_xticklabels(["0", "2.5k", "5k"])
        methods = ("CNN", "cosine", "linear")
        figure.legend(handles=[Line2D([], [], color=color_of(name), label=name) for name in methods],
                      loc="outside upper center", ncols=3)  # fmt: skip
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
