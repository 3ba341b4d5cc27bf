"""Runs as reports read them: their configuration, metrics and summary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spherenet._util.text import as_number, plain
from spherenet.errors import RunError
from spherenet.runs import RunDirectory

__all__ = ["Curve", "ReportedRun", "command_and_details", "distinct_names", "provenance", "read_run"]


@dataclass(frozen=True)
class Curve:
    """A quantity over the iterations."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class ReportedRun:
    """The content of config.json, metrics.jsonl and summary.json of a run; `summary` is None if it is not finished."""

    name: str
    path: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    def curve(self, split: str, quantity: str, protocol: str | None = None) -> Curve:
        """Return a quantity of a split over the iterations, without the rows that do not have it.

        Args:
            split: "train", "test" or "probes".
            quantity: Key of the rows.
            protocol: BatchNorm statistics of the evaluations; None for the first ones that the run names.
        """
        rows = [(row["step"], as_number(row.get(quantity))) for row in self.rows_of(split, protocol)]
        points = [(step, value) for step, value in rows if value is not None]
        return Curve([step for step, _ in points], [value for _, value in points])

    def rows_of(self, split: str, protocol: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of a split. Rows without a protocol belong to all of them."""
        protocol = protocol or self.protocols()[0]
        return [row for row in self.rows if row["split"] == split and row.get("protocol", protocol) == protocol]

    def protocols(self) -> list[str]:
        """Return the BatchNorm statistics of the evaluations, the primary ones first."""
        names = self.setting("bn_eval")
        return [str(name) for name in names] if isinstance(names, list) and names else ["running"]

    def learned_k(self) -> dict[str, list[float]]:
        """Return the final k of the filters of each layer, or an empty dictionary if k was not learned."""
        probed = [row["k"] for row in self.rows if row["split"] == "probes" and isinstance(row.get("k"), dict)]
        if not str(self.setting("operator")).startswith("learnable") or not probed:
            return {}
        layers = {layer: values for layer, values in probed[-1].items() if isinstance(values, list)}
        return {layer: [k for k in map(as_number, values) if k is not None] for layer, values in layers.items()}

    def learned_k_of_stages(self) -> dict[str, list[float]]:
        """Return the final k of the first layer of each stage, as in the paper's figure."""
        return {
            layer: values for layer, values in self.learned_k().items() if layer.endswith(".0.0") or "." not in layer
        }

    def setting(self, name: str) -> Any:
        """Return an option of the training configuration, or None if it is missing."""
        return _dict(self.config.get("train")).get(name)


def read_run(path: str | Path) -> ReportedRun:
    """Read a run, finished or not.

    Raises:
        RunError: The folder is not a run, or it has no evaluation yet.
    """
    directory = RunDirectory.open(path)
    rows = directory.metrics.read()
    summary = directory.summary if directory.finished else None
    run = ReportedRun(directory.path.resolve().name, str(path), directory.config, rows, summary)
    if not run.curve("test", "accuracy").values:
        raise RunError(f"{directory.path} has no evaluation yet.")
    return run


def distinct_names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the folder name of each run, or its path if several runs have the same folder name."""
    names = [run.name for run in runs]
    return [run.path if names.count(run.name) > 1 else run.name for run in runs]


def provenance(run: ReportedRun) -> str:
    """Return the command of a run, and those that resumed it with changes, with its versions and hardware."""
    return "{} ({})".format(*command_and_details(run))


def command_and_details(run: ReportedRun) -> tuple[str, str]:
    """Return the command of a run with those that resumed it with changes, and its versions and hardware.

    The operator is added to a command that does not state it, because its default differs between versions.
    """
    recorded = run.config.get("command")
    command = [str(word) for word in recorded] if isinstance(recorded, list) else []
    operator = run.setting("operator")
    if command[1:2] == ["train"] and not {"--operator", "--resume", "--config"}.intersection(command):
        command[2:2] = ["--operator", "none" if operator is None else str(operator).partition(":")[0]]
    details = {**_dict(run.config.get("versions")), **_dict(run.config.get("hardware"))}
    history = run.config.get("history")
    entries = [_dict(entry) for entry in history[1:]] if isinstance(history, list) else []
    changes = [str(entry.get("command")) for entry in entries if entry.get("changes")]
    shown = ", ".join(f"{name} {value}" for name, value in details.items())
    return plain("; ".join([shlex.join(command), *changes])), shown


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
