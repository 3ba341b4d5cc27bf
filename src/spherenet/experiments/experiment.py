"""What an experiment is: a typed list of runs with the paper's values attached, and what it claims.

The three sizes of every experiment: as in the paper, for two cores, and for tests.

The experiments by the names that `spherenet reproduce` takes.

An experiment as jobs on a disk: a folder for each cell and seed, and what is to be run to fill it.

OUTPUT/PRESET/ID/experiment.json          the cells with the paper's values, the claims
OUTPUT/PRESET/ID/CELL/seed-0/             a run (SPEC 8), with seed-0.log beside it
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from spherenet import __version__
from spherenet.errors import RunError
from spherenet.files import write_json
from spherenet.runs import RunDirectory
from spherenet.training.config import FREE, TrainConfig
from spherenet.training.saved_runs import config_of
from spherenet.validation import require_one_of

__all__ = [
    "IDS",
    "OPERATORS",
    "PRESETS",
    "Cell",
    "Claim",
    "Experiment",
    "Job",
    "cifar",
    "command_line",
    "describe_grid",
    "find_experiment",
    "jobs_of",
    "operator_options",
    "selected",
    "words_of",
]

PRESETS = ("paper", "cpu", "smoke")


@dataclass(frozen=True)
class Cell:
    """One run of an experiment, but for its seed.

    name: of its folder, unique in the experiment. row, column: its place in the table. paper: the accuracy in per cent
    that the paper prints, None where it draws a curve. starts_from: the cell whose weights this one starts from.
    """

    name: str
    row: str
    column: str
    config: TrainConfig
    paper: float | None = None
    starts_from: str | None = None

    def described(self) -> dict[str, Any]:
        """The cell as experiment.json holds it."""
        return {name: value for name, value in asdict(self).items() if name != "config"}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that pairs of cells can confirm or refute: in each pair, the first beats the second.

    quantity: "accuracy" at the end; "early": the mean test accuracy over the evaluations of the first half of the run,
    higher for what converges faster; "steadiness": how little accuracy falls between these evaluations; "rise":
    how much larger the mean learned k is in the last convolution than in the first; "narrowing": how much closer
    together learned k lie at the head of the last stage than of the first. Both are 0 where k is not learned. source:
    where the paper says it.
    """

    text: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    quantity: str = "accuracy"


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. cells: its runs for a preset."""

    id: str
    title: str
    shows: str
    cells: Callable[[str], list[Cell]]
    claims: tuple[Claim, ...] = field(default=())

    def claims_of(self, cells: list[Cell]) -> list[Claim]:
        """The claims as far as these cells can decide them."""
        names = {cell.name for cell in cells}
        kept = [
            Claim(
                claim.text, claim.source, tuple(pair for pair in claim.pairs if names.issuperset(pair)), claim.quantity
            )
            for claim in self.claims
        ]
        return [claim for claim in kept if claim.pairs]


def command_line(config: TrainConfig) -> list[str]:
    """The options of `spherenet train` that make this configuration: those that differ from the defaults."""
    options: list[str] = []
    for made in fields(TrainConfig):
        value = getattr(config, made.name)
        if value == made.default:
            continue
        options.append(f"--{made.name.replace('_', '-')}")
        options += [_word(part) for part in (value if isinstance(value, (list, tuple)) else [value])]
    return options


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


OPERATORS: dict[str, dict[str, Any]] = {
    "sigmoid-0.1": {"operator": "sigmoid", "k": 0.1},
    "sigmoid-0.3": {"operator": "sigmoid", "k": 0.3},
    "sigmoid-0.7": {"operator": "sigmoid", "k": 0.7},
    "linear": {"operator": "linear"},
    "cosine": {"operator": "cosine"},
    "none": {"operator": None},
}
"""The rows of the paper's tables."""


def operator_options(name: str) -> dict[str, Any]:
    """The options of an operator by its name in the tables."""
    return dict(OPERATORS[require_one_of("operator", name, OPERATORS)])


def cifar(
    preset: str, *, iterations_cpu: int = 500, widths_cpu: tuple[int, ...] = (16, 24, 32), **options: Any
) -> TrainConfig:
    """A run on CIFAR-10 with the settings of SPEC 4, whole or shrunk; `options` are those of `TrainConfig`.

    paper: 64,000 iterations at the paper's widths. cpu: pictures of 16 × 16, batches of 64, a quarter of the widths and
    `iterations_cpu`, the learning rate falling at the same fractions. smoke: a few steps of a tiny network on the
    embedded digits.
    """
    if preset == "paper":
        full: dict[str, Any] = {"data": "cifar10", "iterations": 64_000, "milestones": [34_000, 54_000]}
        return TrainConfig(**{**full, "eval_every": 500, "checkpoint_every": 1000, "log_every": 100, **options})
    if preset == "cpu":
        small: dict[str, Any] = {"data": "cifar10", "image_size": 16, "batch_size": 64, "widths": list(widths_cpu)}
        length = {"iterations": iterations_cpu, "eval_every": iterations_cpu // 5}
        return TrainConfig(**{**small, **length, "checkpoint_every": iterations_cpu // 2, **options})
    require_one_of("preset", preset, ("paper", "cpu", "smoke"))
    few = {"iterations": 2, "batch_size": 8, "eval_every": 1, "checkpoint_every": 2, "log_every": 1}
    tiny = {"widths": [4] * len(widths_cpu), "eval_batch_size": 500}
    chosen = {**options, **few, **tiny, "augmentation": None, "milestones": None}
    return replace(TrainConfig(**chosen), data="mnist5k", image_size=None)


IDS = (
    "table1",
    "table2",
    "table3",
    "table4",
    "fig-convergence-resnet",
    "fig-convergence-plain",
    "fig-width",
    "fig-ultradeep",
    "learnable",
    "fig-spherenorm",
    "s-softmax",
    "weight-decay",
    "imagenet",
    "margin-schedule",
)


def find_experiment(id: str) -> Experiment:
    """Return an experiment; its module is that of its name in this folder. ValueError lists the near names."""
    experiment: Experiment = _module(id).EXPERIMENT
    return experiment


def words_of(id: str) -> str:
    """What an experiment shows, what it costs and how to run it: the docstring of its module."""
    return _module(id).__doc__ or ""


def _module(id: str) -> ModuleType:
    require_one_of("id", id, IDS)
    return import_module(f"spherenet.experiments.{id.replace('-', '_')}")


FORMAT = 1


@dataclass(frozen=True, eq=False)
class Job:
    """One run to be made: where, how, and after which other."""

    name: str
    folder: Path
    config: TrainConfig
    after: Path | None = None

    @property
    def log(self) -> Path:
        """Where what the run says is kept."""
        return self.folder.with_suffix(".log")

    def is_done(self) -> bool:
        """Whether the run came to its end. RunError where the folder holds a run with other settings."""
        if not (self.folder / "config.json").exists():
            return False
        run = RunDirectory.open(self.folder)
        found = config_of(run)
        for name, value in asdict(self.config).items():
            if name not in FREE and getattr(found, name) != value and name != "init_from":
                raise RunError(f"{self.folder} was run with {name} = {getattr(found, name)!r}, not {value!r}.")
        return run.finished

    def in_use(self) -> bool:
        """Whether another process is running it."""
        return RunDirectory(self.folder).in_use

    def arguments(self) -> list[str]:
        """What `spherenet` is to be called with: a new run, or the rest of one."""
        if (self.folder / "config.json").exists():
            return ["train", "--resume", str(self.folder)]
        return ["train", *command_line(self.config), "--output", str(self.folder)]


def selected(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells of these names, or of these rows or columns, with those they start from; all where none is named."""
    if not only:
        return list(cells)
    allowed = dict.fromkeys(word for cell in cells for word in (cell.name, cell.row, cell.column))
    for word in only:
        require_one_of("--only", word, allowed)
    names = {cell.name for cell in cells if {cell.name, cell.row, cell.column}.intersection(only)}
    names |= {cell.starts_from for cell in cells if cell.name in names and cell.starts_from}
    return [cell for cell in cells if cell.name in names]


def jobs_of(cells: Sequence[Cell], folder: Path, seeds: Sequence[int], **changes: Any) -> list[Job]:
    """The jobs of an experiment: seed by seed, so that a first whole table is there early. changes: of every config."""
    jobs = []
    for seed in seeds:
        for cell in cells:
            source = None if cell.starts_from is None else folder / cell.starts_from / f"seed-{seed}"
            config = replace(cell.config, seed=seed, init_from=None if source is None else str(source), **changes)
            jobs.append(Job(f"{cell.name} seed {seed}", folder / cell.name / f"seed-{seed}", config, source))
    return jobs


def describe_grid(experiment: Experiment, preset: str, folder: Path) -> None:
    """Write experiment.json: what a report needs to know besides the runs."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = experiment.cells(preset)
    write_json(
        folder / "experiment.json",
        {
            "format": FORMAT,
            "id": experiment.id,
            "title": experiment.title,
            "shows": experiment.shows,
            "preset": preset,
            "cells": [cell.described() for cell in cells],
            "claims": [asdict(claim) for claim in experiment.claims_of(cells)],
            "versions": {"spherenet": __version__, "python": platform.python_version()},
        },
    )
