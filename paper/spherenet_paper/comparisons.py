"""Paired comparisons of a question of results/PLAN.md, corrected over its claims, and the tables they are made from."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from spherenet_paper.report.claims import CONFIRMED, NOT_DECIDED, REFUTED, holm, mean_test

__all__ = ["Comparison", "compare", "read_rows", "write_rows"]

LEVEL = 0.05
Row = TypeVar("Row", bound=tuple[Any, ...])


class Comparison(NamedTuple):
    """A mean difference over seeds in points, with its 95 % interval and the p corrected by Holm's method."""

    name: str
    mean: float
    interval: tuple[float, float]
    p: float
    n: int

    @property
    def decision(self) -> str:
        """The verdict on the claim that the difference is positive."""
        if self.p >= LEVEL:
            return NOT_DECIDED
        return CONFIRMED if self.mean > 0 else REFUTED

    def __str__(self) -> str:
        """Return the difference with its interval, e.g. "+1.41 [+0.13, +2.69] points, n = 5"."""
        low, high = self.interval
        return f"{self.mean:+.2f} [{low:+.2f}, {high:+.2f}] points, n = {self.n}".replace("-", "−")


def compare(differences: Mapping[str, Sequence[float]]) -> list[Comparison]:
    """Return one comparison per claim from its differences of paired seeds in points."""
    tests = {name: mean_test(values) for name, values in differences.items()}
    corrected = holm([p for *_, p in tests.values()])
    return [
        Comparison(name, mean, interval, p, len(differences[name]))
        for (name, (mean, interval, _)), p in zip(tests.items(), corrected, strict=True)
    ]


def write_rows(rows: Iterable[Sequence[Any]], row_type: type[Row], output: Path) -> None:
    """Write named tuples as a CSV file."""
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(row_type._fields)  # type: ignore[attr-defined]
        writer.writerows(rows)


def read_rows(path: Path, row_type: type[Row]) -> list[Row]:
    """Return the rows of a CSV file as named tuples.

    Raises:
        ValueError: If the columns are others, or a number is none.
    """
    types = get_type_hints(row_type)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(types):
            raise ValueError(f"columns of {path} must be {', '.join(types)}, got {reader.fieldnames}.")
        return [row_type(*(convert(row[name]) for name, convert in types.items())) for row in reader]
