"""Running many jobs: finished ones are skipped, broken ones go on, a failing one does not stop the others.

Runs on a Ray cluster: each job is a task that calls `spherenet` on the machine Ray gives it.

All machines must see the output folder and the data under the same paths (a shared file system).
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

from spherenet.errors import RunError, SphereNetError
from spherenet.experiments.experiment import Job
from spherenet.files import open_regular
from spherenet.runs import MetricsFile

__all__ = ["GridReporter", "Here", "OnRay", "Result", "run_jobs", "visible_gpus"]

LONGEST_LINE = 1 << 16
"""Bytes at the end of a log in which its last line is looked for."""

Launch = Callable[[list[str], Path], int]
"""Runs `spherenet` with arguments somewhere, its words going to a file, and returns its exit code."""


@dataclass(frozen=True)
class Result:
    """What became of a job: None, or a sentence that says why it failed."""

    job: Job
    failure: str | None


class GridReporter:
    """Whoever watches a grid; every method does nothing unless overridden."""

    def started(self, jobs: Sequence[Job], done: int) -> None:
        """These jobs are to be run; so many more were done before."""

    def running(self, job: Job) -> None:
        """A job begins."""

    def ended(self, result: Result) -> None:
        """A job has ended."""

    def finished(self) -> None:
        """All have."""


class Here:
    """Launches runs as processes of this machine; `stop` asks those that run to save and leave."""

    def __init__(
        self, threads: int | None = None, processes: int = 1, gpus: Sequence[str] = (), at_once: int = 1
    ) -> None:
        """Keep what each run gets.

        threads: of its torch, unless OMP_NUM_THREADS says. processes: of the run, more than one under torchrun.
        gpus: names that are dealt out to the runs `at_once`, as many as a run has processes, some twice where they are
        too few.
        """
        self._threads, self._processes = threads, processes
        self._hands: SimpleQueue[dict[str, str]] = SimpleQueue()
        for first in range(0, at_once * processes, processes):
            hand = [gpus[position % len(gpus)] for position in range(first, first + processes) if gpus]
            self._hands.put({"CUDA_VISIBLE_DEVICES": ",".join(hand)} if hand else {})
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.stopped = False

    def __call__(self, arguments: list[str], log: Path) -> int:
        """Run `spherenet` and return its exit code."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._processes}"]
        command = [sys.executable, *(launcher if self._processes > 1 else []), "-m", "spherenet", *arguments]
        environment = dict(os.environ)
        if self._threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self._threads))
        log.parent.mkdir(parents=True, exist_ok=True)
        hand = self._hands.get()
        try:
            return self._run(command, {**environment, **hand}, log)
        finally:
            self._hands.put(hand)

    def _run(self, command: list[str], environment: dict[str, str], log: Path) -> int:
        with open(log, "ab") as words, self._lock:
            if self.stopped:
                return 128 + signal.SIGTERM
            process = subprocess.Popen(command, stdout=words, stderr=words, env=environment)  # noqa: S603
            self._running.add(process)
        try:
            # In pieces, so that an interrupt raised in this thread (Ray cancels tasks so) is noticed while waiting.
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=1)
        except BaseException:
            process.send_signal(signal.SIGTERM)  # it saves and leaves; a run must not outlive who waits for it
            process.wait()
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    def stop(self) -> None:
        """Ask every run to save and leave, and start no other."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def visible_gpus() -> list[str]:
    """The GPUs of this machine by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in given.split(",")] if given is not None else map(str, itertools.count())
    return list(itertools.islice(names, torch.cuda.device_count()))


def run_jobs(
    jobs: Sequence[Job],
    launch: Launch,
    workers: int,
    reporter: GridReporter | None = None,
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Run jobs, `workers` at a time, those first that wait for none; return what became of each, in their order.

    A job whose run is finished is not run again, one that another process runs is waited for until `stopped`, after
    which no other one starts. One that starts from another's weights fails where that one fails.
    """
    reporter = reporter or GridReporter()
    results: dict[Path, Result] = {}
    open_jobs: list[Job] = []
    for job in jobs:
        try:
            if job.is_done():
                results[job.folder] = Result(job, None)
            else:
                open_jobs.append(job)
        except SphereNetError as error:
            results[job.folder] = Result(job, str(error))
    reporter.started(open_jobs, len(jobs) - len(open_jobs))
    waiting = {job.folder: threading.Event() for job in open_jobs}

    def work(job: Job) -> Result:
        if job.after is not None and job.after in waiting:
            waiting[job.after].wait()
        source = results.get(job.after) if job.after is not None else None
        if source is not None and source.failure is not None:
            result = Result(job, f"{job.after}, which it starts from, failed.")
        elif stopped():
            result = Result(job, "the grid was stopped before it started.")
        else:
            reporter.running(job)
            result = Result(job, _failure(job, launch, stopped))
        results[job.folder] = result
        waiting[job.folder].set()
        return result

    # Those that others wait for come first: with one worker, nobody may wait for what has not been begun.
    ordered = sorted(open_jobs, key=lambda job: job.after is not None)
    try:
        with ThreadPoolExecutor(workers) as pool:
            futures: list[Future[Result]] = [pool.submit(work, job) for job in ordered]
            for future in as_completed(futures):
                reporter.ended(future.result())
    finally:
        reporter.finished()
    return [results[job.folder] for job in jobs]


def _failure(job: Job, launch: Launch, stopped: Callable[[], bool]) -> str | None:
    """Run a job; None where its run is then finished."""
    try:
        while True:
            code = launch(job.arguments(), job.log)
            if job.is_done():
                return None
            if not job.in_use():
                return f"exit code {code}: {_last_line(job.log)}"
            # A grid that was killed left its run behind, or another grid has it.
            while job.in_use():
                if stopped():
                    return f"{job.folder} is in use by another process."
                time.sleep(1)
    except (SphereNetError, OSError) as error:
        return str(error)


def _last_line(log: Path) -> str:
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            lines = file.read(LONGEST_LINE).decode(errors="replace").strip().splitlines()
    except OSError:
        return "it said nothing."
    return lines[-1] if lines else "it said nothing."


def steps_done(job: Job) -> int:
    """How far a running job is, by its metrics."""
    try:
        rows = MetricsFile(job.folder / "metrics.jsonl").read()
    except (RunError, OSError):
        return 0
    return int(rows[-1]["step"]) if rows else 0


class OnRay:
    """Launches runs as Ray tasks; `stop` asks those that run to save and leave."""

    def __init__(self, address: str, processes: int = 1, cpus: int = 1, gpus: int = 0) -> None:
        """address: of the cluster, "auto" for the one this machine belongs to, "local" for a new one on this machine.

        cpus, gpus: what Ray sets aside for each process of a run. Raises ValueError where Ray is not installed or the
        cluster is not to be reached.
        """
        try:
            import ray  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise ValueError("--ray needs the package ray: pip install 'spherenet[cluster]'.") from None
        self._ray: Any = ray
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._tasks: list[Any] = []
        try:
            ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ValueError(f"--ray {address!r} is not to be reached ({str(error).splitlines()[0]}).") from None
        resources = {"num_cpus": cpus * processes, "num_gpus": gpus * processes, "max_retries": 0}
        self._remote = self._ray.remote(**resources)(_run)
        self._processes = processes

    def __call__(self, arguments: list[str], log: Path) -> int:
        """Run `spherenet` on the cluster and return its exit code."""
        with self._lock:
            if self._stopped.is_set():
                return 128 + signal.SIGTERM
            task = self._remote.remote(arguments, str(Path(log).resolve()), os.getcwd(), self._processes)
            self._tasks.append(task)
        try:
            code: int = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            if self.stopped:
                return 128 + signal.SIGTERM
            raise OSError(f"Ray lost the run ({type(error).__name__}).") from None
        return code

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Interrupt every task, which asks its run to save and leave, and start no other."""
        with self._lock:
            self._stopped.set()
            tasks = list(self._tasks)
        for task in tasks:
            self._ray.cancel(task, force=False)

    def close(self) -> None:
        """Leave the cluster; a local one ends."""
        self._ray.shutdown()


def _run(arguments: list[str], log: str, folder: str, processes: int) -> int:
    """What a task does: relative paths mean what they meant where the grid was started."""
    os.chdir(folder)
    return Here(processes=processes)(arguments, Path(log))
