"""Jobs of grids and of cross-validation: one run directory per cell and seed, or per setting and fold.

In OUTPUT/PRESET/ID of a grid, CELL/seed-0/ is a run directory, and CELL/seed-0.log is the output of that run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from spherenet.cli.plugin import as_number, require_one_of
from spherenet.errors import InvalidArgument, RunError
from spherenet.runs import RunDirectory
from spherenet.training import FREE, Choice, TrainConfig, config_of, option_name, require_valid_choices
from spherenet_paper.experiments.experiment import Cell

__all__ = [
    "Job",
    "Score",
    "best_score",
    "command_line",
    "create_jobs",
    "create_settings",
    "create_tuning_jobs",
    "read_score",
    "select_cells",
]


def command_line(config: TrainConfig) -> list[str]:
    """Return the options of `spherenet train` for a configuration: the operator, and all that are not the default."""
    options: list[str] = []
    keys: list[str] = []
    for option in fields(TrainConfig):
        value = getattr(config, option.name)
        if value == option.default and option.name != "operator":
            continue
        if option.metadata["tier"] == "file":
            keys.append(f"{option.name}={json.dumps(value)}")
        elif isinstance(value, bool):
            options.append(option_name(option.name) if value else option_name(f"no_{option.name}"))
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            options += [option_name(option.name), *("none" if entry is None else str(entry) for entry in values)]
    return [*options, "--set", *keys] if keys else options


@dataclass(frozen=True, eq=False)
class Job:
    """One training run of a grid.

    Attributes:
        name: Name in progress reports.
        folder: Run directory.
        config: Training configuration.
        after: Run directory of the job that must finish first, because this one starts from its weights.
    """

    name: str
    folder: Path
    config: TrainConfig
    after: Path | None = None

    @property
    def log(self) -> Path:
        """File for the output of the run."""
        return self.folder.with_suffix(".log")

    def is_done(self) -> bool:
        """Return whether the run is finished.

        Raises:
            RunError: The folder holds a run with other settings.
        """
        if not (self.folder / "config.json").exists():
            return False
        run = RunDirectory.open(self.folder)
        requested = run.config.get("requested")  # options that the run fitted to its data
        recorded = config_of(run).as_dict() | (requested if isinstance(requested, dict) else {})
        for name, value in asdict(self.config).items():
            if name not in FREE and name != "init_from" and recorded[name] != value:
                raise RunError(f"{self.folder} was run with {option_name(name)} {recorded[name]!r}, not {value!r}.")
        return run.finished

    def in_use(self) -> bool:
        """Return whether another process is running it."""
        return RunDirectory(self.folder).in_use

    def arguments(self) -> list[str]:
        """Return the arguments of `spherenet` that start the run or resume it."""
        if (self.folder / "config.json").exists():
            return ["train", "--resume", str(self.folder)]
        return ["train", *command_line(self.config), "--output", str(self.folder)]


def select_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells with these names, rows or columns and the cells they start from; all cells if `only` is empty.

    Raises:
        ValueError: An entry of `only` is not a name, row or column.
    """
    if not only:
        return list(cells)
    allowed = dict.fromkeys(label for cell in cells for label in (cell.name, cell.row, cell.column))
    for label in only:
        require_one_of("--only", label, allowed)
    names = {cell.name for cell in cells if {cell.name, cell.row, cell.column}.intersection(only)}
    names |= {cell.starts_from for cell in cells if cell.name in names and cell.starts_from}
    return [cell for cell in cells if cell.name in names]


def create_jobs(
    cells: Sequence[Cell],
    folder: Path,
    seeds: Sequence[int],
    *,
    engine: Literal["torch", "winograd"] = "torch",
    **changes: Any,
) -> list[Job]:
    """Return one job per cell and seed, ordered by seed so that a complete table exists early.

    Args:
        cells: Cells to run.
        folder: Folder of the experiment.
        seeds: Seeds of the runs.
        engine: Engine of the cells without sphere layers: "torch", or "winograd" as in sphere layers on CPUs.
        changes: Options of `TrainConfig` that replace those of every cell.
    """
    jobs = []
    for seed in seeds:
        for cell in cells:
            source = None if cell.starts_from is None else folder / cell.starts_from / f"seed-{seed}"
            config = replace(cell.config, seed=seed, init_from=None if source is None else str(source), **changes)
            if config.operator is None:
                config = replace(config, engine=engine)
            if config.data == "mnist5k":  # part of the package, also if other cells have a folder of data
                config = replace(config, data_dir=None)
            jobs.append(Job(f"{cell.name} seed {seed}", folder / cell.name / f"seed-{seed}", config, source))
    return jobs


@dataclass(frozen=True)
class Score:
    """A setting and its accuracies (fractions) on the finished folds."""

    name: str
    config: TrainConfig
    accuracies: list[float]

    @property
    def mean(self) -> float:
        """Mean accuracy over the finished folds."""
        return fmean(self.accuracies)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the finished folds, or None for a single fold."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


def create_settings(config: TrainConfig, operators: Sequence[str], losses: Sequence[str]) -> dict[str, TrainConfig]:
    """Return every combination of operators and losses, e.g. "sigmoid:k=0.3" and "s-cosine:s=10", by its name.

    Raises:
        ValueError: An operator or loss is unknown, or does not have its options.
    """
    settings: dict[str, TrainConfig] = {}
    for operator, loss in product(operators, losses):
        try:
            setting = replace(config, operator=operator, loss=loss)
            require_valid_choices(setting)
        except InvalidArgument as error:
            option = {"operator": "--try-operators", "loss": "--try-losses"}.get(error.argument, error.argument)
            raise InvalidArgument(option, error.problem) from None
        settings[f"{_label(setting.choice('operator'))}_{_label(setting.choice('loss'))}"] = setting
    return settings


def _label(choice: Choice) -> str:
    """Return the name of a folder for a name with options: sigmoid_k0.3."""
    return "_".join([choice.name, *(f"{key}{value}" for key, value in sorted(choice.options.items()))])


def create_tuning_jobs(settings: dict[str, TrainConfig], folder: Path, folds: int) -> list[Job]:
    """Return one job per setting and fold, ordered by fold so that every setting has a first number early."""
    return [
        Job(f"{name} fold {fold}", folder / name / f"fold-{fold}", replace(config, folds=folds, fold=fold))
        for fold in range(folds)
        for name, config in settings.items()
    ]


def read_score(name: str, config: TrainConfig, folder: Path, folds: int) -> Score:
    """Read the accuracies of the finished folds of a setting; folds that were run with other options do not count."""
    accuracies = []
    for job in create_tuning_jobs({name: config}, folder, folds):
        with suppress(RunError):  # not finished, corrupt, or run with other options
            if job.is_done():
                accuracies.append(as_number(RunDirectory.open(job.folder).summary.get("accuracy")))
    return Score(name, config, [accuracy for accuracy in accuracies if accuracy is not None])


def best_score(scores: Sequence[Score], folds: int) -> Score | None:
    """Return the score with the highest mean among those with all folds finished, or None if there is none."""
    complete = [score for score in scores if len(score.accuracies) == folds]
    return max(complete, key=lambda score: score.mean) if complete else None
