"""An experiment as jobs on a disk: a folder for each cell and seed, and what is to be run to fill it.

OUTPUT/PRESET/ID/experiment.json          the cells with the paper's values, the claims
OUTPUT/PRESET/ID/CELL/seed-0/             a run (SPEC 8), with seed-0.log beside it
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spherenet import __version__
from spherenet.errors import RunError
from spherenet.experiments.cells import Cell, Experiment, command_line
from spherenet.experiments.config import FREE, TrainConfig
from spherenet.experiments.saved_runs import config_of
from spherenet.ops.arguments import require_one_of
from spherenet.runlog import RunDirectory
from spherenet.runlog.atomic import write_json

__all__ = ["Job", "describe_grid", "jobs_of", "selected"]

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
