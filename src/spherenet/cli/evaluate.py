"""`spherenet evaluate`: how good a run's model is, class by class."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import Parser
from spherenet.cli.output import print_json, warn
from spherenet.text import plain

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES = """\
  spherenet evaluate runs/mnist5k-cnn-3-sigmoid
  spherenet evaluate runs/mnist5k-cnn-3-sigmoid --checkpoint last --picture confusion.png
  spherenet evaluate runs/pictures --data-dir other-pictures --allow-changes --json"""

LARGEST_PRINTED = 20
"""Classes up to which the confusion matrix is printed; a picture shows more."""


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "evaluate",
        "Evaluate the model of a run on the test pictures of its data set: accuracy, a table of\n"
        "classes and the confusion matrix.",
        examples=EXAMPLES,
    )
    made.add_argument("run", metavar="RUN", help="folder of a run")
    made.add_argument("--checkpoint", choices=["best", "last"], default="best", help="default: best")
    made.add_argument("--split", choices=["test", "train"], default="test", help="default: test")
    made.add_argument("--data-dir", metavar="DIR", help="where the data are, if not where they were")
    made.add_argument("--allow-changes", action="store_true", help="evaluate although the data are not the run's own")
    made.add_argument("--device", metavar="NAME", help="cpu, cuda, … (default: cuda where it is there)")
    made.add_argument("--batch-size", type=int, default=256, metavar="N", help="pictures a batch (default: 256)")
    made.add_argument("--picture", metavar="FILE", help="draw the confusion matrix (.png, .svg or .pdf)")
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return made


def run(arguments: Namespace) -> None:
    """Evaluate and print."""
    if arguments.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {arguments.batch_size}.")
    from dataclasses import replace

    from spherenet.errors import DataError
    from spherenet.training import Processes, evaluate
    from spherenet.training.build import build_data
    from spherenet.training.saved_runs import load_run, require_same_data

    saved = load_run(arguments.run, arguments.checkpoint)
    for message in saved.warnings:
        warn(message)
    # The run may be a stranger's: nothing is fetched for it, and it does not decide how many processes read.
    config = replace(saved.config, download=False, workers=min(saved.config.workers, os.cpu_count() or 1))
    if arguments.data_dir is not None:
        config = replace(config, data_dir=arguments.data_dir)
    dataset = build_data(config)
    if not arguments.allow_changes:
        remedy = "restore them, or say --allow-changes to evaluate on these"
        require_same_data(saved.directory.config, dataset, remedy)
    elif dataset.classes != saved.classes:
        raise DataError("the classes must be those of the run, even with --allow-changes: its network knows no others.")
    with Processes.joined(arguments.device) as processes:
        result = evaluate(
            saved.model.to(processes.device),
            getattr(dataset, arguments.split),
            len(saved.classes),
            processes,
            batch_size=arguments.batch_size,
            workers=config.workers,
        )
    if arguments.picture is not None:
        from spherenet.report.tables import draw_confusion

        draw_confusion(result.confusion.tolist(), saved.classes, arguments.picture)
    per_class = _per_class(result.confusion, saved.classes)
    if arguments.json:
        numbers = {
            "run": arguments.run,
            "step": saved.step,
            "split": arguments.split,
            "accuracy": result.accuracy,
            "loss": result.loss,
            "count": result.count,
            "classes": per_class,
            "confusion": result.confusion.tolist(),
        }
        print_json(numbers)
        return
    print(
        f"{plain(arguments.run)}, {arguments.checkpoint} checkpoint (step {saved.step}), {arguments.split} split: "
        f"accuracy {result.accuracy:.2%} of {result.count}, loss {result.loss:.4f}"
    )
    _print_tables(per_class, result.confusion, saved.classes)
    if arguments.picture is not None:
        print(f"The confusion matrix is drawn in {arguments.picture}")


def _per_class(confusion: Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Count, recall and precision of each class; None where there is nothing to divide by."""
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(classes):
        right, count = int(confusion[index, index]), int(confusion[index].sum())
        taken = int(confusion[:, index].sum())
        rows.append(
            {
                "class": name,
                "count": count,
                "recall": right / count if count else None,
                "precision": right / taken if taken else None,
            }
        )
    return rows


def _print_tables(per_class: list[dict[str, Any]], confusion: Tensor, classes: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title="classes")
    table.add_column("class")
    for column in ("pictures", "recall", "precision"):
        table.add_column(column, justify="right")
    for row in per_class:
        shown = [f"{row[name]:.1%}" if row[name] is not None else "–" for name in ("recall", "precision")]
        table.add_row(Text(plain(row["class"])), str(row["count"]), *shown)
    console.print(table)
    if len(classes) > LARGEST_PRINTED:
        console.print(f"{len(classes)} classes: --picture FILE draws their confusion matrix.")
        return
    matrix = Table(title="confusion: rows are the truth, columns the answer")
    matrix.add_column("")
    for name in classes:
        matrix.add_column(Text(plain(name)[:8]), justify="right")
    for index, name in enumerate(classes):
        cells = [str(int(count)) if count else "·" for count in confusion[index]]
        cells[index] = f"[bold]{cells[index]}[/bold]"
        matrix.add_row(Text(plain(name)), *cells)
    console.print(matrix)
