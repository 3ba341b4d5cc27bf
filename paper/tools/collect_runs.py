"""Add the finished runs of a preset to the tables in paper/results.

    python paper/tools/collect_runs.py FOLDER/long [RESULTS]

FOLDER is the one that `spherenet reproduce --output` wrote. A cell is added when all of its seeds are finished: those
that results/PLAN.md plans, or without a plan those that any cell of the experiment has. A run with other settings than
those of the experiment, or with a folder of this machine in its command, is an error. Runs that are in the tables
already are replaced. `make results` then writes the pages.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from spherenet.errors import RunError
from spherenet_paper.experiments import EXPERIMENTS
from spherenet_paper.experiments.jobs import create_jobs
from spherenet_paper.records import RESULTS, Record, append_records, read_runs

LOCAL = re.compile(r"(^|[ =])/\w")


def collect(source: Path, target: Path) -> dict[str, int]:
    """Add the runs of complete cells to the tables and return their number by experiment.

    Raises:
        RunError: A run has other settings, or its command names a folder of this machine.
    """
    collected: list[Record] = []
    counts = {}
    for experiment in EXPERIMENTS.values():
        folder, cells = source / experiment.id, experiment.cells(source.name)
        if not cells or not folder.is_dir():
            continue
        records, problems = read_runs(folder, source.name, experiment.id)
        seeds = {key.seed for key in (*(record.key for record in records), *(key for key, _ in problems))}
        plan = experiment.planned_seeds(source.name)
        complete = []
        for cell in cells:
            own = {record.key.seed: record for record in records if record.key.cell == cell.name}
            wanted = set(range(plan[cell.name])) if plan else seeds
            if own and wanted <= own.keys():
                for job in create_jobs([cell], folder, sorted(wanted)):
                    job.is_done()  # RunError where it was run with other settings
                    require_portable(own[job.config.seed])
                complete += [own[seed] for seed in sorted(wanted)]
        counts[experiment.id] = len(complete)
        collected += complete
    append_records(collected, target)
    return counts


def require_portable(record: Record) -> None:
    """Raise RunError if the command of a run names a folder of this machine."""
    config = record.run.config
    commands = [shlex.join(config["command"]), *(str(entry.get("command")) for entry in config.get("history") or [])]
    if any(LOCAL.search(command) for command in commands):
        raise RunError(f"{record.run.path} names a folder of this machine in its command.")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    origin = Path(sys.argv[1])
    if not origin.is_dir():
        sys.exit(f"{origin} is not a folder; pass the folder of a preset that `spherenet reproduce --output` wrote.")
    for identifier, number in collect(origin, Path(sys.argv[2]) if len(sys.argv) == 3 else RESULTS).items():
        print(f"{identifier}: {number} runs of complete cells")
