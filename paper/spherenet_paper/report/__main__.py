"""Write what follows from the tables of runs: cells.csv, verdicts.csv, pages and the figure, as `make results` does.

python -m spherenet_paper.report [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from spherenet_paper.records import RESULTS
from spherenet_paper.report.pages import write_pages

if __name__ == "__main__":
    write_pages(Path(sys.argv[1]) if len(sys.argv) == 2 else RESULTS)
