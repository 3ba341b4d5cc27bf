"""One folder a run: config.json, metrics.jsonl, checkpoints/, and at the very end summary.json (SPEC 8)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spherenet.errors import CheckpointError, RunError, RunTakenError
from spherenet.files import file_kind, make_folder, open_regular, sync_folder
from spherenet.runlog.atomic import is_temporary, read_json, remove, write_json
from spherenet.runlog.checkpoints import Checkpoint, Checkpoints, load_checkpoint
from spherenet.runlog.metrics import MetricsFile

__all__ = ["RunDirectory"]

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
