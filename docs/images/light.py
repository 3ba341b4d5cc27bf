"""Draw `light.svg`: test accuracy under uneven light, with one image under each light, from paper/results/light.csv.

    python docs/images/light.py [TABLE [FILE]]

Bars are means over seeds, and over the strengths of a corruption; error bars are ± one standard deviation over seeds.
"""

import sys
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image

from spherenet.data import corrupt
from spherenet_paper.comparisons import read_rows
from spherenet_paper.light import LIGHT, Row
from spherenet_paper.report.questions import ARM_NAMES, CORRUPTION_NAMES, Light
from spherenet_paper.style import FAINT, WIDTH, color_of, plain_axes, save, style

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "paper" / "results" / "light.csv"
EXAMPLE = ROOT / "examples" / "images" / "horse.png"
COLUMNS = ("clean", *LIGHT)
METHODS = {"cnn": "CNN", "cnn-standardized": "standardized", "cnn-light": "other", "patch": "centered"}
"""Arms of the figure and the methods whose colors they have. The table has more arms."""


def example(name: str, strengths: list[float]) -> np.ndarray:
    """Return the example image under a light of the middle strength, [H, W, 3]."""
    with Image.open(EXAMPLE) as file:
        pixels = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)[None]
    if name != "clean":
        pixels = corrupt(pixels, f"{name}:{strengths[len(strengths) // 2]:g}")
    return pixels[0].permute(1, 2, 0).numpy()


def main(path: Path, source: Path = TABLE) -> None:
    """Draw one column per light: the image, and below it a bar per arm."""
    light = Light.of(read_rows(source, Row))
    if missing := METHODS.keys() - light.seeds.keys():
        sys.exit(
            f"{source.name} must have complete runs of {', '.join(METHODS)}, got none of {', '.join(sorted(missing))}."
        )
    with style("light"):
        figure, axes = plt.subplots(2, len(COLUMNS), figsize=(WIDTH, 4.6), height_ratios=(1, 2.6))
        for column, name in zip(axes.T, COLUMNS, strict=True):
            draw_column(column, light, name)
        for bars in axes[1, 1:]:
            bars.tick_params(labelleft=False, left=False)
        axes[1, 0].set_ylabel("test accuracy %")
        handles, _ = axes[1, 0].get_legend_handles_labels()
        figure.legend(handles=handles, loc="outside lower center", ncols=2, columnspacing=1, handlelength=1)
        figure.get_layout_engine().set(w_pad=0.01, wspace=0.02)
        save(figure, path)


def draw_column(column: np.ndarray, light: Light, name: str) -> None:
    """Draw the image under one light and the accuracies below it."""
    image, bars = column
    image.imshow(example(name, light.strengths[name]), interpolation="nearest")
    image.set_title(CORRUPTION_NAMES.get(name, name))
    plain_axes(image)
    for position, (arm, method) in enumerate(METHODS.items()):
        values = light.accuracies[arm, name]
        bars.bar(position, fmean(values), 0.86, color=color_of(method), label=ARM_NAMES[arm])
        bars.errorbar(position, fmean(values), stdev(values), color=FAINT.light, capsize=2, linewidth=1.2)
        bars.text(position, fmean(values) + stdev(values) + 1.5, f"{fmean(values):.0f}", ha="center", size=10)
    bars.set(ylim=(0, 100), xticks=[])
    bars.grid(visible=False, axis="x")


if __name__ == "__main__":
    arguments = [Path(word) for word in sys.argv[1:]]
    main(arguments[1] if len(arguments) > 1 else Path(__file__).with_suffix(".svg"), *arguments[:1])
