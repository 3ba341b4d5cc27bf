"""Write the page, the figure and the table of runs from folders of experiments, as `make results` does.

python -m spherenet_paper.report paper/results/*/* --markdown docs/results.md --csv paper/results/cells.csv
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from spherenet_paper.report.csv_tables import grids_as_csv
from spherenet_paper.report.figure import draw_curves, main_grid
from spherenet_paper.report.grids import by_preset, is_grid, read_grid
from spherenet_paper.report.markdown_page import markdown_page


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, help="folders; those without experiment.json are left out")
    parser.add_argument("--markdown", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--figure", type=Path, required=True)
    arguments = parser.parse_args()
    grids = by_preset([read_grid(folder) for folder in arguments.folders if is_grid(folder)])
    main = main_grid(grids)
    if main is not None:
        arguments.figure.write_text(draw_curves(main), encoding="utf-8")
    figure = None if main is None else Path(os.path.relpath(arguments.figure, arguments.markdown.parent)).as_posix()
    arguments.markdown.write_text(markdown_page(grids, "Results", figure), encoding="utf-8")
    arguments.csv.write_text(grids_as_csv(grids), encoding="utf-8")


if __name__ == "__main__":
    main()
