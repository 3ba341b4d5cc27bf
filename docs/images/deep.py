"""Draw `deep.svg` from the committed runs of table3 and fig-ultradeep of the preset long.

python docs/images/deep.py [FILE]
"""

import sys
from pathlib import Path

from curves import DASHED, Line, draw_curves  # modules beside this one
from matplotlib import pyplot as plt

from spherenet_paper.report.grids import stored_grid
from spherenet_paper.style import WIDTH, save, style

PANELS = (
    (
        "table3",
        "18 layers without ReLU",
        {"none": Line("CNN", "CNN"), "cosine": Line("cosine", "cosine"), "sigmoid-0.3": Line("sigmoid 0.3", "sigmoid")},
    ),
    (
        "fig-ultradeep",
        "45 layers with ReLU",
        {
            "none_softmax_45": Line("CNN", "CNN"),
            "orthogonal-none_softmax_45": Line("CNN, orthogonal", "CNN", DASHED),
            "cosine_w-cosine_45": Line("cosine", "cosine"),
            "orthogonal-cosine_w-cosine_45": Line("cosine, orthogonal", "cosine", DASHED),
            "centered_w-cosine_45": Line("cosine, centered", "centered"),
        },
    ),
)


def main(path: Path) -> None:
    """Draw a panel per experiment."""
    with style("deep"):
        figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 4), sharey=True)
        for ax, (experiment, title, cells) in zip(axes, PANELS, strict=True):
            draw_curves(ax, stored_grid("long", experiment), cells, title)
            ax.set_ylim(8, 95)
            ax.set_xticks([0, 2000, 4000, 6000])
            ax.legend(loc="upper left", fontsize=9.5, labelspacing=0.2)
            ax.label_outer()
        axes[0].set_ylabel("test accuracy %")
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
