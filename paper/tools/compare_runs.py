"""Compare a run with its repetition: every row of metrics must be the same bit for bit, except for times.

    python paper/tools/compare_runs.py RUN RERUN

RERUN is a run of the command in config.json of RUN, on a machine of the same type, with another --output. Numbers are
compared as they are written in metrics.jsonl and summary.json. Exit code 1 if settings or numbers differ.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from spherenet.errors import RunError
from spherenet.runs import RunDirectory
from spherenet.training import FREE, config_of

TIMES = ("seconds", "peak_megabytes")
"""Entries of rows and of summaries that differ between repetitions."""


def differences(first: str, second: str) -> list[str]:
    """Return a sentence per difference between two runs: settings, and the first row that differs.

    Raises:
        RunError: A folder is not a run, or it is corrupt.
    """
    runs = [RunDirectory.open(path) for path in (first, second)]
    settings = [config_of(run).as_dict() for run in runs]
    found = [
        f"{name} is {settings[0][name]!r} and {settings[1][name]!r}."
        for name in settings[0]
        if name not in FREE and settings[0][name] != settings[1][name]
    ]
    rows = [[_without_times(row) for row in run.metrics.read()] for run in runs]
    if len(rows[0]) != len(rows[1]):
        found.append(f"metrics.jsonl has {len(rows[0])} and {len(rows[1])} rows.")
    for number, (left, right) in enumerate(zip(*rows, strict=False), 1):
        if left != right:
            found.append(f"metrics.jsonl differs in row {number}: {left} and {right}.")
            break
    finished = [run.finished for run in runs]
    if all(finished):
        summaries = [_without_times(run.summary) for run in runs]
        if summaries[0] != summaries[1]:
            found.append(f"summary.json differs: {summaries[0]} and {summaries[1]}.")
    elif any(finished):
        found.append("one of the runs is not finished.")
    return found


def _without_times(row: dict[str, Any]) -> dict[str, str]:
    """Return the entries of a row as text, so that NaN equals NaN."""
    return {key: repr(value) for key, value in row.items() if key not in TIMES}


def main(arguments: list[str]) -> int:
    """Compare two runs, print the result and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("rerun", metavar="RERUN")
    options = parser.parse_args(arguments)
    try:
        found = differences(options.run, options.rerun)
        rows = len(RunDirectory.open(options.run).metrics.read())
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(found) or f"The runs have the same settings and the same {rows} rows of metrics, except for times.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
