"""Experiments as data: cells (training configurations with the paper's values), claims, and the three presets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from spherenet.cli.plugin import require_one_of
from spherenet.training import TrainConfig

__all__ = [
    "OPERATORS",
    "PRESETS",
    "Cell",
    "Claim",
    "Experiment",
    "Logs",
    "Requirement",
    "cifar_config",
    "paper_margin",
]

PRESETS = ("paper", "long", "cpu", "smoke")
"""Sizes of an experiment: the paper's settings, hours or minutes on two CPU cores, and a few steps for tests."""

OPERATORS: dict[str, dict[str, Any]] = {
    "sigmoid-0.1": {"operator": "sigmoid:k=0.1"},
    "sigmoid-0.3": {"operator": "sigmoid:k=0.3"},
    "sigmoid-0.7": {"operator": "sigmoid:k=0.7"},
    "linear": {"operator": "linear"},
    "cosine": {"operator": "cosine"},
    "none": {"operator": None},
}
"""The operators in the rows of the paper's tables, with their options of `TrainConfig`."""


def paper_margin(loss: str, m: int = 4) -> dict[str, Any]:
    """Return GA- or A-Softmax as in the paper: logits scaled by the feature norm, full gradient, annealing."""
    return {"loss": f"{loss}:m={m},margin_gradient=full,scale=norm", "annealing": True}


@dataclass(frozen=True)
class Cell:
    """One configuration of an experiment. It is run once per seed.

    Attributes:
        name: Name of its folder, unique within the experiment.
        row: Row of the table.
        column: Column of the table.
        config: Training configuration; the seed is set when jobs are created.
        paper: Accuracy in percent that the paper prints, or None if the paper shows a curve.
        starts_from: Name of the cell whose weights this one is initialized with.
    """

    name: str
    row: str
    column: str
    config: TrainConfig
    paper: float | None = None
    starts_from: str | None = None


@dataclass(frozen=True)
class Requirement:
    """A condition without which the runs of an experiment cannot test a claim, stated before the runs.

    Attributes:
        quantity: "accuracy" (final test accuracy) or "training accuracy" (at the end of the run).
        minimum: Smallest mean over seeds in percent.
        cells: "both" if all cells of the claim must meet it, "second" if the second cell of each pair must.
    """

    quantity: str
    minimum: float
    cells: Literal["both", "second"] = "both"

    def __str__(self) -> str:
        """Return the condition as text."""
        cells = "every network" if self.cells == "both" else "the network it is compared with"
        article = "an" if self.quantity[0] in "aeiou" else "a"
        return f"{article} {self.quantity} of at least {self.minimum:g} % of {cells}"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper: in each pair of cells, the first one has the larger quantity.

    Attributes:
        id: Name, unique within the experiment.
        text: The statement.
        source: Table, figure or section of the paper.
        pairs: Names of the cells to compare.
        quantity: What is compared: "accuracy" (final test accuracy), "early" (mean test accuracy over the evaluations
            in the first half of the run), "mean" (over all evaluations), "lag" (mean with precise statistics minus mean
            with lagging ones), "steadiness" (how little the accuracy drops between evaluations in the first half),
            "rise" (mean learned k of the last convolution minus that of the first) or "narrowing" (standard deviation
            of the learned k in the first stage minus that in the last). The last two are 0 when k is not learned.
        requires: Condition without which the claim is reported as out of reach, whatever the runs show.
        protocol: BatchNorm statistics of the evaluations, e.g. "lagging"; None for the first ones of a run.
    """

    id: str
    text: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    quantity: str = "accuracy"
    requires: Requirement | None = None
    protocol: str | None = None

    @property
    def full_text(self) -> str:
        """The text with the BatchNorm statistics, if they are part of the claim."""
        return self.text if self.protocol is None else f"{self.text}, {self.protocol} BatchNorm statistics"

    @property
    def statement(self) -> str:
        """The text with the BatchNorm statistics, and the source."""
        return f"{self.full_text} ({self.source})"


@dataclass(frozen=True)
class Logs:
    """Averages of logs that others published, which reports show beside ours.

    Attributes:
        source: Where the logs come from and what their rows are.
        first: First iteration of the averages.
        last: Last iteration of the averages.
        accuracies: Mean training and test accuracy in percent by the name of the cell.
    """

    source: str
    first: int
    last: int
    accuracies: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Experiment:
    """A table, figure or study.

    Attributes:
        id: Name for `spherenet reproduce`.
        title: Heading in reports.
        shows: What its numbers are.
        create_cells: Function that returns the cells of a preset. Its docstring describes the experiment.
        claims: Statements that the cells can confirm or refute.
        baseline: Row of the table whose final accuracy the other rows are timed against, or None.
        presets: Presets for which it has cells.
        seeds: Number of seeds of each cell that results/PLAN.md plans for the long preset, by its name; "*" for the
            cells that are not named. Reports list what is missing.
        logs: Averages of published logs of the same networks, or None.
    """

    id: str
    title: str
    shows: str
    create_cells: Callable[[str], list[Cell]]
    claims: tuple[Claim, ...] = field(default=())
    baseline: str | None = None
    presets: tuple[str, ...] = ("paper", "cpu", "smoke")
    seeds: Mapping[str, int] = field(default_factory=dict)
    logs: Logs | None = None

    def cells(self, preset: str) -> list[Cell]:
        """Return the cells of a preset, none if the experiment does not have it."""
        return self.create_cells(preset) if require_one_of("preset", preset, PRESETS) in self.presets else []

    def planned_seeds(self, preset: str) -> dict[str, int]:
        """Return the planned number of seeds of each cell of a preset, empty if there is no plan."""
        if preset != "long" or not self.seeds:
            return {}
        return {cell.name: self.seeds.get(cell.name, self.seeds.get("*", 0)) for cell in self.cells(preset)}

    @property
    def description(self) -> str:
        """What is varied, the expected results, the cost and the command."""
        return inspect.cleandoc(self.create_cells.__doc__ or "")

    def claims_about(self, cells: list[Cell]) -> list[Claim]:
        """Return the claims restricted to pairs of these cells, without those that have no pair left."""
        names = {cell.name for cell in cells}
        restricted = [
            replace(claim, pairs=tuple(pair for pair in claim.pairs if names.issuperset(pair))) for claim in self.claims
        ]
        return [claim for claim in restricted if claim.pairs]


def cifar_config(
    preset: str,
    *,
    operator: str | None,
    iterations_cpu: int = 500,
    widths_cpu: tuple[int, ...] = (16, 24, 32),
    iterations_long: int = 6000,
    widths_long: tuple[int, ...] = (32, 48, 64),
    **options: Any,
) -> TrainConfig:
    """Return the configuration of a run on CIFAR-10.

    Args:
        preset: "paper": 64,000 iterations at the paper's widths. "long": half the widths and `iterations_long`
            iterations in bfloat16. "cpu": images of 16 × 16, batches of 64, a quarter of the widths and
            `iterations_cpu` iterations. In both the learning rate drops at the same fractions of the run.
            "smoke": two steps of a tiny network on the embedded digits, reduced to 16 × 16.
        operator: Operator of the network. Experiments do not rely on the default.
        iterations_cpu: Iterations of the cpu preset.
        widths_cpu: Filters per stage of the cpu preset.
        iterations_long: Iterations of the long preset.
        widths_long: Filters per stage of the long preset.
        options: Further options of `TrainConfig`. `center` is "none", the operator of the paper, unless it is given.
    """
    options = {"operator": operator, "center": "none", **options}
    if preset == "paper":
        full: dict[str, Any] = {"data": "cifar10", "iterations": 64_000, "milestones": [34_000, 54_000]}
        return TrainConfig(**{**full, "eval_every": 500, "checkpoint_every": 1000, "log_every": 100, **options})
    if preset == "long":
        half: dict[str, Any] = {"data": "cifar10", "widths": list(widths_long), "precision": "bfloat16"}
        length = {"iterations": iterations_long, "eval_every": 250, "checkpoint_every": 500}
        return TrainConfig(**{**half, **length, **options})
    if preset == "cpu":
        small: dict[str, Any] = {"data": "cifar10", "image_size": 16, "batch_size": 64, "widths": list(widths_cpu)}
        length = {"iterations": iterations_cpu, "eval_every": iterations_cpu // 5}
        return TrainConfig(**{**small, **length, "checkpoint_every": iterations_cpu // 2, **options})
    require_one_of("preset", preset, PRESETS)
    short = {"iterations": 2, "batch_size": 8, "eval_every": 1, "checkpoint_every": 2, "log_every": 1}
    groups = min(options.get("group_norm", 0), 4)  # they must divide the number of filters
    tiny = {"widths": [4] * len(widths_cpu), "group_norm": groups, "eval_batch_size": 500}
    settings = {**options, **short, **tiny, "augmentation": None, "milestones": None}
    return replace(TrainConfig(**settings), data="mnist5k", image_size=16)
