"""Write a table of finished runs of one recipe: options that differ, seed, accuracies and times.

    python tools/tabulate_runs.py RUN... -o results/speed.csv

Rows are sorted by operator and seed. The mean, the standard deviation over seeds and the 95 % t-interval of each
operator are printed as a Markdown table, which is that of docs/tutorials/speed.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

from spherenet.report.claims import confidence_interval

OPTIONS = (
    "model",
    "operator",
    "k",
    "center",
    "widths",
    "epochs",
    "batch_size",
    "learning_rate",
    "precision",
    "threads",
)
RESULTS = ("accuracy", "tta_accuracy", "seconds", "peak_megabytes", "parameters")


def read(run: Path) -> dict[str, object]:
    """Return the row of a finished run."""
    try:
        summary = json.loads((run / "summary.json").read_text())
        config = json.loads((run / "config.json").read_text())
    except OSError as error:
        sys.exit(f"{run} must be a finished run, got {error.strerror}.")
    options = {name: config["train"][name] for name in OPTIONS}
    options["operator"] = options["operator"] or "none"
    options["widths"] = "/".join(map(str, options["widths"] or ())) or "default"
    return {**options, "seed": summary["seed"], **{name: summary[name] for name in RESULTS}}


def statement(values: list[float]) -> str:
    """Return mean, standard deviation and interval in percent."""
    values = [100 * value for value in values]
    if len(values) < 2:
        return f"{values[0]:.2f} %, n = 1"
    low, high = confidence_interval(values)
    return f"{fmean(values):.2f} % ± {stdev(values):.2f} [{low:.2f}, {high:.2f}], n = {len(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows = sorted(map(read, arguments.runs), key=lambda row: (row["operator"] != "none", row["operator"], row["seed"]))
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    cells = defaultdict(list)
    for row in rows:
        cells[row["operator"]].append(row)
    print("| network | accuracy | with six views |\n|---|---|---|")
    for name, group in cells.items():
        columns = [statement([row[key] for row in group]) for key in ("accuracy", "tta_accuracy")]
        print(f"| {'CNN' if name == 'none' else name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
