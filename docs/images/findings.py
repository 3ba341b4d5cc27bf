"""Draw `findings.svg` from the runs of the preset cpu: curves of three experiments, and learned k by layer.

python docs/images/findings.py [FILE]
"""

import sys
from pathlib import Path
from statistics import fmean

from curves import DASHED, Line, draw_curves  # modules beside this one
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from spherenet_paper.report.grids import GridCell, stored_grid
from spherenet_paper.style import FAINT, WIDTH, color_of, save, style

PANELS = (
    (
        "fig-convergence-plain",
        "cnn-9, softmax",
        {
            "none": Line("CNN", "CNN"),
            "cosine_orth": Line("cosine", "cosine"),
            "linear_orth": Line("linear", "linear"),
            "sigmoid-0.3_orth": Line("sigmoid 0.3", "sigmoid"),
        },
    ),
    (
        "fig-spherenorm",
        "cnn-9 at batches of 4",
        {
            "batchnorm_4": Line("CNN, BatchNorm", "CNN"),
            "groupnorm_4": Line("CNN, GroupNorm", "CNN", DASHED),
            "spherenorm_4": Line("SphereNorm", "cosine"),
            "centered_patch_4": Line("centered", "centered"),
        },
    ),
    (
        "fig-ultradeep",
        "deep, without shortcuts",
        {
            "none_softmax_45": Line("CNN, 45", "CNN"),
            "cosine_w-cosine_45": Line("cosine, 45", "cosine"),
            "none_softmax_69-without-relu": Line("CNN, 69, no ReLU", "CNN", DASHED),
            "cosine_w-cosine_69-without-relu": Line("cosine, 69, no ReLU", "cosine", DASHED),
        },
    ),
)


def draw_k(axes: Axes, cell: GridCell) -> None:
    """Draw the final mean k of every layer, one dot per seed."""
    for run in cell.runs.values():
        means = [fmean(values) for values in run.learned_k().values()]
        axes.plot(range(1, len(means) + 1), means, "o", color=color_of("learnable"), markersize=4, alpha=0.7)
    axes.axhline(0.5, color=FAINT.light, linewidth=0.8)
    axes.set_title("learned k, one dot per seed")
    axes.set_xlabel("layer (10: fully connected)")
    axes.set_ylabel("mean k, from 0.5")


def main(path: Path) -> None:
    """Draw the four panels."""
    with style("findings"):
        figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.4))
        for ax, (experiment, title, cells) in zip(axes.flat, PANELS, strict=False):
            draw_curves(ax, stored_grid("cpu", experiment), cells, title)
            ax.set_ylabel("test accuracy %")
            ax.legend(fontsize=9, labelspacing=0.2, handlelength=1.6)
        learned = stored_grid("cpu", "learnable").cell("learnable")
        assert learned is not None
        draw_k(axes[1, 1], learned)
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
