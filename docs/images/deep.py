"""Draw `deep.svg` from the committed runs of table3 and fig-ultradeep in paper/results/long.

python docs/images/deep.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib as mpl
from findings import draw_curves  # the script beside this one
from matplotlib import pyplot as plt

from spherenet_paper.report.grids import read_grid

RUNS = Path(__file__).parents[2] / "paper" / "results" / "long"
PANELS = (
    ("table3", "18 layers without ReLU", {"none": "CNN", "cosine": "cosine", "sigmoid-0.3": "sigmoid 0.3"}),
    (
        "fig-ultradeep",
        "45 layers with ReLU",
        {
            "none_softmax_45": "CNN",
            "cosine_w-cosine_45": "cosine",
            "centered_w-cosine_45": "cosine, centered kernels",
            "orthogonal-none_softmax_45": "CNN, orthogonal",
            "orthogonal-cosine_w-cosine_45": "cosine, orthogonal",
        },
    ),
)


def main(path: Path) -> None:
    """Draw a panel per experiment."""
    mpl.rcParams["svg.hashsalt"] = "deep"  # reproducible output
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for ax, (experiment, title, cells) in zip(axes, PANELS, strict=True):
        draw_curves(ax, read_grid(RUNS / experiment), cells, title)
        ax.grid(alpha=0.3)
        ax.label_outer()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
