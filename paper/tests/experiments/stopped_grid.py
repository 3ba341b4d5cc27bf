"""Run a grid of long runs that a test interrupts: `stopped_grid.py FOLDER local|torchrun|ray JOBS`."""

import sys
from pathlib import Path

from spherenet.training import TrainConfig
from spherenet_paper.cli.grid_progress import run_watched
from spherenet_paper.experiments.jobs import Job
from spherenet_paper.experiments.runner import LocalLauncher


def main(folder, launcher, jobs):
    config = TrainConfig(
        widths=[4, 4, 4], batch_size=32, iterations=1_000_000, log_every=1, eval_every=500_000, threads=1, probes=False
    )
    if launcher == "ray":
        from spherenet_paper.experiments.runner import RayLauncher

        launch = RayLauncher("local")
    else:
        launch = LocalLauncher(1, processes=2 if launcher == "torchrun" else 1, at_once=jobs)
    runs = [Job(f"run {number}", Path(folder) / f"run-{number}", config) for number in range(jobs + 2)]
    results = run_watched("grid", runs, launch, jobs)
    for result in results:
        print(f"{result.job.name}: {result.failure}")
    return 130 if launch.stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
