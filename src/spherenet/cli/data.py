"""The verb `data`: list, download and check data sets."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from spherenet._util.text import plain
from spherenet.cli.option_types import add_max_megapixels, add_option, add_workers
from spherenet.cli.options import Parser
from spherenet.cli.output import print_json, progress_bar, stdout_console
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    from spherenet.data import Dataset, Split

__all__ = ["data_parser", "run_data"]


def data_parser() -> Parser:
    """Return the parser of `spherenet data`."""
    parser = Parser(
        "data",
        "Without NAME: list the data sets, their sizes and locations. With NAME: read the data set and\n"
        "count its classes. All images of a folder are decoded, and those that cannot be read are listed\n"
        "(exit code 2 if there are any).",
        examples="""\
  spherenet data                                         # all data sets and their locations
  spherenet data cifar10 --download                      # download, verify and read
  spherenet data cifar10 --data-dir datasets             # read from a folder
  spherenet data photos --workers 2                      # decode all images of a folder""",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="mnist5k, cifar10, cifar100, or a folder of images")
    text = "folder of the data set; by default SPHERENET_DATA or the user's cache"
    add_option(parser, "--data-dir", metavar="DIR", help=text)
    parser.add_argument("--download", action="store_true", help="download cifar10 or cifar100 if it is missing")
    text = "fraction of a folder without val/ or test/ that is used for testing"
    add_option(parser, "--test-fraction", type=float, default=0.1, help=text)
    add_workers(parser)
    add_max_megapixels(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run_data(arguments: Namespace) -> None:
    """List the data sets, or read one and print its classes."""
    if arguments.download and arguments.name not in ("cifar10", "cifar100"):
        raise InvalidArgument("NAME", f"must be cifar10 or cifar100 with --download, got {arguments.name or 'none'}.")
    if arguments.name is None:
        _list_datasets(arguments)
    else:
        _check_dataset(arguments)


def _list_datasets(arguments: Namespace) -> None:
    from spherenet.data import DATASETS, find_dataset

    rows: list[dict[str, Any]] = []
    for name, facts in DATASETS.items():
        location = find_dataset(name, arguments.data_dir)
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
                "found": None if location is None else str(location),
            }
        )
    if arguments.json:
        print_json(rows)
        return
    from rich.table import Table

    table = Table("name", "content", "image", title="data sets")
    for column in ("classes", "train", "test"):
        table.add_column(column, justify="right")
    for row in rows:
        counts = ["–" if row[key] is None else f"{row[key]:,}" for key in ("classes", "train", "test")]
        table.add_row(row["name"], row["summary"], " × ".join(map(str, [*row["size"], row["channels"]])), *counts)
    console = stdout_console()
    console.print(table)
    for row in rows:
        missing = "any folder, given by its path" if row["name"] == "folder" else "not available"
        if row["name"].startswith("cifar"):
            missing = f"not available; download with spherenet data {row['name']} --download"
        where = f"found at {row['found']}" if row["found"] else missing
        console.print(f"{row['name']:<8}  {where}", highlight=False, markup=False, soft_wrap=True)


def _check_dataset(arguments: Namespace) -> None:
    from spherenet.data import check_images, find_dataset, load_dataset, locate
    from spherenet.errors import DataError

    name, folder = locate(arguments.name, arguments.data_dir)
    with progress_bar(f"downloading {arguments.name}", in_bytes=True) as progress:
        dataset = load_dataset(
            name,
            folder,
            test_fraction=arguments.test_fraction,
            max_megapixels=arguments.max_megapixels,
            broken=(),  # all images are decoded below
            download=arguments.download,
            progress=progress,
        )
    errors: list[str] = []
    for title, split in _splits(dataset).items():
        with progress_bar(f"{'training' if title == 'train' else title} images") as progress:
            errors += check_images(split, progress, workers=arguments.workers)
    counts = _class_counts(dataset)
    location = str(find_dataset(name, folder))
    if arguments.json:
        result = {
            "name": dataset.name,
            "found": location,
            **{name: len(split) for name, split in _splits(dataset).items()},
            "classes": counts,
            "broken": errors,
            "messages": list(dataset.messages),
        }
        print_json(result)
    else:
        _print_counts(dataset, counts, location)
        for message in (*dataset.messages, *errors):
            print(plain(message))
    if errors:
        total = sum(map(len, _splits(dataset).values()))
        raise DataError(f"{len(errors)} of {total} images cannot be read; they are listed on stdout.")


def _splits(dataset: Dataset) -> dict[str, Split]:
    splits = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {name: split for name, split in splits.items() if split is not None}


def _class_counts(dataset: Dataset) -> list[dict[str, Any]]:
    """Return the name of each class and its number of images per split."""
    classes = len(dataset.classes)
    numbers = {name: split.labels.bincount(minlength=classes).tolist() for name, split in _splits(dataset).items()}
    return [
        {"class": title, **{name: counts[label] for name, counts in numbers.items()}}
        for label, title in enumerate(dataset.classes)
    ]


def _print_counts(dataset: Dataset, counts: list[dict[str, Any]], location: str) -> None:
    from rich.table import Table
    from rich.text import Text

    splits = _splits(dataset)
    table = Table(title=f"{dataset.name}: {len(counts)} classes")
    table.add_column("class")
    for name in splits:
        table.add_column(name, justify="right")
    for row in counts:
        table.add_row(Text(row["class"]), *(f"{row[name]:,}" for name in splits))
    table.add_section()
    table.add_row("all", *(f"{len(split):,}" for split in splits.values()))
    console = stdout_console()
    console.print(table)
    console.print(f"read from {location}", highlight=False, markup=False, soft_wrap=True)
