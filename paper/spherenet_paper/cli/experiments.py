"""The verbs `reproduce` and `tune`."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spherenet.cli.plugin import (
    ConfigParser,
    Parser,
    add_option,
    config_from,
    print_json,
    print_message,
    progress_bar,
    stdout_console,
    text_width,
)
from spherenet.errors import InvalidArgument
from spherenet.training import EXCLUSIVE, TrainConfig

if TYPE_CHECKING:
    from spherenet_paper.experiments.experiment import Experiment
    from spherenet_paper.experiments.jobs import Job, Score
    from spherenet_paper.experiments.runner import Result

__all__ = ["reproduce_parser", "run_reproduce", "run_tune", "tune_parser"]

MAX_SEEDS = 1_000
"""Largest number of runs per cell and of folds."""
DRY_RUN = "print the commands of all runs as a shell script, with the data they need and an estimate of the time"
MAX_JOBS = 1_024
"""Largest number of runs at the same time and of processes per run."""


def reproduce_parser() -> Parser:
    """Return the parser of `spherenet reproduce`."""
    parser = Parser(
        "reproduce",
        "Run an experiment of the paper: a grid of trainings, called cells, and a table of the results\n"
        "next to the published numbers. Call the command again until all cells are done: finished cells\n"
        "are skipped, interrupted ones are resumed, and a failing cell does not stop the others.\n\n"
        "presets: paper (settings of the paper), long (full-size images, hours on two cores), cpu (smaller,\n"
        "minutes on two cores), smoke (seconds, a test)",
        examples="""\
  spherenet reproduce --list
  spherenet reproduce table1 --list
  spherenet reproduce table1 --dry-run
  spherenet reproduce fig-convergence-plain --preset cpu --seeds 3 --jobs 2
  spherenet reproduce table1 --preset paper --only sigmoid-0.3 --processes 4
  spherenet reproduce table1 --page table1.html""",
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="table or figure to reproduce, such as table1")
    parser.add_argument("--list", action="store_true", help="list the experiments, or with ID the cells of one")
    presets = Literal["paper", "long", "cpu", "smoke"]
    add_option(parser, "--preset", type=presets, default="cpu", help="size of the experiment")
    add_option(parser, "--seeds", type=int, default=1, at_least=1, at_most=MAX_SEEDS, help="runs per cell")
    add_option(parser, "--only", type=list[str], metavar="CELL", help="cells, rows or columns of the table to run")
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    add_option(parser, "--output", default="results", metavar="DIR", help="folder for the runs")
    add_option(parser, "--page", metavar="FILE", help="HTML page with tables and curves to write (.html)")
    add_option(parser, "--data-dir", metavar="DIR", help="folder of the data sets; by default SPHERENET_DATA")
    text = "convolutions of the CNNs on CPUs in float32: torch, or winograd as in sphere layers"
    add_option(parser, "--engine", type=Literal["torch", "winograd"], default="torch", help=text)
    add_option(parser, "--jobs", type=int, default=1, at_least=1, at_most=MAX_JOBS, help="runs at the same time")
    text = "processes per run, started with torchrun"
    add_option(parser, "--processes", type=int, default=1, at_least=1, at_most=MAX_JOBS, help=text)
    text = "Ray cluster to run on: its address, auto (the running one) or local (a new one)"
    add_option(parser, "--ray", metavar="ADDRESS", help=text)
    add_option(parser, "--gpus", type=int, default=0, at_least=0, at_most=MAX_JOBS, help="with --ray: GPUs per process")
    return parser


def run_reproduce(arguments: Namespace) -> int:
    """Run the cells of an experiment, print its table and return the exit code."""
    if arguments.list:
        _list_experiments(arguments.preset) if arguments.id is None else _list_cells(arguments.id, arguments.preset)
        return 0
    if arguments.page is not None and not arguments.page.endswith(".html"):
        raise InvalidArgument("--page", f"must end in .html, got {arguments.page!r}.")
    if arguments.id is None:
        raise InvalidArgument("ID", "must be the name of an experiment: spherenet reproduce --list shows them.")
    from spherenet.report import write_page
    from spherenet_paper.cli.grid_progress import run_watched
    from spherenet_paper.experiments import find_experiment
    from spherenet_paper.experiments.jobs import create_jobs, select_cells
    from spherenet_paper.experiments.plan import dry_run
    from spherenet_paper.experiments.runner import LocalLauncher, RayLauncher, visible_gpus
    from spherenet_paper.report.closeness import closeness
    from spherenet_paper.report.grids import grid_of_runs
    from spherenet_paper.report.page import section_of_grid
    from spherenet_paper.report.tables import paper_tables

    experiment = find_experiment(arguments.id)
    _require_preset(experiment, arguments.preset)
    cells = select_cells(experiment.cells(arguments.preset), arguments.only or [])
    folder = Path(arguments.output) / arguments.preset / arguments.id
    changes: dict[str, Any] = {} if arguments.data_dir is None else {"data_dir": arguments.data_dir}
    jobs = create_jobs(cells, folder, range(arguments.seeds), engine=arguments.engine, **changes)
    threads = max(1, (os.cpu_count() or 1) // (arguments.jobs * arguments.processes))
    if arguments.dry_run:
        title = f"{experiment.id}, preset {arguments.preset}"
        print(dry_run(title, jobs, arguments.jobs, arguments.processes, threads))
        return 0
    launch: LocalLauncher | RayLauncher
    if arguments.ray is not None:
        launch = RayLauncher(arguments.ray, arguments.processes, gpus=arguments.gpus)
    else:
        _check_data(experiment.id, jobs)
        launch = LocalLauncher(threads, arguments.processes, visible_gpus(), arguments.jobs)
    results = run_watched(experiment.id, jobs, launch, arguments.jobs)
    if not launch.stopped:
        console = stdout_console()
        grid = grid_of_runs(experiment, arguments.preset, folder, arguments.seeds)
        for table in paper_tables(grid, text_width(console)):
            console.print(table)
        console.print(closeness(grid), highlight=False, markup=False, width=text_width(console))
        if arguments.page is not None:
            write_page([section_of_grid(grid)], arguments.page, grid.title)
    return _exit_code("reproduce", results, launch.stopped)


def _require_preset(experiment: Experiment, preset: str) -> None:
    """Raise ValueError, with the command to use, if an experiment has no cells with a preset."""
    if not experiment.cells(preset):
        allowed = [name for name in experiment.presets if experiment.cells(name)]
        command = f"spherenet reproduce {experiment.id} --preset {allowed[min(1, len(allowed) - 1)]}"
        raise InvalidArgument(
            "--preset", f"must be {' or '.join(allowed)} for {experiment.id}, got {preset}; try {command}."
        )


def _check_data(title: str, jobs: list[Job]) -> None:
    """Read the data of all unfinished runs before the first one starts, and print which data they use."""
    from spherenet_paper.experiments.plan import check_data, needed_data

    unfinished = [job for job in jobs if not _is_finished(job)]
    for needed in needed_data(unfinished):
        print_message(f"{title}  data: {needed.description}")
    with progress_bar("downloading", in_bytes=True) as progress:
        check_data(unfinished, progress)


def _is_finished(job: Job) -> bool:
    return (job.folder / "summary.json").exists()


def _exit_code(verb: str, results: list[Result], stopped: bool) -> int:
    """Print what failed, or where a stopped grid stands and how to continue it, and return the exit code."""
    from spherenet_paper.experiments.runner import stop_summary

    if stopped:
        command = shlex.join(["spherenet", *sys.argv[1:]])
        print_message(f"spherenet {verb}: stopped: {stop_summary(results)}; continue with the same command: {command}")
        return 130
    failed = [result for result in results if result.failure is not None]
    for result in failed:
        print_message(f"spherenet {verb}: {result.job.name} failed: {result.failure}")
    return 1 if failed else 0


def _list_experiments(preset: str) -> None:
    from rich.table import Table

    from spherenet_paper.experiments import EXPERIMENTS

    table = Table(title=f"experiments, preset {preset}")
    table.add_column("id", no_wrap=True)
    table.add_column("title")
    table.add_column("cells", justify="right")
    for id, experiment in EXPERIMENTS.items():
        table.add_row(id, experiment.title, str(len(experiment.cells(preset))))
    stdout_console().print(table)


def _list_cells(id: str, preset: str) -> None:
    from rich.table import Table

    from spherenet_paper.experiments import find_experiment

    experiment = find_experiment(id)
    _require_preset(experiment, preset)
    console = stdout_console()
    print(_wrapped(experiment.description, text_width(console)))
    table = Table(title=f"cells, preset {preset}")
    table.add_column("cell", no_wrap=True)
    table.add_column("iterations", justify="right")
    table.add_column("accuracy % in the paper", justify="right")
    for cell in experiment.cells(preset):
        table.add_row(cell.name, f"{cell.config.iterations:,}", "–" if cell.paper is None else f"{cell.paper:.2f}")
    console.print(table)


def _wrapped(text: str, width: int) -> str:
    """Return a description in lines of this width. Indented lines are commands and stay as they are."""
    paragraphs = re.split(r"\n(?=\n|[A-Za-z ]+:|    )", text)
    return "\n".join(
        paragraph if paragraph.startswith("    ") else textwrap.fill(" ".join(paragraph.split()), width)
        for paragraph in paragraphs
    )


TUNE_INSTEAD = {
    "operator": "which has --try-operators",
    "loss": "which has --try-losses",
    "folds": "which has --number-of-folds",
    "fold": "which runs all folds",
}
"""Options of train that tune refuses, and why."""


def tune_parser() -> ConfigParser:
    """Return the parser of `spherenet tune`."""
    parser = ConfigParser(
        "tune",
        "Choose operator and loss with their options by cross-validation on the training images: each\n"
        "setting is trained on all folds but one and evaluated on that one. Test images are not used. Finished\n"
        "folds are skipped when the command is called again. Options of train that are not tried are the same\n"
        "for all settings.",
        TrainConfig,
        examples="""\
  spherenet tune --try-operators sigmoid:k=0.1 sigmoid:k=0.3 linear cosine --best best.yaml
  spherenet tune --data cifar10 --model cnn-9 --try-losses s-cosine:s=10 s-cosine:s=30 --number-of-folds 5
  spherenet train --config best.yaml""",
        exclusive=EXCLUSIVE,
        hidden=TUNE_INSTEAD,
    )
    grid = parser.add_argument_group("settings to try")
    operators = ["sigmoid", "linear", "cosine"]
    add_option(
        grid, "--try-operators", type=list[str], default=operators, help="operators; none for plain convolutions"
    )
    add_option(grid, "--try-losses", type=list[str], default=["softmax"], help="losses")
    text = "folds of the cross-validation"
    add_option(grid, "--number-of-folds", type=int, default=3, at_least=2, at_most=MAX_SEEDS, help=text)
    run = parser.add_argument_group("run")
    add_option(run, "--output", default="runs/tune", metavar="DIR", help="folder for the runs")
    add_option(run, "--best", type=str | None, metavar="FILE", help="YAML file to write the best setting to")
    add_option(run, "--jobs", type=int, default=1, at_least=1, at_most=MAX_JOBS, help="runs at the same time")
    run.add_argument("--dry-run", action="store_true", help=DRY_RUN)
    run.add_argument("--json", action="store_true", help="print the scores as JSON")
    return parser


def run_tune(arguments: Any) -> int:
    """Train all folds of all settings, print the scores, write the best setting and return the exit code."""
    from spherenet.cli.plugin import require_writable, write_text
    from spherenet.training import located
    from spherenet_paper.cli.grid_progress import run_watched
    from spherenet_paper.experiments.jobs import best_score, create_settings, create_tuning_jobs, read_score
    from spherenet_paper.experiments.plan import dry_run
    from spherenet_paper.experiments.runner import LocalLauncher, visible_gpus

    config = located(config_from(arguments, TrainConfig))
    for option, instead in TUNE_INSTEAD.items():
        if (value := getattr(config, option)) != getattr(TrainConfig(), option):
            raise InvalidArgument(option, f"must be left out of tune, {instead}, got {value}.")
    settings = create_settings(config, arguments.try_operators, arguments.try_losses)
    folder, folds = Path(arguments.output), arguments.number_of_folds
    jobs = create_tuning_jobs(settings, folder, folds)
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    if arguments.dry_run:
        print(dry_run("tune", jobs, arguments.jobs, threads=threads))
        return 0
    if not all(_is_finished(job) for job in jobs):  # before any run fails for the same reason
        require_writable(folder if folder.exists() else folder.absolute().parent)
    if arguments.best is not None:
        require_writable(Path(arguments.best).absolute().parent)
    _check_data("tune", jobs)
    launch = LocalLauncher(threads, gpus=visible_gpus(), at_once=arguments.jobs)
    results = run_watched("tune", jobs, launch, arguments.jobs)
    scores = [read_score(name, setting, folder, folds) for name, setting in settings.items()]
    best = best_score(scores, folds)
    _print_scores(scores, best, arguments.json)
    # After a stop, the best of the finished settings may not be the best of all.
    if best is not None and arguments.best is not None and not launch.stopped:
        import yaml  # type: ignore[import-untyped]

        write_text(Path(arguments.best), yaml.safe_dump(best.config.as_dict(), sort_keys=False))
    return _exit_code("tune", results, launch.stopped)


def _print_scores(scores: list[Score], best: Score | None, as_json: bool) -> None:
    finished = sorted((score for score in scores if score.accuracies), key=lambda score: -score.mean)
    if as_json:
        rows = [{"setting": score.name, "accuracies": score.accuracies, "mean": score.mean} for score in finished]
        print_json({"scores": rows, "best": None if best is None else best.name})
        return
    if not finished:  # the command was stopped, or all runs failed, which its last line states
        return
    from rich.table import Table

    table = Table(title="accuracy on the held-out fold", caption="the best setting is bold")
    table.add_column("setting")
    for column in ("mean", "std", "folds"):
        table.add_column(column, justify="right")
    for score in finished:
        deviation = "–" if score.deviation is None else f"{score.deviation:.2%}"
        row = (score.name, f"{score.mean:.2%}", deviation, str(len(score.accuracies)))
        table.add_row(*row, style="bold" if score is best else None)
    stdout_console().print(table)
