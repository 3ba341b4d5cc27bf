"""Write a table of finished runs: their options, seeds, accuracies and times.

    python paper/tools/tabulate_runs.py RUN... -o paper/results/speed.csv

Rows are sorted by operator and seed, the CNN first. Mean, standard deviation and 95 % t-interval of each operator are
printed as the Markdown table of docs/tutorials/speed.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spherenet_paper.report.questions import speed_table

OPTIONS = ("model", "operator", "center", "epochs", "batch_size", "learning_rate", "precision", "threads")
RESULTS = ("accuracy", "tta_accuracy", "seconds", "peak_megabytes", "parameters")


def read(run: Path) -> dict[str, Any]:
    """Return the row of a finished run."""
    try:
        summary, config = (json.loads((run / name).read_text()) for name in ("summary.json", "config.json"))
    except OSError as error:
        sys.exit(f"RUN must be a folder with a finished run, got {run} ({error.strerror}).")
    options = {name: config["train"][name] for name in OPTIONS}
    return {**options, "operator": options["operator"] or "none", "seed": summary["seed"]} | {
        name: summary[name] for name in RESULTS
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the CSV file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, required=True, help="CSV file")
    options = parser.parse_args(arguments)
    rows = sorted(map(read, options.runs), key=lambda row: (row["operator"] != "none", row["operator"], row["seed"]))
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(speed_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
