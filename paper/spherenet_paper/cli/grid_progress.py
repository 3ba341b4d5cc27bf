"""Progress of a grid of runs: one bar for the grid and one per active run in a terminal, lines in a log."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spherenet.cli.plugin import plain
from spherenet_paper.experiments.jobs import Job
from spherenet_paper.experiments.runner import GridReporter, LocalLauncher, Result, run_jobs, steps_done

if TYPE_CHECKING:
    from spherenet_paper.experiments.runner import RayLauncher

__all__ = ["run_watched"]


def run_watched(title: str, jobs: Sequence[Job], launch: LocalLauncher | RayLauncher, workers: int) -> list[Result]:
    """Run jobs and report progress on stderr: progress bars in a terminal, else lines.

    On Ctrl-C, SIGTERM and SIGHUP the runs save a checkpoint and stop, and `launch.stopped` is set.

    Args:
        title: Title of the grid.
        jobs: Runs of the grid.
        launch: Launcher of the runs.
        workers: Number of runs at a time.
    """
    previous = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            previous[number] = signal.signal(number, lambda *_: launch.stop())
    reporter = _ProgressBars(title) if sys.stderr.isatty() else _LogLines(title)
    try:
        return run_jobs(jobs, launch, workers, reporter, stopped=lambda: launch.stopped)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _IterationCounter(GridReporter):
    """Count the iterations of all jobs, for the remaining time."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.active: dict[Job, int] = {}
        self.lock = threading.Lock()

    def started(self, jobs: Sequence[Job], done: int) -> None:
        self.total = sum(job.config.iterations for job in jobs)
        self.jobs_left, self.jobs_before = len(jobs), done
        self.ended_steps = 0
        self.start_time = time.monotonic()

    def running(self, job: Job) -> None:
        with self.lock:
            self.active[job] = steps_done(job)
            self.ended_steps -= self.active[job]  # steps of an earlier session do not count for the speed
            self.total -= self.active[job]

    def ended(self, result: Result) -> None:
        with self.lock:
            if result.job in self.active:
                del self.active[result.job]
            self.ended_steps += result.job.config.iterations
            self.jobs_left -= 1

    def steps(self) -> int:
        with self.lock:
            running = list(self.active)
        return self.ended_steps + sum(steps_done(job) for job in running)

    def seconds_left(self) -> float | None:
        steps = self.steps()
        if steps <= 0:
            return None
        return (self.total - steps) * (time.monotonic() - self.start_time) / steps


class _LogLines(_IterationCounter):
    """Print a line when a run starts and when it ends."""

    def started(self, jobs: Sequence[Job], done: int) -> None:
        super().started(jobs, done)
        self._print(f"{_runs(len(jobs))} to do, {done} done before")

    def running(self, job: Job) -> None:
        super().running(job)
        self._print(f"{job.name}: started")

    def ended(self, result: Result) -> None:
        super().ended(result)
        left = self.seconds_left()
        when = "" if left is None else f", about {left / 60:.0f} min"
        prefix = "" if result.stopped else "failed: "
        outcome = "done" if result.failure is None else f"{prefix}{result.failure.rstrip('.')}"
        self._print(f"{result.job.name}: {outcome}; {_runs(self.jobs_left)}{when} left")

    def _print(self, line: str) -> None:
        # One write per line, because lines of two threads would be mixed otherwise.
        with suppress(OSError):  # the terminal is closed; the grid continues
            sys.stderr.write(f"{self.title}  {plain(line)}\n")
            sys.stderr.flush()


class _ProgressBars(_IterationCounter):
    """Progress bars for the grid and for each active run, read from the metrics of the runs."""

    def started(self, jobs: Sequence[Job], done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        super().started(jobs, done)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._grid_task = self._bars.add_task(self._description(), total=max(1, self.total))
        self._tasks: dict[Job, Any] = {}
        self._bars.start()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _description(self) -> str:
        return f"{self.title}: {_runs(self.jobs_left)} left"

    def running(self, job: Job) -> None:
        super().running(job)
        self._tasks[job] = self._bars.add_task(f"  {job.name}", total=job.config.iterations)

    def ended(self, result: Result) -> None:
        super().ended(result)
        if result.job in self._tasks:
            self._bars.remove_task(self._tasks.pop(result.job))
        if result.failure is not None:
            message = plain(f"{result.job.name} failed: {result.failure}")
            self._bars.console.print(message, highlight=False, markup=False)
        self._bars.update(self._grid_task, description=self._description())

    def finished(self) -> None:
        self._ended.set()
        self._watcher.join()
        self._bars.stop()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            for job, task in list(self._tasks.items()):
                self._bars.update(task, completed=steps_done(job))
            self._bars.update(self._grid_task, completed=self.steps(), total=max(1, self.total))


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
