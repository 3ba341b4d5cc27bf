"""docs/results.md agrees with the committed runs, and these agree with the current experiments."""

import json

import pytest

from docs.pages import DOCS
from spherenet.experiments import find_experiment
from spherenet.experiments.jobs import create_jobs, write_experiment
from spherenet.report.grids import read_grid
from spherenet.report.tables import markdown_page

FOLDERS = sorted((DOCS.parent / "results" / "cpu").iterdir())


def test_page_agrees_with_committed_runs():
    page = markdown_page([read_grid(folder) for folder in FOLDERS], "Results on two cores")
    assert page == (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_committed_runs_agree_with_experiment(folder, tmp_path):
    experiment = find_experiment(folder.name)
    write_experiment(experiment, "cpu", tmp_path)
    committed, current = (json.loads((path / "experiment.json").read_text()) for path in (folder, tmp_path))
    assert {**committed, "versions": None} == {**current, "versions": None}
    cells = {cell.name: cell for cell in experiment.cells("cpu")}
    runs = {(path.parent.parent.name, path.parent.name) for path in folder.glob("*/*/summary.json")}
    assert {cell for cell, _ in runs} <= set(cells)
    for cell, seed in sorted(runs):
        [job] = create_jobs([cells[cell]], folder, [int(seed.removeprefix("seed-"))])
        assert job.is_done()  # RunError where it was run with other settings
