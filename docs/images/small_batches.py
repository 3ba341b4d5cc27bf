"""Draw `small_batches.svg` from the runs of fig-spherenorm in results/long: curves at three batch sizes.

python docs/images/small_batches.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib as mpl
from findings import draw_curves  # the script beside this one
from matplotlib import pyplot as plt

from spherenet_paper.report.grids import read_grid

RUNS = Path(__file__).parents[2] / "paper" / "results" / "long" / "fig-spherenorm"
ROWS = {
    "batchnorm": "CNN, BatchNorm",
    "spherenorm": "SphereNorm",
    "centered_patch": "SphereNorm, centered",
    "groupnorm": "CNN, GroupNorm",
}


def main(path: Path) -> None:
    """Draw a panel per batch size."""
    mpl.rcParams["svg.hashsalt"] = "small_batches"  # reproducible output
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained", sharey=True)
    grid = read_grid(RUNS)
    for ax, size in zip(axes, (2, 8, 32), strict=True):
        cells = {f"{row}_{size}": name for row, name in ROWS.items()}
        draw_curves(ax, grid, cells, f"cnn-9 at batches of {size}")
        ax.grid(alpha=0.3)
        ax.label_outer()
        if size > 2:
            ax.get_legend().remove()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
