"""The four questions of the second part of results/PLAN.md: their tables, as data and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from spherenet_paper import accuracy, light, segmentation, tuning, unknown
from spherenet_paper.comparisons import Comparison, read_rows
from spherenet_paper.report.claims import confidence_interval

__all__ = [
    "ARM_NAMES",
    "Light",
    "Questions",
    "area_table",
    "comparison_table",
    "light_table",
    "segmentation_table",
    "speed_table",
    "tuning_table",
]

CORRUPTION_NAMES = {"clean": "as it is", "cast": "color cast"}
ARM_NAMES = {
    "patch": "SphereNet, centered",
    "first-patch": "SphereNet, first layer centered",
    "cosine": "SphereNet, not centered",
    "patch-no-bn": "SphereNet, centered, without BatchNorm",
    "patch-light": "SphereNet, centered, light augmentation",
    "cnn": "CNN",
    "cnn-standardized": "CNN, standardized images",
    "cnn-light": "CNN, light augmentation",
    "cnn-both": "CNN, standardized images, light augmentation",
    "cnn-unwhitened": "CNN without whitening, standardized images",
}
"""Arms of Q1 in the order of the page."""

SPEED_NAMES = {"cnn": "CNN", "cosine": "SphereNet, cosine"}
"""Arms of Q2."""

NORMALIZATION_NAMES = {
    "sphere-patch": "SphereNorm, centered by patch",
    "sphere-weight": "SphereNorm, centered by weight",
    "batchnorm": "BatchNorm",
    "groupnorm": "GroupNorm",
    "groupnorm-ws": "GroupNorm, weight standardization",
    "layernorm": "LayerNorm",
    "scaled-ws": "scaled weight standardization",
}
"""Arms of the segmentation network."""

SCORE_NAMES = {
    "max_cosine": "largest cosine",
    "knn_cosine": "neighbors",
    "energy": "energy",
    "max_softmax": "largest probability",
}


class Light(NamedTuple):
    """Accuracies under uneven light.

    Attributes:
        accuracies: {(arm, corruption): accuracy per seed in %, the mean over strengths}, seeds in ascending order.
        seeds: {arm: its seeds}.
        strengths: {corruption: strengths in ascending order}.
    """

    accuracies: dict[tuple[str, str], list[float]]
    seeds: dict[str, list[int]]
    strengths: dict[str, list[float]]

    @classmethod
    def of(cls, rows: Iterable[light.Row]) -> Light:
        """Return the means of a table. Seeds that lack an evaluation of another one of the table are left out."""
        cells: dict[str, dict[int, dict[str, dict[float, float]]]] = defaultdict(lambda: defaultdict(dict))
        for row in rows:
            of_seed = cells[row.arm][row.seed].setdefault(row.corruption, {})
            of_seed[float(row.strength or 0)] = 100 * row.accuracy
        grids = [{name: sorted(one) for name, one in seed.items()} for arm in cells.values() for seed in arm.values()]
        complete = max(grids, key=lambda grid: sum(map(len, grid.values())), default={})
        accuracies, seeds = {}, {}
        for arm, by_seed in cells.items():
            chosen = [seed for seed, own in sorted(by_seed.items())
                      if {name: sorted(one) for name, one in own.items()} == complete]  # fmt: skip
            if chosen:
                seeds[arm] = chosen
                for name in complete:
                    accuracies[arm, name] = [fmean(by_seed[seed][name].values()) for seed in chosen]
        return cls(accuracies, seeds, complete)

    @property
    def arms(self) -> list[str]:
        """The arms with results, in the order of the page."""
        return [arm for arm in ARM_NAMES if arm in self.seeds]

    def uneven(self, arm: str) -> list[float]:
        """Return the mean over all uneven light per seed in %, the quantity of the claim."""
        rows = [self.accuracies[arm, name] for name in light.LIGHT]
        return [fmean(values) for values in zip(*rows, strict=True)]


class Questions(NamedTuple):
    """The tables of the questions; empty ones if their runs are not complete.

    Attributes:
        light: Rows of light.csv (Q1).
        areas: Rows of unknown.csv (Q4).
        speed: Rows of speed.csv (Q2).
        tuning: Rows of tuning.csv, the candidates before Q2.
        segmentation: Rows of segmentation.csv (Q3).
    """

    light: Sequence[light.Row] = ()
    areas: Sequence[unknown.Area] = ()
    speed: Sequence[accuracy.Accuracy] = ()
    tuning: Sequence[tuning.Candidate] = ()
    segmentation: Sequence[segmentation.Score] = ()

    @classmethod
    def read(cls, folder: Path) -> Questions:
        """Read the tables of a folder that exist."""
        types = {
            "light": light.Row,
            "unknown": unknown.Area,
            "speed": accuracy.Accuracy,
            "tuning": tuning.Candidate,
            "segmentation": segmentation.Score,
        }
        paths = {name: folder / f"{name}.csv" for name in types}
        return cls(*(read_rows(paths[name], row) if paths[name].exists() else () for name, row in types.items()))

    @property
    def light_claims(self) -> list[Comparison]:
        """The comparisons of Q1; none if a planned run is missing."""
        return light.judge(self.light)

    @property
    def speed_claims(self) -> list[Comparison]:
        """The comparison of Q2; none if a planned run is missing."""
        return accuracy.judge(self.speed)

    @property
    def segmentation_claims(self) -> list[Comparison]:
        """The comparisons of the segmentation network; none if a planned training is missing."""
        return segmentation.judge(self.segmentation)

    @property
    def unknown_claims(self) -> list[Comparison]:
        """The comparisons of Q4; none if a planned evaluation is missing."""
        return unknown.judge(self.areas)


def mean_text(values: Sequence[float], digits: int = 1) -> str:
    """Return "mean ± standard deviation" over the seeds, or the value of a single seed."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def light_table(rows: Sequence[light.Row], corruptions: Iterable[str], *, mean: bool = False) -> str:
    """Return accuracies by arm and corruption, means over strengths; with `mean` also the quantity of the claim."""
    measured, names = Light.of(rows), list(corruptions)
    titles = [CORRUPTION_NAMES.get(name, name) for name in names] + ["**mean of the five**"] * mean
    lines = ["| | n | " + " | ".join(titles) + " |", "|---" * (len(titles) + 2) + "|"]
    for arm in measured.arms:
        cells = [mean_text(measured.accuracies[arm, name]) for name in names]
        cells += [f"**{mean_text(measured.uneven(arm))}**"] * mean
        lines.append(f"| {ARM_NAMES[arm]} | {len(measured.seeds[arm])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def comparison_table(comparisons: Sequence[Comparison], title: str) -> str:
    """Return the differences with their intervals, Holm's p and verdicts."""
    lines = [f"| {title} | difference [95 % interval] | p (Holm) | verdict |", "|---|---|---|---|"]
    for one in comparisons:
        p = "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
        lines.append(f"| {_comparison_name(one.name)} | {one} | {p} | {one.decision} |")
    return "\n".join(lines)


def _comparison_name(name: str) -> str:
    """Return the name of an arm for readers; of Q4's comparisons with the CNN, the arm and the images."""
    arm, _, images = name.partition(" − cnn on ")
    return (ARM_NAMES | NORMALIZATION_NAMES).get(arm, arm) + (f", {images}" if images else "")


def area_table(areas: Sequence[unknown.Area]) -> str:
    """Return areas in % by network, unknown images and score: mean ± standard deviation over seeds."""
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for area in areas:
        values[area.arm, area.unknown, area.score].append(100 * area.auroc)
    lines = ["| | unknown | " + " | ".join(SCORE_NAMES.values()) + " |", "|---" * (len(SCORE_NAMES) + 2) + "|"]
    for arm, kind in dict.fromkeys((area.arm, area.unknown) for area in areas):
        cells = [mean_text(values[arm, kind, score]) for score in SCORE_NAMES]
        lines.append(f"| {ARM_NAMES[arm]} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed_table(rows: Sequence[accuracy.Accuracy]) -> str:
    """Return accuracies of the speed recipe by network: mean, standard deviation and interval, in percent."""
    lines = ["| network | n | accuracy, % | with six views, % |", "|---|---|---|---|"]
    for arm in dict.fromkeys(row.arm for row in rows):
        cell = [row for row in rows if row.arm == arm]
        columns = (_with_interval([row.accuracy for row in cell]), _with_interval([row.tta_accuracy for row in cell]))
        lines.append(f"| {SPEED_NAMES.get(arm, arm)} | {len(cell)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def tuning_table(rows: Sequence[tuning.Candidate]) -> str:
    """Return accuracies on held-out images by candidate, the best of each network first."""
    lines = ["| network | setting | n | accuracy on held-out images, % |", "|---|---|---|---|"]
    for network, title in (("cnn", "CNN"), ("sphere", "SphereNet")):
        for name, values in tuning.ranking([row for row in rows if tuning.network_of(row.candidate) == network]):
            options = f"`{tuning.CANDIDATES[name]}`"
            lines.append(f"| {title} | {options} | {len(values)} | {mean_text(values, 2)} |")
    return "\n".join(lines)


def segmentation_table(rows: Sequence[segmentation.Score]) -> str:
    """Return intersections over union in % by normalization and batch, with the learning rates that were chosen."""
    columns = [f"batch {batch} | its rate" for batch in segmentation.BATCHES]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (2 * len(columns) + 1) + "|"]
    for arm in dict.fromkeys(row.arm for row in rows):
        cells = []
        for batch in segmentation.BATCHES:
            cell = [row for row in rows if (row.arm, row.batch) == (arm, batch) and row.seed in segmentation.SEEDS]
            rates = " or ".join(dict.fromkeys(f"{row.learning_rate:g}" for row in cell))
            cells += [mean_text([100 * row.score for row in cell]), rates] if cell else ["", ""]
        lines.append(f"| {NORMALIZATION_NAMES[arm]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_interval(fractions: Sequence[float]) -> str:
    percent = [100 * value for value in fractions]
    if len(percent) < 2:
        return f"{percent[0]:.2f}, n = 1"
    low, high = confidence_interval(percent)
    return f"{mean_text(percent, 2)} [{low:.2f}, {high:.2f}]"
