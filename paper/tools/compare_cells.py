"""Print the differences between cells of an experiment, paired by seed, with 95 % intervals, as a Markdown table.

    python paper/tools/compare_cells.py long headline none_softmax cosine_softmax sigmoid-0.3_softmax

The first cell is the one that the others are compared with. These are the numbers of docs/findings.md that are no
claims of the experiment: each cell by itself, and training accuracies, which are those of the rows `train` of
curves.csv. Below the table stand for each seed the first evaluation that reaches --reach percent, and the median
over layers of the variance of their outputs at the end (the last row `probes`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import fmean, median

from spherenet.cli.plugin import as_number
from spherenet.errors import RunError
from spherenet.report import ReportedRun
from spherenet_paper.experiments import find_experiment
from spherenet_paper.report.claims import confidence_interval
from spherenet_paper.report.grids import Grid, GridCell, stored_grid
from spherenet_paper.report.quantities import QUANTITIES, mean_between

Measure = Callable[[ReportedRun], float]


def measures(protocol: str | None, last: int) -> dict[str, Measure]:
    """Return the compared numbers of a run by their names.

    Args:
        protocol: BatchNorm statistics of the test accuracies; None for the first ones of a run.
        last: Iterations at the end over which training accuracy is averaged.
    """

    def quantity(name: str) -> Measure:
        return lambda run: QUANTITIES[name].measure(run, protocol)

    def training(window: Callable[[int], tuple[int, int]]) -> Measure:
        def measure(run: ReportedRun) -> float:
            mean = mean_between(run, "train", *window(run.rows[-1]["step"]))
            if mean is None:
                raise RunError(f"{run.path} has no rows of training in these iterations.")
            return mean

        return measure

    return {
        "test accuracy, first half": quantity("early"),
        "test accuracy, whole run": quantity("mean"),
        "test accuracy, end": quantity("accuracy"),
        "mean drop between evaluations, first half: smaller by": quantity("steadiness"),
        "training accuracy, first half": training(lambda length: (0, length // 2)),
        "training accuracy, whole run": training(lambda length: (0, length)),
        f"training accuracy, last {last:,} iterations": training(lambda length: (length - last + 1, length)),
    }


def difference(cell: GridCell, baseline: GridCell, measure: Measure) -> str:
    """Return the mean difference over the common seeds with its interval, e.g. "+0.23 [-0.36, +0.82]"."""
    seeds = sorted(cell.runs.keys() & baseline.runs.keys())
    values = [measure(cell.runs[seed]) - measure(baseline.runs[seed]) for seed in seeds]
    if not values:
        return "–"
    interval = "" if len(values) < 2 else " [{:+.2f}, {:+.2f}]".format(*confidence_interval(values))
    return f"{fmean(values):+.2f}{interval}"


def first_reaching(run: ReportedRun, percent: float, protocol: str | None) -> int | None:
    """Return the iteration of the first evaluation with at least this test accuracy; None without one."""
    curve = run.curve("test", "accuracy", protocol)
    return next((s for s, value in zip(curve.steps, curve.values, strict=True) if 100 * value >= percent), None)


def median_variance(run: ReportedRun) -> float | None:
    """Return the median over layers of the variance of their outputs at the end; None if it was not measured."""
    rows = [row["output_variance"] for row in run.rows_of("probes") if isinstance(row.get("output_variance"), dict)]
    variances = [value for value in map(as_number, rows[-1].values() if rows else ()) if value is not None]
    return median(variances) if variances else None


def by_seed(cells: list[GridCell], measure: Callable[[ReportedRun], float | None], form: str) -> list[str]:
    """Return a line for each cell with a number of each of its runs."""
    lines = []
    for cell in cells:
        values = {seed: measure(run) for seed, run in sorted(cell.runs.items())}
        shown = (f"seed {seed}: {'–' if value is None else format(value, form)}" for seed, value in values.items())
        lines.append(f"{cell.name}: {', '.join(shown)}")
    return lines


def compare(grid: Grid, names: list[str], *, protocol: str | None, last: int, reach: float) -> str:
    """Return the comparison of cells as text; the first name is the baseline.

    Raises:
        RunError: There are no finished runs of one of the cells.
    """
    cells = []
    for name in names:
        cell = grid.cell(name)
        if cell is None or not cell.runs:
            finished = ", ".join(cell.name for cell in grid.cells if cell.runs)
            raise RunError(f"The cell must be one with finished runs ({finished or 'there are none'}), got {name!r}.")
        cells.append(cell)
    baseline, *others = cells
    lines = [f"| points | {' | '.join(cell.name for cell in others)} |", "|---" * (len(others) + 1) + "|"]
    for name, measure in measures(protocol, last).items():
        lines.append(f"| {name} | {' | '.join(difference(cell, baseline, measure) for cell in others)} |")
    lines.append(f"\nFirst evaluation with at least {reach:g} %:")
    lines += by_seed(cells, lambda run: first_reaching(run, reach, protocol), ",")
    lines.append("\nMedian variance of the outputs of a layer at the end:")
    lines += by_seed(cells, median_variance, ".2g")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", metavar="PRESET", help="preset of the runs, e.g. long")
    parser.add_argument("experiment", metavar="ID", help="experiment, e.g. headline")
    parser.add_argument("baseline", metavar="BASELINE", help="the cell that the others are compared with")
    parser.add_argument("cells", metavar="CELL", nargs="+", help="cells with finished runs")
    parser.add_argument("--protocol", help="BatchNorm statistics of test accuracies (default: the first of each run)")
    parser.add_argument(
        "--last", type=int, default=1250, help="iterations at the end of training accuracy (%(default)s)"
    )
    parser.add_argument("--reach", type=float, default=80.0, help="accuracy in percent to wait for (%(default)g)")
    options = parser.parse_args(arguments)
    names = [options.baseline, *options.cells]
    try:
        grid = stored_grid(options.preset, find_experiment(options.experiment).id)
        text = compare(grid, names, protocol=options.protocol, last=options.last, reach=options.reach)
    except (RunError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
