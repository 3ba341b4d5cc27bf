"""Draw `protocol.svg`: the authors' curves beside those of paper/results/long/fig-protocol, by BatchNorm statistics.

python docs/images/protocol.py [FILE]

authors_logs.csv has averages of the logs that the authors released with their code (github.com/wy1iu/SphereNet):
training and test accuracy over 1,000 iterations each (10 batches, 2 evaluations). Our curves beside them are averaged
in the same way. The authors' networks are wider; their residual one is resnet-32-wide.
"""

import csv
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from spherenet.report import Curve
from spherenet_paper.report.grids import Grid, read_grid

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "paper" / "results" / "long" / "fig-protocol"
LAST, EVERY = 5000, 1000
NETWORKS = {
    "cnn-9": ("none_cnn-9", "cosine_cnn-9"),
    "resnet-32": ("none_resnet-32", "linear_resnet-32"),
}
COLORS = {"CNN": "#60646c", "SphereNet (cnn-9: cosine, resnet-32: linear)": "#0072c6"}
DASHES: dict[str, Any] = {"training": (0, (1, 1.5)), "lagging": "solid", "running": (0, (4, 2)), "precise": "solid"}


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


def our_curve(grid: Grid, cell: str, name: str) -> Curve:
    """Return a mean over the seeds: test accuracy with BatchNorm statistics, or training accuracy.

    Those that are drawn beside the authors' are averaged over the same intervals.
    """
    found = grid.cell(cell)
    if found is None or not found.runs:
        sys.exit(f"The figure needs finished runs of {cell} in {RUNS}, found none.")
    curves = [
        run.curve("train", "accuracy") if name == "training" else run.curve("test", "accuracy", name)
        for run in found.runs.values()
    ]
    if name in ("training", "lagging"):
        curves = [_averaged(curve) for curve in curves]
    return Curve(curves[0].steps, [fmean(values) for values in zip(*(curve.values for curve in curves), strict=True)])


def _averaged(curve: Curve) -> Curve:
    """Return the means over `EVERY` iterations, at the middle of each interval."""
    ends = range(EVERY, max(curve.steps) + 1, EVERY)
    points = list(zip(curve.steps, curve.values, strict=True))
    means = [fmean(value for step, value in points if end - EVERY < step <= end) for end in ends]
    return Curve([end - EVERY // 2 for end in ends], means)


def draw(axes: Axes, title: str, networks: list[dict[str, Curve]], names: tuple[str, ...]) -> None:
    """Draw these curves of a CNN and a SphereNet up to iteration `LAST`."""
    for curves, color in zip(networks, COLORS.values(), strict=True):
        for name in names:
            curve = curves[name]
            points = [(step, 100 * v) for step, v in zip(curve.steps, curve.values, strict=True) if step <= LAST]
            axes.plot(*zip(*points, strict=True), color=color, linestyle=DASHES[name])
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)


def main(path: Path) -> None:
    """Draw three panels per network: the authors' curves, the same ones of ours, and ours with other statistics."""
    mpl.rcParams["svg.hashsalt"] = "protocol"  # reproducible output
    grid, theirs = read_grid(RUNS), read_authors_logs()
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.4), layout="constrained", sharex=True, sharey=True)
    for row, (model, names) in zip(axes, NETWORKS.items(), strict=True):
        ours = [{curve: our_curve(grid, name, curve) for curve in DASHES} for name in names]
        wide = "-wide" if model == "resnet-32" else ""
        draw(row[0], f"{model}{wide}, the authors' logs", [theirs[name] for name in names], ("training", "lagging"))
        draw(row[1], f"{model}, ours", ours, ("training", "lagging"))
        draw(row[2], f"{model}, ours, other statistics", ours, ("running", "precise"))
        row[0].set_ylabel("accuracy %")
    axes[0, 0].set_ylim(0, 100)
    for below in axes[1]:
        below.set_xlabel("iterations")
    networks = [Line2D([], [], color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=networks, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    kinds = {"training": "training", "lagging": "test, lagging (left, middle)", "running": "test, running",
             "precise": "test, precise (right)"}  # fmt: skip
    lines = [Line2D([], [], color="black", linestyle=DASHES[name], label=text) for name, text in kinds.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
