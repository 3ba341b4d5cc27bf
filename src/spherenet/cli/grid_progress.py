"""What a person sees of a grid of runs: one bar for all and one for each that runs; plain lines in a log."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spherenet.experiments.experiment import Job
from spherenet.experiments.runner import GridReporter, Here, Result, run_jobs, steps_done
from spherenet.text import plain

if TYPE_CHECKING:
    from spherenet.experiments.runner import OnRay

__all__ = ["run_watched"]


def run_watched(what: str, jobs: Sequence[Job], launch: Here | OnRay, workers: int) -> list[Result]:
    """Run jobs with bars on stderr where that is a terminal, else with plain lines there.

    Ctrl-C and SIGTERM ask the runs to save and leave; `launch.stopped` then says so.
    """
    before = {number: signal.signal(number, lambda *_: launch.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    reporter = _Bars(what) if sys.stderr.isatty() else _Lines(what)
    try:
        return run_jobs(jobs, launch, workers, reporter, stopped=lambda: launch.stopped)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Counting(GridReporter):
    """Counts iterations, done and left, over all jobs."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.active: dict[Job, int] = {}
        self.lock = threading.Lock()

    def started(self, jobs: Sequence[Job], done: int) -> None:
        self.total = sum(job.config.iterations for job in jobs)
        self.jobs_left, self.jobs_before = len(jobs), done
        self.ended_steps = 0
        self.began = time.monotonic()

    def running(self, job: Job) -> None:
        with self.lock:
            self.active[job] = steps_done(job)
            self.ended_steps -= self.active[job]  # done in an earlier session: no measure of this one's speed
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
        return (self.total - steps) * (time.monotonic() - self.began) / steps


class _Lines(_Counting):
    """A line when a run begins and when it ends."""

    def started(self, jobs: Sequence[Job], done: int) -> None:
        super().started(jobs, done)
        self._print(f"{len(jobs)} runs to make, {done} done before")

    def running(self, job: Job) -> None:
        super().running(job)
        self._print(f"{job.name}: begins")

    def ended(self, result: Result) -> None:
        super().ended(result)
        left = self.seconds_left()
        when = "" if left is None else f", about {left / 60:.0f} min"
        outcome = "done" if result.failure is None else f"failed: {result.failure}"
        self._print(f"{result.job.name}: {outcome}; {self.jobs_left} runs{when} left")

    def _print(self, line: str) -> None:
        # One write a line: two threads would put their ends of lines behind each other's words.
        with suppress(OSError):  # nobody reads it any more; the grid goes on
            sys.stderr.write(f"{self.what}  {plain(line)}\n")
            sys.stderr.flush()


class _Bars(_Counting):
    """A bar for the whole grid and one for each run, read from the runs' metrics."""

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
        self._whole = self._bars.add_task(self._title(), total=max(1, self.total))
        self._tasks: dict[Job, Any] = {}
        self._bars.start()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _title(self) -> str:
        return f"{self.what}: {self.jobs_left} runs left"

    def running(self, job: Job) -> None:
        super().running(job)
        self._tasks[job] = self._bars.add_task(f"  {job.name}", total=job.config.iterations)

    def ended(self, result: Result) -> None:
        super().ended(result)
        if result.job in self._tasks:
            self._bars.remove_task(self._tasks.pop(result.job))
        if result.failure is not None:
            sentence = plain(f"{result.job.name} failed: {result.failure}")
            self._bars.console.print(sentence, highlight=False, markup=False)
        self._bars.update(self._whole, description=self._title())

    def finished(self) -> None:
        self._over.set()
        self._watcher.join()
        self._bars.stop()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            for job, task in list(self._tasks.items()):
                self._bars.update(task, completed=steps_done(job))
            self._bars.update(self._whole, completed=self.steps(), total=max(1, self.total))
