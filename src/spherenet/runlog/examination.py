"""What is whole in a run's folder and what is not; it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spherenet.errors import CheckpointError, RunError
from spherenet.runlog.atomic import is_temporary
from spherenet.runlog.checkpoints import load_checkpoint
from spherenet.runlog.directory import RunDirectory, rows_before

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """One part of a run: is it as it should be, and what is to be said of it."""

    part: str
    good: bool
    words: str


def examine(path: str | Path) -> list[Finding]:
    """Read every file of a run as a reader would; RunError where the folder is no run at all.

    Left-overs of a killed process are no fault: they are ignored, and removed when the run goes on.
    """
    run = RunDirectory.find(path)
    found = [_read("config.json", lambda: f"{len(run.config)} entries")]
    metrics = _metrics(run)
    found.append(metrics)
    named = (*(part.part for part in found), "summary.json")
    for sentence in run.foreign_entries():
        if not any(f"/{name} must be" in sentence for name in named):  # those are read, and named, anyway
            found.append(Finding("entries", False, sentence))
    if any("must be a folder of its own" in part.words for part in found):
        return found
    saved_rows = 0
    for kind in ("step", "best"):
        for path in run.checkpoints.paths(kind):
            finding, rows = _checkpoint(path)
            found.append(finding)
            saved_rows = max(saved_rows, rows)
    if metrics.good and saved_rows > len(run.metrics):
        lost = f"has {len(run.metrics)} rows, but a checkpoint was saved after {saved_rows}"
        found[found.index(metrics)] = Finding(metrics.part, False, lost)
    newest = next((part for part in reversed(found) if part.part.startswith("checkpoints/step") and part.good), None)
    if newest is None:
        begun = bool(run.checkpoints.paths())
        found.append(Finding("checkpoints", not begun, "none is whole" if begun else "none yet"))
    found.append(
        _read("summary.json", lambda: f"finished at iteration {run.summary.get('iterations')}")
        if run.finished
        else Finding("summary.json", True, "not finished")
    )
    found.append(_lock(run))
    left = [entry for folder in (run.path, run.checkpoints.folder) if folder.is_dir() for entry in folder.iterdir()]
    unfinished = [entry.name for entry in left if is_temporary(entry)]
    if unfinished:
        found.append(
            Finding("left-overs", True, f"{len(unfinished)} of a killed process, removed when the run goes on")
        )
    return found


def _read(part: str, describe: Callable[[], str]) -> Finding:
    try:
        return Finding(part, True, describe())
    except RunError as error:
        return Finding(part, False, str(error))


def _metrics(run: RunDirectory) -> Finding:
    try:
        rows = run.metrics.read()
    except RunError as error:
        return Finding("metrics.jsonl", False, str(error))
    return Finding(
        "metrics.jsonl", True, f"{len(rows)} rows, the last of step {rows[-1]['step']}" if rows else "no rows yet"
    )


def _checkpoint(path: Path) -> tuple[Finding, int]:
    """What is to be said of a checkpoint, and how many rows of metrics it was saved after."""
    part = f"checkpoints/{path.name}"
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError as error:
        return Finding(part, False, str(error)), 0
    tensors = checkpoint.tensors
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    return Finding(part, True, f"whole, {size / 2**20:.1f} MB in {', '.join(tensors)}"), rows_before(checkpoint.state)


def _lock(run: RunDirectory) -> Finding:
    return Finding("lock", True, f"{run.path} is in use by another process." if run.in_use else "free")
