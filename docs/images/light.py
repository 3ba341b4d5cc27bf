"""Draw `light.svg`: test accuracy under uneven light, with one image under each light, from paper/results/light.csv.

    python docs/images/light.py [TABLE [FILE]]
    python docs/images/light.py --table [TABLE]     # means and standard deviations of all arms, as Markdown

The table has the columns arm, seed, corruption, strength and accuracy, a row per evaluation; the corruption "clean" has
no strength. Bars are means over seeds, and over the strengths of a corruption; error bars are ± one standard deviation
over seeds.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image

from spherenet.data import corrupt
from spherenet_paper.style import FAINT, WIDTH, color_of, plain_axes, save, style

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "paper" / "results" / "light.csv"
EXAMPLE = ROOT / "examples" / "images" / "horse.png"
LIGHTS = {
    "clean": "as it is",
    "spot": "spot",
    "ramp": "ramp",
    "shadow": "shadow",
    "gamma": "gamma",
    "cast": "color cast",
}
ARMS = {
    "cnn": ("CNN", "CNN"),
    "cnn-standardized": ("CNN, standardized images", "standardized"),
    "patch": ("SphereNet, centered", "centered"),
}
"""Arms of the figure with their names and methods. The table has more."""


class Light(NamedTuple):
    """The measured accuracies.

    Attributes:
        accuracies: {(arm, corruption): accuracy per seed in %, the mean over strengths}, seeds in ascending order.
        seeds: The seeds, the same for every arm and corruption.
        strengths: {corruption: strengths in ascending order}.
    """

    accuracies: dict[tuple[str, str], list[float]]
    seeds: list[int]
    strengths: dict[str, list[float]]

    @property
    def arms(self) -> list[str]:
        """The arms in the order of the table."""
        return list(dict.fromkeys(arm for arm, _ in self.accuracies))

    def uneven(self, arm: str) -> list[float]:
        """Return the mean over all corruptions but "clean" per seed in %, the quantity of the claim."""
        rows = [self.accuracies[arm, name] for name in LIGHTS if name != "clean"]
        return [fmean(values) for values in zip(*rows, strict=True)]


def read(path: Path = TABLE) -> Light:
    """Read the table; the arms of the figure must have the same seeds and strengths."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cells: dict[tuple[str, str], dict[int, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["corruption"] in LIGHTS:
            strength = float(row["strength"] or 0)
            cells[row["arm"], row["corruption"]][int(row["seed"])][strength] = 100 * float(row["accuracy"])
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if all((arm, name) in cells for name in LIGHTS)]
    grids = {name: {str({seed: sorted(own) for seed, own in sorted(cells[arm, name].items())}) for arm in ARMS}
             for name in LIGHTS}  # fmt: skip
    seeds = {tuple(sorted(cells[arm, name])) for arm in ARMS for name in LIGHTS}
    if len(seeds) != 1 or any(len(different) != 1 for different in grids.values()) or not set(ARMS) <= set(arms):
        sys.exit(f"{path.name} must have {', '.join(ARMS)} with the same seeds and strengths.")
    accuracies = {
        (arm, name): [fmean(cells[arm, name][seed].values()) for seed in sorted(cells[arm, name])]
        for arm in arms
        for name in LIGHTS
    }
    (order,) = seeds
    return Light(accuracies, list(order), {name: sorted(cells["patch", name][order[0]]) for name in LIGHTS})


def text(values: list[float]) -> str:
    """Return "mean ± standard deviation" over the seeds, or the value of a single seed."""
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def table(light: Light) -> str:
    """Return all arms as a Markdown table; the last column is the mean over all corruptions but "clean"."""
    lines = ["| arm | n | " + " | ".join(LIGHTS.values()) + " | mean of the five |", "|---" * (len(LIGHTS) + 3) + "|"]
    for arm in light.arms:
        cells = [text(light.accuracies[arm, name]) for name in LIGHTS]
        lines.append(f"| {arm} | {len(light.uneven(arm))} | " + " | ".join(cells) + f" | {text(light.uneven(arm))} |")
    return "\n".join(lines)


def example(name: str, strengths: list[float]) -> np.ndarray:
    """Return the example image under a light of the middle strength, [H, W, 3]."""
    with Image.open(EXAMPLE) as file:
        pixels = torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)[None]
    if name != "clean":
        pixels = corrupt(pixels, f"{name}:{strengths[len(strengths) // 2]:g}")
    return pixels[0].permute(1, 2, 0).numpy()


def main(path: Path, source: Path = TABLE) -> None:
    """Draw one column per light: the image, and below it a bar per arm."""
    light = read(source)
    with style("light"):
        figure, axes = plt.subplots(2, len(LIGHTS), figsize=(WIDTH, 4.4), height_ratios=(1, 2.6))
        for column, (name, title) in zip(axes.T, LIGHTS.items(), strict=True):
            draw_column(column, light, name, title)
        for bars in axes[1, 1:]:
            bars.tick_params(labelleft=False, left=False)
        axes[1, 0].set_ylabel("test accuracy %")
        handles, _ = axes[1, 0].get_legend_handles_labels()
        figure.legend(handles=handles, loc="outside lower center", ncols=len(ARMS), columnspacing=1, handlelength=1)
        figure.get_layout_engine().set(w_pad=0.01, wspace=0.02)
        save(figure, path)


def draw_column(column: np.ndarray, light: Light, name: str, title: str) -> None:
    """Draw the image under one light and the accuracies below it."""
    image, bars = column
    image.imshow(example(name, light.strengths[name]), interpolation="nearest")
    image.set_title(title)
    plain_axes(image)
    for position, (arm, (label, method)) in enumerate(ARMS.items()):
        values = light.accuracies[arm, name]
        bars.bar(position, fmean(values), 0.86, color=color_of(method), label=label)
        bars.errorbar(position, fmean(values), stdev(values), color=FAINT.light, capsize=2, linewidth=1.2)
        bars.text(position, fmean(values) + stdev(values) + 1.5, f"{fmean(values):.0f}", ha="center", size=10)
    bars.set(ylim=(0, 100), xticks=[])
    bars.grid(visible=False, axis="x")


if __name__ == "__main__":
    arguments = [Path(word) for word in sys.argv[1:] if word != "--table"]
    if "--table" in sys.argv:
        print(table(read(*arguments)))
    else:
        main(arguments[1] if len(arguments) > 1 else Path(__file__).with_suffix(".svg"), *arguments[:1])
