"""Draw `findings.svg` from the runs in results/cpu: curves of three experiments, and learned k by layer.

python docs/images/findings.py [FILE]
"""

import sys
from pathlib import Path
from statistics import fmean, stdev

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from spherenet_paper.report.grids import Grid, GridCell, read_grid

RESULTS = Path(__file__).parents[2] / "paper" / "results" / "cpu"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")


def draw_curves(axes: Axes, grid: Grid, cells: dict[str, str], title: str) -> None:
    """Draw mean test accuracy over iterations with a band of ± one standard deviation."""
    for (name, label), color in zip(cells.items(), COLORS, strict=False):
        cell = grid.cell(name)
        assert cell is not None, name
        curve = cell.mean_curve()
        spread = [stdev(values) for values in zip(*_accuracies(cell), strict=True)]
        mean = [100 * value for value in curve.values]
        axes.plot(curve.steps, mean, label=label, color=color)
        low, high = ([m + sign * 100 * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("iterations")
    axes.set_ylabel("test accuracy %")
    axes.legend(frameon=False, fontsize=8)


def _accuracies(cell: GridCell) -> list[list[float]]:
    return [run.curve("test", "accuracy").values for run in cell.runs.values()]


def draw_k(axes: Axes, cell: GridCell) -> None:
    """Draw the final mean k of every layer, one dot per seed."""
    for run, color in zip(cell.runs.values(), COLORS, strict=False):
        means = [fmean(values) for values in run.learned_k().values()]
        axes.plot(range(1, len(means) + 1), means, "o", color=color, markersize=4)
    axes.axhline(0.5, color="gray", linewidth=0.8)
    axes.set_title("Learned k by layer: only the last two have changed", fontsize=10)
    axes.set_xlabel("layer, the tenth fully connected (dots: seeds)")
    axes.set_ylabel("mean k, from 0.5")


def main(path: Path) -> None:
    """Draw the four panels."""
    mpl.rcParams["svg.hashsalt"] = "findings"  # reproducible output
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    plain = {"none": "plain", "cosine_orth": "cosine", "linear_orth": "linear", "sigmoid-0.3_orth": "sigmoid 0.3"}
    draw_curves(axes[0, 0], read_grid(RESULTS / "fig-convergence-plain"), plain, "cnn-9, softmax")
    norms = {
        "batchnorm_4": "BatchNorm",
        "spherenorm_4": "SphereNorm",
        "centered_patch_4": "SphereNorm, centered",
        "groupnorm_4": "GroupNorm",
    }
    draw_curves(axes[0, 1], read_grid(RESULTS / "fig-spherenorm"), norms, "cnn-9 at batches of 4")
    deep = {
        "none_softmax_45": "plain, 45 layers",
        "cosine_w-cosine_45": "cosine, 45 layers",
        "none_softmax_69-without-relu": "plain, 69 without ReLU",
        "cosine_w-cosine_69-without-relu": "cosine, 69 without ReLU",
    }
    draw_curves(axes[1, 0], read_grid(RESULTS / "fig-ultradeep"), deep, "Deep networks without shortcuts")
    learned = read_grid(RESULTS / "learnable").cell("learnable")
    assert learned is not None
    draw_k(axes[1, 1], learned)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
