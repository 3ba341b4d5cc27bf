"""What a report knows of a run: its configuration and numbers, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spherenet.errors import RunError
from spherenet.runs import RunDirectory
from spherenet.text import as_number, plain

__all__ = ["Curve", "ReportedRun", "distinct_names", "how_made", "read_run"]


@dataclass(frozen=True)
class Curve:
    """A number over the iterations."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class ReportedRun:
    """A run by name, with what config.json, metrics.jsonl and summary.json say of it."""

    name: str
    path: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None

    def curve(self, split: str, quantity: str) -> Curve:
        """A quantity of a split over the iterations; rows without it are left out."""
        rows = [(row["step"], as_number(row.get(quantity))) for row in self.rows if row["split"] == split]
        points = [(step, value) for step, value in rows if value is not None]
        return Curve([step for step, _ in points], [value for _, value in points])

    def learned_k(self) -> dict[str, list[float]]:
        """The k that each layer's filters came to; nothing where k was not learned."""
        found = [row["k"] for row in self.rows if row["split"] == "observed" and isinstance(row.get("k"), dict)]
        if self.setting("operator") != "learnable" or not found:
            return {}
        layers = {layer: values for layer, values in found[-1].items() if isinstance(values, list)}
        return {layer: [k for k in map(as_number, values) if k is not None] for layer, values in layers.items()}

    def k_of_stages(self) -> dict[str, list[float]]:
        """The learned k of the first layer of each stage, which the paper looks at."""
        return {
            layer: values for layer, values in self.learned_k().items() if layer.endswith(".0.0") or "." not in layer
        }

    def setting(self, name: str) -> Any:
        """An option the run was trained with, None where it had none."""
        settings = self.config.get("train")
        return settings.get(name) if isinstance(settings, dict) else None


def read_run(path: str | Path) -> ReportedRun:
    """Read a run, finished or not; RunError where the folder is none or has no evaluation yet."""
    directory = RunDirectory.open(path)
    rows = directory.metrics.read()
    summary = directory.summary if directory.finished else None
    run = ReportedRun(directory.path.resolve().name, str(path), directory.config, rows, summary)
    if not run.curve("test", "accuracy").values:
        raise RunError(f"{directory.path} has no evaluation yet.")
    return run


def distinct_names(runs: Sequence[ReportedRun]) -> list[str]:
    """A name for each run: its folder's, with the parents where those are the same."""
    names = [run.name for run in runs]
    return [run.path if names.count(run.name) > 1 else run.name for run in runs]


def how_made(run: ReportedRun) -> str:
    """The command of a run, and what it ran on."""
    command = run.config.get("command")
    words = plain(" ".join(map(str, command))) if isinstance(command, list) else ""
    parts = {**_dict(run.config.get("versions")), **_dict(run.config.get("hardware"))}
    return f"{words} ({', '.join(f'{name} {value}' for name, value in parts.items())})"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
