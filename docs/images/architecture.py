"""Draw `architecture.svg`: the flow of data through one sphere layer, and where each step is computed.

python docs/images/architecture.py [FILE]
"""

import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from spherenet_paper.style import FAINT, TEXT, WIDTH, color_of, plain_axes, save, style

HALF, FULL = 4.55, 9.4
# x, y, width, color, title, line below it
STEPS = [
    (0.3, 11.2, HALF, "CNN", "patches x", "input of the layer"),
    (5.15, 11.2, HALF, "CNN", "kernels w", "SphereConv2d.weight"),
    (0.3, 9.3, HALF, "cosine", "1 / ‖x‖ per position", "Eq. 2 and 14 · ops/sphere_conv.py"),
    (5.15, 9.3, HALF, "cosine", "ŵ = w / ‖w‖", "Eq. 2 and 14 · ops/sphere_conv.py"),
    (0.3, 7.4, FULL, "cosine", "cos θ = ŵ·x / ‖x‖", "one convolution · ops/geometry.py, kernels/"),
    (0.3, 5.5, FULL, "sigmoid", "g(θ)", "Eq. 1 · angles/"),
    (0.3, 3.6, FULL, "centered", "β (h(‖x‖) g(θ) + b) + γ", "Eq. 15 and 3, if they are on · magnitudes.py"),
    (0.3, 1.7, FULL, "CNN", "output y", "in [−1, 1] by default"),
]  # fmt: skip
HEIGHT = 1.3
ARROWS = [(x, step) for x in (2.575, 7.425) for step in (11.2, 9.3)] + [(5.0, step) for step in (7.4, 5.5, 3.6)]
BELOW = (
    "kernels/dispatch.py chooses one backend for all steps:\n"
    "native C++ (direct or Winograd), Triton, torch.compile, or plain torch.\n"
    "backward runs there, too, with 1/‖x‖ and y (or cos θ) kept."
)


def draw_box(axes: Axes, x: float, y: float, width: float, color: str, title: str, text: str) -> None:
    """Draw one step: a box with a title and a line below it."""
    shape = "round,pad=0,rounding_size=0.12"
    box = FancyBboxPatch((x, y), width, HEIGHT, boxstyle=shape, fc=color_of(color), alpha=0.14, lw=0)
    edge = FancyBboxPatch((x, y), width, HEIGHT, boxstyle=shape, fc="none", ec=color_of(color), lw=1.4)
    axes.add_patch(box)
    axes.add_patch(edge)
    axes.text(x + width / 2, y + 0.88, title, ha="center", va="center", color=TEXT.light, size=12.5)
    axes.text(x + width / 2, y + 0.36, text, ha="center", va="center", color=FAINT.light, size=10.5)


def main(path: Path) -> None:
    """Draw the steps from top to bottom, and the arrows between them."""
    with style("architecture"):
        figure, axes = plt.subplots(figsize=(WIDTH, 7.2))
        plain_axes(axes)
        for step in STEPS:
            draw_box(axes, *step)
        for x, y in ARROWS:
            arrow = {"arrowstyle": "-|>", "color": FAINT.light, "lw": 1.4}
            axes.annotate("", (x, y - 1.9 + HEIGHT), (x, y), arrowprops=arrow)
        axes.text(5, 0.7, BELOW, ha="center", va="center", color=FAINT.light, size=10.5)
        axes.set(xlim=(0, 10), ylim=(-0.1, 12.6))
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
