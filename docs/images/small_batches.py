"""Draw `small_batches.svg` from the runs of fig-spherenorm of the preset long: curves at three batch sizes.

python docs/images/small_batches.py [FILE]
"""

import sys
from pathlib import Path

from curves import DASHED, Line, draw_curves  # modules beside this one
from matplotlib import pyplot as plt

from spherenet_paper.report.grids import stored_grid
from spherenet_paper.style import WIDTH, save, style

ROWS = {
    "batchnorm": Line("CNN, BatchNorm", "CNN"),
    "groupnorm": Line("CNN, GroupNorm", "CNN", DASHED),
    "spherenorm": Line("SphereNorm, cosine", "cosine"),
    "centered_patch": Line("SphereNorm, centered", "centered"),
}
PANELS = tuple(
    ("fig-spherenorm", f"batches of {size}", {f"{row}_{size}": line for row, line in ROWS.items()})
    for size in (2, 8, 32)
)


def main(path: Path) -> None:
    """Draw a panel per batch size."""
    with style("small_batches"):
        figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3.6), sharey=True)
        for ax, (experiment, title, cells) in zip(axes, PANELS, strict=True):
            draw_curves(ax, stored_grid("long", experiment), cells, title)
            ax.set_xticks([0, 2000])
            ax.label_outer()
        axes[0].set_ylabel("test accuracy %")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
