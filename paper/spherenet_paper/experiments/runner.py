"""Run grids of jobs on this machine or on a Ray cluster.

Finished jobs are skipped, interrupted jobs are resumed, and a failing job does not stop the others. On a Ray cluster
all machines must see the output folder and the data under the same paths (a shared file system).
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from spherenet.cli.plugin import APPEND, first_line, open_handle, open_regular
from spherenet.errors import InvalidArgument, RunError, SphereNetError, require_extra
from spherenet.runs import Checkpoints, MetricsFile
from spherenet_paper.experiments.jobs import Job

__all__ = [
    "GridReporter",
    "Launcher",
    "LocalLauncher",
    "RayLauncher",
    "Result",
    "run_jobs",
    "steps_done",
    "stop_summary",
    "visible_gpus",
]

LONGEST_LINE = 1 << 16
"""Number of bytes at the end of a log that are searched for its last line."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a run that was stopped."""

ERRORS = (2, 70)
"""Exit codes of wrong input and internal errors, which no signal causes."""

Launcher = Callable[[list[str], Path], int]
"""Run `spherenet` with arguments, write its output to a file, and return its exit code."""


@dataclass(frozen=True)
class Result:
    """The outcome of a job.

    Attributes:
        job: The job.
        failure: None if its run is finished, else a sentence with the reason.
        stopped: Whether the reason is that the grid was stopped.
    """

    job: Job
    failure: str | None
    stopped: bool = False


class GridReporter:
    """Callbacks for the progress of a grid; the methods of this base class do nothing."""

    def started(self, jobs: Sequence[Job], done: int) -> None:
        """Handle the start of a grid: these jobs remain, and `done` others were finished before."""

    def running(self, job: Job) -> None:
        """Handle the start of a job."""

    def ended(self, result: Result) -> None:
        """Handle the end of a job."""

    def finished(self) -> None:
        """Handle the end of the grid."""


class LocalLauncher:
    """Launch runs as processes on this machine.

    Args:
        threads: Threads of torch in each run, unless OMP_NUM_THREADS is set.
        processes: Processes per run; more than one uses torchrun.
        gpus: GPU names, distributed over the runs: as many per run as it has processes, shared if there are too few.
        at_once: Number of runs at a time.
    """

    def __init__(
        self, threads: int | None = None, processes: int = 1, gpus: Sequence[str] = (), at_once: int = 1
    ) -> None:
        self._threads, self._processes = threads, processes
        self._devices: SimpleQueue[dict[str, str]] = SimpleQueue()
        for first in range(0, at_once * processes, processes):
            names = [gpus[position % len(gpus)] for position in range(first, first + processes) if gpus]
            self._devices.put({"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {})
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()  # a second signal may call `stop` inside `stop`
        self.stopped = False

    def __call__(self, arguments: list[str], log: Path) -> int:
        """Run `spherenet` and return its exit code."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._processes}"]
        command = [sys.executable, *(torchrun if self._processes > 1 else []), "-m", "spherenet", *arguments]
        environment = dict(os.environ)
        if self._threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self._threads))
        log.parent.mkdir(parents=True, exist_ok=True)
        devices = self._devices.get()
        try:
            return self._run(command, {**environment, **devices}, log)
        finally:
            self._devices.put(devices)

    def _run(self, command: list[str], environment: dict[str, str], log: Path) -> int:
        with os.fdopen(open_handle(log, APPEND), "ab") as output, self._lock:
            if self.stopped:
                return TERMINATED
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603
            self._running.add(process)
        try:
            # Wait with a timeout, so that an exception raised in this thread (a canceled Ray task) is noticed.
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=1)
        except BaseException:
            process.send_signal(signal.SIGTERM)  # the run saves a checkpoint and exits
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    def stop(self) -> None:
        """Send SIGTERM to every run, which then saves a checkpoint and exits, and start no other run."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def visible_gpus() -> list[str]:
    """Return the GPUs of this machine by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible is not None else map(str, itertools.count())
    return list(itertools.islice(names, torch.cuda.device_count()))


def run_jobs(
    jobs: Sequence[Job],
    launch: Launcher,
    workers: int,
    reporter: GridReporter | None = None,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Run jobs, `workers` at a time, and return their results in order.

    A finished job is not run again. A job that another process runs is waited for. A job that starts from the weights
    of another one runs after it and fails if that one fails. When `stopped()` becomes true, no further job starts.

    Args:
        jobs: Jobs of the grid.
        launch: Launcher of a single run.
        workers: Number of jobs at a time.
        reporter: Receiver of progress callbacks.
        stopped: Function that returns whether the grid was interrupted.
    """
    reporter = reporter or GridReporter()
    results: dict[Path, Result] = {}
    remaining: list[Job] = []
    for job in jobs:
        try:
            if job.is_done():
                results[job.folder] = Result(job, None)
            else:
                remaining.append(job)
        except SphereNetError as error:
            results[job.folder] = Result(job, str(error))
    reporter.started(remaining, len(jobs) - len(remaining))
    ended = {job.folder: threading.Event() for job in remaining}

    def work(job: Job) -> Result:
        if job.after is not None and job.after in ended:
            ended[job.after].wait()
        source = results.get(job.after) if job.after is not None else None
        if source is not None and source.failure is not None:
            result = Result(job, f"{job.after}, which it starts from, failed.")
        elif stopped():
            result = Result(job, "the grid was stopped before it started.", stopped=True)
        else:
            reporter.running(job)
            result = _run_job(job, launch, stopped)
        results[job.folder] = result
        ended[job.folder].set()
        return result

    # Jobs without a source come first, so that a single worker never waits for a job that has not started.
    ordered = sorted(remaining, key=lambda job: job.after is not None)
    try:
        with ThreadPoolExecutor(workers) as pool:
            futures: list[Future[Result]] = [pool.submit(work, job) for job in ordered]
            for future in as_completed(futures):
                reporter.ended(future.result())
    finally:
        reporter.finished()
    return [results[job.folder] for job in jobs]


def _run_job(job: Job, launch: Launcher, stopped: Callable[[], bool]) -> Result:
    """Run a job and return its result."""
    try:
        while True:
            code = launch(job.arguments(), job.log)
            if job.is_done():
                return Result(job, None)
            if not job.in_use():
                if stopped() and code not in ERRORS:
                    return Result(job, f"stopped at step {_saved_step(job)}.", stopped=True)
                return Result(job, f"exit code {code}: {_last_line(job.log)}")
            # The run belongs to another grid, or to one that was killed and left it running.
            while job.in_use():
                if stopped():
                    return Result(job, f"{job.folder} is in use by another process.", stopped=True)
                time.sleep(1)
    except (SphereNetError, OSError) as error:
        return Result(job, str(error))


def stop_summary(results: Sequence[Result]) -> str:
    """Return how many runs of a stopped grid are done, stopped, not started and failed."""
    stopped = [result for result in results if result.stopped]
    started = sum((result.job.folder / "config.json").exists() for result in stopped)
    done = sum(result.failure is None for result in results)
    text = f"{done} of {len(results)} runs done, {started} stopped, {len(stopped) - started} not started"
    failed = len(results) - done - len(stopped)
    return f"{text}, {failed} failed" if failed else text


def _last_line(log: Path) -> str:
    lines: list[str] = []
    with suppress(OSError), open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
        lines = file.read(LONGEST_LINE).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing."


def steps_done(job: Job) -> int:
    """Return the last iteration in the metrics of a job."""
    try:
        last = MetricsFile(job.folder / "metrics.jsonl").tail()
    except (RunError, OSError):
        return 0
    return int(last["step"]) if last else 0


def _saved_step(job: Job) -> int:
    """Return the step of the last checkpoint of a job, from which it is resumed."""
    return max(Checkpoints(job.folder / "checkpoints").steps(up_to=job.config.iterations), default=0)


class RayLauncher:
    """Launch runs as tasks on a Ray cluster.

    Args:
        address: Address of the cluster, "auto" for the cluster of this machine, "local" for a new one on this machine.
        processes: Processes per run; more than one uses torchrun.
        cpus: CPUs that Ray reserves per process.
        gpus: GPUs that Ray reserves per process.

    Raises:
        MissingExtraError: Ray is not installed.
        ValueError: The cluster is not reachable.
    """

    def __init__(self, address: str, processes: int = 1, cpus: int = 1, gpus: int = 0) -> None:
        ray: Any = require_extra("cluster", "ray")
        self._ray = ray
        self._stopped = threading.Event()  # `stop` is called from another thread
        self._lock = threading.RLock()  # as in LocalLauncher
        self._tasks: list[Any] = []
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = first_line(error)
            raise InvalidArgument(
                "--ray", f"must be the address of a running cluster, got {address!r} ({reason})."
            ) from None
        resources = {"num_cpus": cpus * processes, "num_gpus": gpus * processes, "max_retries": 0}
        self._remote = self._ray.remote(**resources)(_run_task)
        self._processes = processes

    def __call__(self, arguments: list[str], log: Path) -> int:
        """Run `spherenet` on the cluster and return its exit code."""
        with self._lock:
            if self._stopped.is_set():
                return TERMINATED
            task = self._remote.remote(arguments, str(Path(log).resolve()), os.getcwd(), self._processes)
            self._tasks.append(task)
        try:
            code: int = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            if self.stopped:
                return TERMINATED
            raise OSError(f"Ray lost the run ({type(error).__name__}).") from None
        return code

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Cancel every task, whose run then saves a checkpoint and exits, and start no other run."""
        with self._lock:
            self._stopped.set()
            tasks = list(self._tasks)
        for task in tasks:
            self._ray.cancel(task, force=False)


def _run_task(arguments: list[str], log: str, folder: str, processes: int) -> int:
    """Run `spherenet` on a machine of the cluster, in the folder that the grid was started in."""
    os.chdir(folder)
    return LocalLauncher(processes=processes)(arguments, Path(log))
