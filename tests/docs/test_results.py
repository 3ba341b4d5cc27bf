"""The page of results is what the tool writes from the committed runs, which are of the experiments as they stand."""

import json

import pytest

from docs.pages import DOCS
from spherenet.experiments.experiment import describe_grid, find_experiment, jobs_of
from spherenet.report.grids import read_grid
from spherenet.report.tables import markdown_page

FOLDERS = sorted((DOCS.parent / "results" / "cpu").iterdir())


def test_the_page():
    page = markdown_page([read_grid(folder) for folder in FOLDERS], "Results on two cores")
    assert page == (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_runs(folder, tmp_path):
    experiment = find_experiment(folder.name)
    describe_grid(experiment, "cpu", tmp_path)
    told, now = (json.loads((path / "experiment.json").read_text()) for path in (folder, tmp_path))
    assert {**told, "versions": None} == {**now, "versions": None}
    cells = {cell.name: cell for cell in experiment.cells("cpu")}
    runs = {(path.parent.parent.name, path.parent.name) for path in folder.glob("*/*/summary.json")}
    assert {cell for cell, _ in runs} <= set(cells)
    for cell, seed in sorted(runs):
        [job] = jobs_of([cells[cell]], folder, [int(seed.removeprefix("seed-"))])
        assert job.is_done()  # RunError where it was run with other settings
