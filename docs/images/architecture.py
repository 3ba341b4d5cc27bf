"""Draw `architecture.svg`: the way of one batch through a sphere layer, forward and backward.

python docs/images/architecture.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GRAY = "#4477aa", "#ee7733", "#888888"

# x, y, width, height, color, title, lines below it
BOXES = [
    (0.0, 8.3, 4.6, 1.5, BLUE, "layers/conv.py", "SphereConv2d.forward"),
    (5.4, 8.3, 4.6, 1.5, BLUE, "functional.py", "sphere_conv2d(…)"),
    (0.0, 6.0, 10.0, 1.6, GRAY, "Operation and Parameters", "what: angle, magnitude, center, eps, geometry\n"
     "with which tensors: k, bias, β, γ, radius"),
    (0.0, 3.6, 10.0, 1.7, ORANGE, "kernels/dispatch.py", "sphere_layer(x, weight, operation, parameters)\n"
     "the only place that decides: which backend, may it read the memory, what is saved"),
    (0.0, 1.2, 2.35, 1.7, BLUE, "native", "C++: direct\nor Winograd"),
    (2.55, 1.2, 2.35, 1.7, BLUE, "triton", "GPU kernels"),
    (5.1, 1.2, 2.35, 1.7, BLUE, "compiled", "torch.compile\nof the formula"),
    (7.65, 1.2, 2.35, 1.7, BLUE, "plain", "the formula\nin ops/"),
]  # fmt: skip
ARROWS = [
    (2.3, 8.3, 2.3, 7.6), (7.7, 8.3, 7.7, 7.6), (5.0, 6.0, 5.0, 5.3),
    *((x, 3.6, x, 2.9) for x in (1.175, 3.725, 6.275, 8.825)),
]  # fmt: skip
CAPTION = "backward runs on the same backend, with what it saved: 1/‖patch‖ and the output or the cosine"


def main(path: Path) -> None:
    """Draw the boxes and the arrows between them."""
    mpl.rcParams["svg.hashsalt"] = "architecture"  # reproducible output
    figure, axes = plt.subplots(figsize=(7, 6.4))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    for x, y, width, height, color, title, text in BOXES:
        style = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=f"{color}22", ec=color, lw=1.4))
        middle = x + width / 2
        axes.text(middle, y + height - 0.28, title, ha="center", va="center", weight="bold", color=color, size=10.5)
        axes.text(middle, y + (height - 0.42) / 2, text, ha="center", va="center", color=GRAY, size=8.8)
    for x, y, to_x, to_y in ARROWS:
        axes.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": GRAY, "lw": 1.4})
    axes.text(5, 0.55, CAPTION, ha="center", va="center", color=GRAY, size=8.8)
    axes.set(xlim=(-0.15, 10.15), ylim=(0.1, 10))
    axes.axis("off")
    figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
