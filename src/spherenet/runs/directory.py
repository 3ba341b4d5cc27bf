"""One folder a run: config.json, metrics.jsonl, checkpoints/, and at the very end summary.json (SPEC 8)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spherenet.errors import CheckpointError, RunError, RunTakenError
from spherenet.files import (
    file_kind,
    is_temporary,
    make_folder,
    open_regular,
    read_json,
    remove,
    sync_folder,
    write_json,
)
from spherenet.runs.checkpoints import Checkpoint, Checkpoints, load_checkpoint
from spherenet.runs.metrics import MetricsFile

__all__ = ["Finding", "RunDirectory", "examine"]

_CONFIG, _SUMMARY, _LOCK = "config.json", "summary.json", ".lock"
_ROWS = "rows"

PATIENCE = 1.0
"""Seconds that a writer waits for a lock."""


def rows_before(state: Mapping[str, Any]) -> int:
    """How many rows of metrics there were when a checkpoint with this state was saved; 0 if it does not say."""
    rows = state.get(_ROWS)
    return rows if isinstance(rows, int) and not isinstance(rows, bool) else 0


def _entries(folder: Path, *, follow_links: bool = False) -> list[Path]:
    """What is in a folder; nothing if it is none, or if the run that is being trained has just removed it."""
    if not follow_links and file_kind(folder) != "a folder":
        return []
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def _is_free(handle: int) -> bool:
    """Whether nobody holds the lock of an open file; those who look at the same time do not disturb each other."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class RunDirectory:
    """A run's folder; make one with `create`, read one with `open`."""

    def __init__(self, path: Path) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._held: os.stat_result | None = None

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """Make a folder for a new run. RunError where there is something already, or it cannot be written."""
        folder = Path(path)
        if (folder / _CONFIG).exists():
            raise RunTakenError(f"{folder} holds a run already: give another --output, or --resume {folder}.")
        # The lock of a run that is just beginning, or what it left, is no reason to refuse.
        if folder.is_dir() and any(entry.name != _LOCK and not is_temporary(entry) for entry in folder.iterdir()):
            raise RunError(f"{folder} is not empty and not a run: give another --output.")
        try:
            make_folder(folder)
        except OSError as error:
            raise RunError(f"{folder} cannot be made ({error.strerror}).") from None
        return cls(folder)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open the folder of a run that exists.

        Raises RunError if it is none, or if it holds a link, a pipe or a device: a run is regular files and folders.
        """
        run = cls.find(path)
        if problem := next(run.foreign_entries(), None):
            raise RunError(problem)
        return run

    @classmethod
    def find(cls, path: str | Path) -> RunDirectory:
        """Open the folder of a run whatever else it holds, to examine it. RunError if it is none."""
        folder = Path(path)
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder.")
        if not os.path.lexists(folder / _CONFIG):
            raise RunError(f"{folder} is not a run: it has no {_CONFIG}.")
        return cls(folder)

    def foreign_entries(self) -> Iterator[str]:
        """Yield a sentence for each entry of the run that is neither a regular file nor a folder."""
        for folder in (self.path, self.checkpoints.folder, *_entries(self.checkpoints.folder)):
            for entry in _entries(folder, follow_links=folder == self.path):
                kind = file_kind(entry)
                if entry == self.checkpoints.folder and kind != "a folder":
                    yield f"{entry} must be a folder of its own, got {kind}."
                elif kind not in ("a regular file", "a folder", "nothing"):
                    yield f"{entry} must be a regular file or a folder, got {kind}."

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one writer; RunError where another process has it. A killed owner's lock is gone with it."""
        lock = FileLock(self.path / _LOCK)
        try:
            # Not at once: whoever looks whether a run is in use holds its lock for a moment.
            lock.acquire(timeout=PATIENCE, poll_interval=0.02)
            self._held = os.stat(self.path / _LOCK)
        except Timeout:
            raise RunTakenError(f"{self.path} is in use by another process.") from None
        except OSError as error:
            raise RunError(f"{self.path} is not writable ({error.strerror or error}).") from None
        try:
            yield
        finally:
            self._held = None
            lock.release()

    def require_held(self) -> None:
        """Raise RunError if the lock file was removed or replaced while it was held: another process may write now."""
        if self._held is None:
            return
        try:
            same = os.path.samestat(self._held, os.stat(self.path / _LOCK))
        except OSError:
            same = False
        if not same:
            raise RunError(
                f"{self.path / _LOCK} was removed while the run was in use, so that another process may write to it: "
                "nothing more is written."
            )

    @property
    def in_use(self) -> bool:
        """Whether another process writes to the run; nothing is made or changed to find out."""
        try:
            with open_regular(self.path / _LOCK) as file:
                return not _is_free(file.fileno())
        except OSError:  # never locked, or not readable
            return False

    def clean(self) -> None:
        """Remove what a killed process left half written; the caller holds the lock."""
        for entry in self.path.iterdir():
            if is_temporary(entry):
                remove(entry)
        self.checkpoints.remove_unfinished()

    @property
    def config(self) -> dict[str, Any]:
        """Everything needed to run it again; RunError where it is not readable."""
        return self._read(_CONFIG)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.json, the file that makes the folder a run."""
        write_json(self.path / _CONFIG, config)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return os.path.lexists(self.path / _SUMMARY)

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers; RunError where the run has not come to its end."""
        if not self.finished:
            raise RunError(f"{self.path} has not finished: it has no {_SUMMARY}.")
        return self._read(_SUMMARY)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to the metrics."""
        self.require_held()
        self.metrics.append(row)

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Save a checkpoint that knows how many rows of metrics came before it; they are on the disk first."""
        self.require_held()
        self.metrics.sync()
        state = {**checkpoint.state, _ROWS: len(self.metrics)}
        self.checkpoints.save(replace(checkpoint, state=state), best=best)

    def newest_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the checkpoint to resume from, None without one, and a sentence about each that was passed over.

        It is the newest valid one of which all rows of metrics are there: what came after it is made again. If rows
        are missing for all of them, the newest valid one, since weights are worth more than rows.
        """
        readable, problem = self.metrics.intact()
        newest: Checkpoint | None = None
        complaints: list[str] = []
        for path in reversed(self.checkpoints.paths()):
            try:
                found = load_checkpoint(path)
            except CheckpointError as error:
                complaints.append(str(error))
                continue
            rows = rows_before(found.state)
            if rows <= readable:
                return found, complaints
            newest = newest or found
            reason = f" ({problem.rstrip('.')})" if problem else ""
            complaints.append(f"{path} was saved after {rows} rows, {self.metrics.path} has {readable}{reason}.")
        return newest, complaints

    def cut_back(self, step: int) -> None:
        """Make the run what it was at a step: it is resumed from there, and makes what came after it again."""
        # First of all it is not finished: a power failure in between must not leave a summary of removed rows.
        self.remove_summary()
        self.metrics.cut_back(step)
        self.checkpoints.remove_after(step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, the last file of a run."""
        self.require_held()
        self.metrics.sync()
        write_json(self.path / _SUMMARY, summary)

    def remove_summary(self) -> None:
        """Forget that the run was finished: it goes on."""
        remove(self.path / _SUMMARY)
        sync_folder(self.path)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = read_json(self.path / name)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"{self.path / name} cannot be read ({reason}).") from None
        if not isinstance(value, dict):
            raise RunError(f"{self.path / name} is not a JSON object.")
        return value


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
