"""Runs on a Ray cluster: each job is a task that calls `spherenet` on the machine Ray gives it.

All machines must see the output folder and the data under the same paths (a shared file system).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from spherenet.experiments.runner import Here

__all__ = ["OnRay"]


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
