"""`spherenet reproduce`: the paper's tables and figures, its numbers beside one's own."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import Parser
from spherenet.cli.output import say

if TYPE_CHECKING:
    from spherenet.experiments.runner import OnRay, Result

EXAMPLES = """\
  spherenet reproduce --list
  spherenet reproduce table1 --list
  spherenet reproduce fig-convergence-plain --preset cpu --seeds 3 --jobs 2
  spherenet reproduce table1 --preset paper --only sigmoid-0.3 --processes 4
  spherenet report results/cpu/table1 -o table1.html"""


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "reproduce",
        "Run an experiment of the paper. Cells that are done are skipped, broken ones go on, a failing\n"
        "one does not stop the others: call it again until all are done. Presets: paper (its settings),\n"
        "cpu (shrunk for two cores), smoke (seconds, to see that it runs).",
        examples=EXAMPLES,
    )
    made.add_argument("id", nargs="?", metavar="ID", help="a table or figure; --list names them")
    made.add_argument(
        "--list", action="store_true", help="name the experiments; after an ID its cells, and what it shows"
    )
    made.add_argument("--preset", choices=["paper", "cpu", "smoke"], default="cpu", help="default: cpu")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each cell (default: 1)")
    made.add_argument("--only", nargs="+", default=[], metavar="CELL", help="cells, rows or columns of the table")
    made.add_argument("--output", default="results", metavar="DIR", help="where runs go (default: results)")
    made.add_argument("--data-dir", metavar="DIR", help="where the data are; else SPHERENET_DATA")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    made.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each run, under torchrun")
    made.add_argument(
        "--ray", metavar="ADDRESS", help="run the jobs on a Ray cluster: its address, auto (this one) or local (new)"
    )
    made.add_argument("--gpus", type=int, default=0, metavar="N", help="with --ray: GPUs of each process (default: 0)")
    return made


def run(arguments: Namespace) -> int:
    """Run the jobs and print the table."""
    for name in ("seeds", "jobs", "processes"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(arguments, name)}.")
    if arguments.list:
        _list(arguments.preset) if arguments.id is None else _list_cells(arguments.id, arguments.preset)
        return 0
    if arguments.id is None:
        raise ValueError("ID is missing: spherenet reproduce --list names the experiments.")
    from spherenet.cli.grid_progress import run_watched
    from spherenet.experiments.experiment import describe_grid, find_experiment, jobs_of, selected
    from spherenet.experiments.runner import Here, visible_gpus

    experiment = find_experiment(arguments.id)
    cells = selected(experiment.cells(arguments.preset), arguments.only)
    if not cells:
        raise ValueError(
            f"{arguments.id} has no cells in the preset {arguments.preset}: its data are not to be had here."
        )
    folder = Path(arguments.output) / arguments.preset / arguments.id
    describe_grid(experiment, arguments.preset, folder)
    changes: dict[str, Any] = {} if arguments.data_dir is None else {"data_dir": arguments.data_dir}
    jobs = jobs_of(cells, folder, range(arguments.seeds), **changes)
    threads = max(1, (os.cpu_count() or 1) // (arguments.jobs * arguments.processes))
    launch = (
        _on_ray(arguments)
        if arguments.ray is not None
        else Here(threads, arguments.processes, visible_gpus(), arguments.jobs)
    )
    results = run_watched(experiment.id, jobs, launch, arguments.jobs)
    _print_table(folder)
    return _say_failures(results, stopped=launch.stopped)


def _on_ray(arguments: Namespace) -> OnRay:
    from spherenet.experiments.runner import OnRay

    return OnRay(arguments.ray, arguments.processes, gpus=arguments.gpus)


def _print_table(folder: Path) -> None:
    from rich.console import Console

    from spherenet.report.grids import read_grid
    from spherenet.report.tables import paper_table

    Console().print(paper_table(read_grid(folder)), soft_wrap=False)


def _say_failures(results: list[Result], *, stopped: bool) -> int:
    failed = [result for result in results if result.failure is not None]
    if stopped:
        say(f"spherenet reproduce: left; {len(failed)} runs go on when it is called again.")
        return 130
    for result in failed:
        say(f"spherenet reproduce: {result.job.name} failed: {result.failure}")
    return 1 if failed else 0


def _list(preset: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from spherenet.experiments.experiment import IDS, find_experiment

    table = Table(title=f"experiments, preset {preset}")
    table.add_column("id", no_wrap=True)
    table.add_column("title")
    table.add_column("cells", justify="right")
    for id in IDS:
        experiment = find_experiment(id)
        table.add_row(id, experiment.title, str(len(experiment.cells(preset))))
    Console().print(table)


def _list_cells(id: str, preset: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from spherenet.experiments.experiment import find_experiment, words_of

    print(words_of(id))
    table = Table(title=f"cells, preset {preset}")
    table.add_column("cell", no_wrap=True)
    table.add_column("iterations", justify="right")
    table.add_column("the paper's accuracy %", justify="right")
    for cell in find_experiment(id).cells(preset):
        table.add_row(cell.name, f"{cell.config.iterations:,}", "–" if cell.paper is None else f"{cell.paper:.2f}")
    Console().print(table)
