"""Draw `features.svg`: two features of digits in three networks, and the accuracy of five seeds of each.

    python docs/images/features.py [FILE]

The panels show seed 0, the first one; the last panel has all five. The command also prints the table of
docs/concepts.md. It trains fifteen networks, which takes about two minutes.
"""

import math
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from spherenet_paper.style import FAINT, WIDTH, color_of, plain_axes, save, style
from spherenet_paper.theory.features import Embedding, embed_digits

SEEDS = range(5)
NAMES = {"CNN": "CNN", "SphereNet": "sigmoid", "with margin": "other"}
"""The three networks in the order of `embed_digits`, and their colors."""

CLASSES = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#c9a227", "#b279a2", "#ff9da6", "#9d755d", "#8a8f98")
SHOWN = 0.98  # quantile of the norms at the edge of a panel


def draw_plane(axes: Axes, embedding: Embedding, title: str) -> None:
    """Draw the features of one network, a color per digit, and the digit beside its class."""
    features = embedding.features.double()
    radius = float(features.norm(dim=1).quantile(SHOWN))
    features = features / radius
    for label, color in enumerate(CLASSES):
        members = features[embedding.labels == label]
        axes.scatter(members[:, 0], members[:, 1], s=3, color=color, linewidths=0, rasterized=True)
        mean = members.mean(0)
        angle = math.atan2(float(mean[1]), float(mean[0]))
        axes.text(1.18 * math.cos(angle), 1.18 * math.sin(angle), str(label), ha="center", va="center", size=11)
    plain_axes(axes)
    axes.set(xlim=(-1.32, 1.32), ylim=(-1.32, 1.32), aspect="equal")
    axes.set_title(title)


def draw_accuracies(axes: Axes, runs: list[list[Embedding]]) -> None:
    """Draw the accuracy of each seed as a dot; a line connects the networks of a seed."""
    accuracies = [[100 * embedding.accuracy for embedding in run] for run in runs]
    for values in accuracies:
        axes.plot(range(len(NAMES)), values, color=FAINT.light, linewidth=0.8, zorder=1)
    for position, method in enumerate(NAMES.values()):
        axes.scatter([position] * len(runs), [values[position] for values in accuracies], color=color_of(method))
    axes.set_xticks(range(len(NAMES)), [name.replace(" ", "\n") for name in NAMES], size=10)
    axes.set(xlim=(-0.5, 2.5), title="accuracy %, five seeds")


def table(runs: list[list[Embedding]]) -> str:
    """Return means and standard deviations over the seeds as a Markdown table."""
    lines = ["| network | test accuracy, % | angle to the class center | smallest angle between centers | mean ‖x‖ |",
             "|---|---|---|---|---|"]  # fmt: skip
    for index in range(len(NAMES)):
        own = [run[index] for run in runs]
        columns = (
            [100 * embedding.accuracy for embedding in own],
            [embedding.within for embedding in own],
            [embedding.between for embedding in own],
            [float(embedding.features.norm(dim=1).mean()) for embedding in own],
        )
        cells = [f"{fmean(values):.1f} ± {stdev(values):.1f}" for values in columns]
        lines.append(f"| {own[0].network} | {cells[0]} | {cells[1]}° | {cells[2]}° | {cells[3]} |")
    return "\n".join(lines)


def draw(runs: list[list[Embedding]], path: Path) -> None:
    """Draw the planes of the first run and the accuracies of all."""
    with style("features"):
        figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.2))
        for ax, embedding, name in zip(axes.flat, runs[0], NAMES, strict=False):
            draw_plane(ax, embedding, name)
        draw_accuracies(axes[1, 1], runs)
        save(figure, path)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same sums on every machine with these instructions
    trained = [embed_digits(seed=seed) for seed in SEEDS]
    print(table(trained))
    draw(trained, Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
