"""Copy the finished runs of a preset into results/, without checkpoints and logs, as they are committed.

    python paper/tools/collect_runs.py FOLDER/long [paper/results/long]

The planned runs of a cell that has all seeds that results/PLAN.md plans are copied to results/long, where reports read
them, all others, also those of cells without planned seeds, to results/unfinished. All runs of a preset without a plan
are copied. Each experiment with planned seeds gets its experiment.json, also without runs, so that reports list what is
missing. A run with other settings than those of the experiment, or with a folder of this machine in config.json, is an
error. Runs that are there already are replaced, others stay. `make results` then writes the page.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

from spherenet.errors import RunError
from spherenet_paper.experiments import EXPERIMENTS
from spherenet_paper.experiments.jobs import Job, create_jobs, write_experiment

FILES = ("config.json", "metrics.jsonl", "summary.json")
LOCAL = re.compile(r'"/|[ =]/\w')
"""An absolute path at the start of a string or in a command."""


def collect(source: Path, target: Path) -> dict[str, int]:
    """Copy the finished runs and return the number in complete cells by experiment. The preset is the source's name.

    Raises:
        RunError: A run has other settings, or config.json names a folder of this machine.
    """
    counts = {}
    for experiment in EXPERIMENTS.values():
        cells = experiment.cells(source.name)
        if not cells or not (experiment.planned_seeds(source.name) or (source / experiment.id).is_dir()):
            continue
        write_experiment(experiment, source.name, target / experiment.id)
        seeds = sorted({int(path.name.removeprefix("seed-")) for path in source.glob(f"{experiment.id}/*/seed-*[0-9]")})
        planned, done = experiment.planned_seeds(source.name), defaultdict[str, dict[int, Job]](dict)
        for job in create_jobs(cells, source / experiment.id, seeds):
            if job.is_done():
                done[job.folder.parent.name][job.config.seed] = job
        counts[experiment.id] = 0
        for cell, jobs in done.items():
            unfinished = target.with_name("unfinished") / experiment.id / cell
            wanted = set(range(planned[cell])) if planned else set(jobs)
            complete = wanted if wanted <= jobs.keys() else set()
            for seed, job in jobs.items():
                folder = target / experiment.id / cell if seed in complete else unfinished
                copy_run(job.folder, folder / job.folder.name)
            for seed in complete:
                shutil.rmtree(unfinished / f"seed-{seed}", ignore_errors=True)
            if unfinished.is_dir() and not any(unfinished.iterdir()):
                unfinished.rmdir()
            counts[experiment.id] += len(complete)
    return counts


def copy_run(source: Path, target: Path) -> None:
    """Copy the files of a run that are committed.

    Raises:
        RunError: config.json names a folder of this machine.
    """
    if LOCAL.search((source / "config.json").read_text(encoding="utf-8")):
        raise RunError(f"{source / 'config.json'} names a folder of this machine.")
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, target / name)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    origin = Path(sys.argv[1])
    if not origin.is_dir():
        sys.exit(f"{origin} is not a folder; pass the folder of a preset that `spherenet reproduce --output` wrote.")
    for identifier, number in collect(
        origin, Path(sys.argv[2] if len(sys.argv) == 3 else f"paper/results/{origin.name}")
    ).items():
        print(f"{identifier}: {number} runs of complete cells")
