"""What a report knows of a run: its configuration and numbers, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spherenet.errors import RunError
from spherenet.runlog import RunDirectory

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
        rows = [row for row in self.rows if row["split"] == split and isinstance(row.get(quantity), (int, float))]
        return Curve([row["step"] for row in rows], [float(row[quantity]) for row in rows])

    def learned_k(self) -> dict[str, list[float]]:
        """The k that each layer's filters came to; nothing where k was not learned."""
        found = [row["k"] for row in self.rows if row["split"] == "observed" and isinstance(row.get("k"), dict)]
        if self.setting("operator") != "learnable" or not found:
            return {}
        return {layer: values for layer, values in found[-1].items() if isinstance(values, list)}

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
    if not any(row["split"] == "test" for row in rows):
        raise RunError(f"{directory.path} has no evaluation yet.")
    summary = directory.summary if directory.finished else None
    return ReportedRun(directory.path.resolve().name, str(path), directory.config, rows, summary)


def distinct_names(runs: Sequence[ReportedRun]) -> list[str]:
    """A name for each run: its folder's, with the parents where those are the same."""
    names = [run.name for run in runs]
    return [run.path if names.count(run.name) > 1 else run.name for run in runs]


def how_made(run: ReportedRun) -> str:
    """The command of a run, and what it ran on."""
    command = run.config.get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else ""
    parts = {**_dict(run.config.get("versions")), **_dict(run.config.get("hardware"))}
    return f"{words} ({', '.join(f'{name} {value}' for name, value in parts.items())})"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
