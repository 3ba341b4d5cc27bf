"""The folder of a run: config.json, metrics.jsonl, checkpoints/ and, when the run is complete, summary.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from spherenet._util.atomic import atomic_file, is_temporary, write_json
from spherenet._util.files import file_kind, make_folder, open_regular, read_json, remove, sync, to_json, user_path
from spherenet._util.text import is_utf8
from spherenet.errors import CheckpointError, RunError, RunTakenError
from spherenet.runs.checkpoints import Checkpoint, Checkpoints, load_checkpoint, write_tensors
from spherenet.runs.metrics import MetricsFile

__all__ = ["Finding", "RunDirectory", "examine"]

_CONFIG, _SUMMARY, _LOCK = "config.json", "summary.json", ".lock"
_ROWS = "rows"

LOCK_TIMEOUT = 1.0
"""Seconds that a writer waits for a lock."""


class RunDirectory:
    """Folder of a run. Use `create` for a new run and `open` for an existing one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._held_lock: os.stat_result | None = None
        self._config: tuple[tuple[int, int, int], dict[str, Any]] | None = None

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """Create the folder of a new run.

        Raises:
            RunTakenError: If the folder contains a run.
            RunError: If the folder contains other files, or cannot be created.
        """
        folder = user_path(path)
        if not is_utf8(folder):  # checkpoints could be written, but not read
            raise RunError(f"{folder} must be a path in UTF-8, because safetensors reads no others.")
        if (folder / _CONFIG).exists():
            raise RunTakenError(f"{folder} contains a run: use another --output, or --resume {folder}.")
        # The lock or temporary files of a run that is being created, or was killed then, are allowed.
        if folder.is_dir() and any(entry.name != _LOCK and not is_temporary(entry) for entry in folder.iterdir()):
            raise RunError(f"{folder} is not empty and not a run: use another --output.")
        try:
            make_folder(folder)
        except OSError as error:
            raise RunError(f"{folder} cannot be created ({error.strerror}).") from None
        return cls(folder)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open the folder of an existing run.

        Raises:
            RunError: If it is not a run, or if it contains anything but regular files and folders.
        """
        run = cls.find(path)
        if problem := next(run.foreign_entries(), None):
            raise RunError(problem)
        return run

    @classmethod
    def find(cls, path: str | Path) -> RunDirectory:
        """Open the folder of an existing run whatever else it contains. Raises RunError if it is not a run."""
        folder = user_path(path)
        if not folder.is_dir():
            raise RunError(f"{folder} is not a folder.")
        if not os.path.lexists(folder / _CONFIG):
            raise RunError(f"{folder} is not a run: it has no {_CONFIG}.")
        run = cls(folder)
        if (folder / "model.safetensors").is_file() and not os.path.lexists(run.checkpoints.folder):
            raise RunError(f"{folder} is an exported model, not a run; predict, embed, verify and demo read it.")
        return run

    def foreign_entries(self) -> Iterator[str]:
        """Yield an error message per entry of the run that is neither a regular file nor a folder."""
        for folder in (self.path, self.checkpoints.folder, *_entries(self.checkpoints.folder)):
            for entry in _entries(folder, follow_links=folder == self.path):
                kind = file_kind(entry)
                if entry == self.checkpoints.folder and kind != "a folder":
                    yield f"{entry} must be a folder, got {kind}."
                elif kind not in ("a regular file", "a folder", "nothing"):
                    yield f"{entry} must be a regular file or a folder, got {kind}."

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the run. The system releases the lock of a killed process.

        Raises:
            RunTakenError: If another process holds it.
            RunError: If the folder is not writable.
        """
        lock = FileLock(self.path / _LOCK)
        try:
            # With a timeout, because a process that checks `in_use` holds the lock for a moment.
            lock.acquire(timeout=LOCK_TIMEOUT, poll_interval=0.02)
            self._held_lock = os.stat(self.path / _LOCK)
        except Timeout:
            raise RunTakenError(f"{self.path} is in use by another process.") from None
        except OSError as error:
            raise RunError(f"{self.path} is not writable ({error.strerror or error}).") from None
        try:
            yield
        finally:
            self._held_lock = None
            lock.release()

    def require_lock(self) -> None:
        """Raise RunError if the held lock file was removed or replaced: another process may write to the run."""
        if self._held_lock is None:
            return
        try:
            same = os.path.samestat(self._held_lock, os.stat(self.path / _LOCK))
        except OSError:
            same = False
        if not same:
            raise RunError(
                f"{self.path / _LOCK} was removed while the run was in use: another process may write to the run, so "
                "this one stops."
            )

    @property
    def in_use(self) -> bool:
        """Whether another process holds the lock. Nothing is created or changed to find out."""
        try:
            with open_regular(self.path / _LOCK) as file:
                return not _is_unlocked(file.fileno())
        except OSError:  # never locked, or not readable
            return False

    def clean(self) -> None:
        """Remove unfinished files of killed processes. The caller holds the lock."""
        for entry in self.path.iterdir():
            if is_temporary(entry):
                remove(entry)
        self.checkpoints.remove_unfinished()

    def clean_finished(self) -> None:
        """Remove unfinished files of killed processes from a finished run, unless it is in use or not writable."""
        if any(map(is_temporary, (*_entries(self.path, follow_links=True), *_entries(self.checkpoints.folder)))):
            with suppress(RunError, OSError), self.locked():
                self.clean()

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json, which is read again only if the file has changed. Raises RunError if it cannot be."""
        try:
            status = os.lstat(self.path / _CONFIG)
        except OSError:
            return self._read(_CONFIG)
        version = status.st_ino, status.st_mtime_ns, status.st_size
        if self._config is None or self._config[0] != version:
            self._config = version, self._read(_CONFIG)
        return self._config[1]

    def write_config(self, config: Mapping[str, Any], before_replacing: Callable[[], None] = lambda: None) -> None:
        """Write config.json. A folder with this file is a run.

        `before_replacing` is called when the new file is complete and has not replaced the old one.
        """
        with atomic_file(self.path / _CONFIG) as file:
            file.write_text(to_json(config), encoding="utf-8")
            sync(file)
            before_replacing()

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return os.path.lexists(self.path / _SUMMARY)

    @property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json. Raises RunError if the run is not complete."""
        if not self.finished:
            raise RunError(f"{self.path} has not finished: it has no {_SUMMARY}.")
        return self._read(_SUMMARY)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row to the metrics."""
        self.require_lock()
        self.metrics.append(row)

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> None:
        """Save a checkpoint and the number of rows of metrics before it. The rows are synced to the disk first."""
        with self.saving(checkpoint.step, checkpoint.state, {}, best=best) as folder:
            write_tensors(checkpoint.tensors, folder)

    @contextmanager
    def saving(
        self, step: int, state: Mapping[str, Any], digests: Mapping[str, str], *, best: bool = False
    ) -> Iterator[Path]:
        """Yield a temporary folder for the files of a checkpoint; see `Checkpoints.writing`."""
        self.require_lock()
        self.metrics.sync()
        with self.checkpoints.writing(step, {**state, _ROWS: len(self.metrics)}, digests, best=best) as folder:
            yield folder

    def newest_checkpoint(self, *, shapes_only: bool = False) -> tuple[Checkpoint | None, list[str]]:
        """Return the checkpoint to resume from, None if there is none, and a message per newer one that is not used.

        It is the newest valid checkpoint for which no earlier row of metrics is missing, because later rows are
        computed again. If rows are missing for all of them, it is the newest valid one. With `shapes_only` it has
        tensors without values, on the meta device.
        """
        valid_rows, problem = self.metrics.count_valid()
        newest: Checkpoint | None = None
        messages: list[str] = []
        for path in reversed(self.checkpoints.paths()):
            try:
                checkpoint = load_checkpoint(path, shapes_only=shapes_only)
            except CheckpointError as error:
                messages.append(str(error))
                continue
            rows = _rows_before(checkpoint)
            if rows <= valid_rows:
                return checkpoint, messages
            newest = newest or checkpoint
            reason = f" ({problem.rstrip('.')})" if problem else ""
            messages.append(f"{path} was saved after {rows} rows, {self.metrics.path} has {valid_rows}{reason}.")
        return newest, messages

    def cut_back(self, step: int) -> None:
        """Restore the state of the run at a step, from which it is resumed."""
        # The summary first: after a power failure there must be no summary of removed rows.
        self.remove_summary()
        self.metrics.cut_back(step)
        self.checkpoints.remove_after(step)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, the last file of a run."""
        self.require_lock()
        self.metrics.sync()
        write_json(self.path / _SUMMARY, summary)

    def remove_summary(self) -> None:
        """Remove summary.json, because the run is resumed."""
        remove(self.path / _SUMMARY)
        sync(self.path)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = read_json(self.path / name)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RunError(f"{self.path / name} cannot be read ({reason}).") from None
        if not isinstance(value, dict):
            raise RunError(f"{self.path / name} is not a JSON object.")
        return value


def _rows_before(checkpoint: Checkpoint) -> int:
    """Return the number of rows of metrics when a checkpoint was saved, 0 if it is unknown."""
    rows = checkpoint.state.get(_ROWS)
    return rows if isinstance(rows, int) and not isinstance(rows, bool) else 0


def _entries(folder: Path, *, follow_links: bool = False) -> list[Path]:
    """Return the entries of a folder, none if it is missing or was just removed by a running process."""
    if not follow_links and file_kind(folder) != "a folder":
        return []
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir())
    return []


def _is_unlocked(handle: int) -> bool:
    """Return whether no process holds the lock of an open file. Concurrent checks do not disturb each other."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Finding:
    """Result of the examination of one file or folder of a run."""

    name: str
    valid: bool
    message: str


def examine(path: str | Path) -> list[Finding]:
    """Read every file of a run and return what is valid and what is not.

    Unfinished files of killed processes are valid: they are ignored, and removed when the run is resumed.

    Raises:
        RunError: If the folder is not a run.
    """
    run = RunDirectory.find(path)
    metrics = _examine("metrics.jsonl", lambda: _describe_rows(*run.metrics.last()))
    findings = [_examine("config.json", lambda: f"{len(run.config)} entries"), metrics]
    for message in run.foreign_entries():
        # The other files are read, and reported, in any case.
        if not any(f"/{name} must be" in message for name in ("config.json", "metrics.jsonl", "summary.json")):
            findings.append(Finding("entries", False, message))
    if file_kind(run.checkpoints.folder) not in ("a folder", "nothing"):
        return findings
    saved_rows, valid_steps = 0, 0
    for checkpoint_path in (*run.checkpoints.paths("step"), *run.checkpoints.paths("best")):
        name = f"checkpoints/{checkpoint_path.name}"
        try:
            checkpoint = load_checkpoint(checkpoint_path)
        except CheckpointError as error:
            findings.append(Finding(name, False, str(error)))
            continue
        size = sum(tensor.nbytes for group in checkpoint.tensors.values() for tensor in group.values())
        message = f"valid, {size / 2**20:.1f} MB in {', '.join(checkpoint.tensors)}"
        findings.append(Finding(name, True, message))
        saved_rows = max(saved_rows, _rows_before(checkpoint))
        valid_steps += checkpoint_path.name.startswith("step")
    if metrics.valid and saved_rows > len(run.metrics):
        message = f"has {len(run.metrics)} rows, but a checkpoint was saved after {saved_rows}"
        findings[1] = replace(metrics, valid=False, message=message)
    if not valid_steps:
        saved = bool(run.checkpoints.paths())
        none = "none, so the finished run cannot be evaluated or resumed" if run.finished else "none yet"
        findings.append(Finding("checkpoints", not saved, "none is valid" if saved else none))
    if run.finished:
        findings.append(_examine("summary.json", lambda: f"finished at iteration {run.summary.get('iterations')}"))
    else:
        findings.append(Finding("summary.json", True, "not finished"))
    findings.append(Finding("lock", True, "in use by another process" if run.in_use else "free"))
    entries = [entry for folder in (run.path, run.checkpoints.folder) if folder.is_dir() for entry in folder.iterdir()]
    if unfinished := sum(map(is_temporary, entries)):
        findings.append(Finding("unfinished", True, f"{unfinished} of a killed process, removed on resume"))
    return findings


def _examine(name: str, describe: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, describe())
    except RunError as error:
        return Finding(name, False, str(error))


def _describe_rows(count: int, last: dict[str, Any] | None) -> str:
    return f"{count} rows, the last of step {last['step']}" if last else "no rows yet"
