"""docs/results.md agrees with the committed runs, and these agree with the current experiments."""

import csv
import importlib.util
import json
import re

import pytest
from spherenet_paper.report.markdown_page import markdown_page

from docs.pages import DOCS
from spherenet_paper.experiments import find_experiment
from spherenet_paper.experiments.jobs import create_jobs, write_experiment
from spherenet_paper.report.csv_tables import grids_as_csv
from spherenet_paper.report.figure import draw_curves, main_grid
from spherenet_paper.report.grids import by_preset, read_grid

RESULTS = DOCS.parent / "paper" / "results"
FOLDERS = sorted(path for preset in ("cpu", "long") for path in RESULTS.glob(f"{preset}/*"))


@pytest.fixture(scope="module")
def grids():
    """All committed experiments, in the order of `make results`."""
    return by_preset([read_grid(path.parent) for path in sorted(RESULTS.glob("*/*/experiment.json"))])


def test_page_and_figure_agree_with_committed_runs(grids):
    main = main_grid(grids)
    figure = None if main is None else "images/headline.svg"
    assert markdown_page(grids, "Results", figure) == (DOCS / "results.md").read_text(encoding="utf-8")
    if main is not None:
        assert draw_curves(main) == (DOCS / figure).read_text(encoding="utf-8")


def test_table_of_runs_agrees_with_committed_runs(grids):
    table = grids_as_csv(grids).replace(f"{DOCS.parent}/", "")
    assert table == (RESULTS / "cells.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    assert all(0 < float(row["accuracy"]) <= float(row["best_accuracy"]) <= 100 for row in rows)
    runs = {tuple(row[name] for name in ("experiment", "preset", "cell", "seed", "protocol")) for row in rows}
    assert len(runs) == len(rows)


def test_committed_runs_name_no_folder_of_a_machine():
    for path in RESULTS.glob("*/*/*/seed-*/config.json"):
        assert not re.search(r'"/|[ =]/\w', path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_committed_runs_agree_with_experiment(folder, tmp_path):
    experiment, preset = find_experiment(folder.name), folder.parent.name
    write_experiment(experiment, preset, tmp_path)
    committed, current = (json.loads((path / "experiment.json").read_text()) for path in (folder, tmp_path))
    assert {**committed, "versions": None} == {**current, "versions": None}
    cells = {cell.name: cell for cell in experiment.cells(preset)}
    runs = {(path.parent.parent.name, path.parent.name) for path in folder.glob("*/*/summary.json")}
    assert {cell for cell, _ in runs} <= set(cells)
    for cell, seed in sorted(runs):
        [job] = create_jobs([cells[cell]], folder, [int(seed.removeprefix("seed-"))])
        assert job.is_done()  # RunError where it was run with other settings


EFFECT = re.compile(r"[+-]\d+\.\d+ \[[+-]\d+\.\d+, [+-]\d+\.\d+\]")
COMPARED = {
    "## At 86 %": [("headline", "none_softmax", None), ("headline", "cosine_softmax", None)],
    "## At batches of 2 to 32": [("fig-spherenorm", f"batchnorm_{size}", None) for size in (2, 8, 32)],
    "## The paper's convergence gap": [
        ("fig-protocol", baseline, statistics)
        for baseline in ("none_cnn-9", "none_resnet-32")
        for statistics in ("lagging", "running", "batch", "precise")
    ],
    "## Without ReLU, 18 layers": [("table3", "none", None)],
    "## Forty-five plain layers": [("fig-ultradeep", "none_softmax_45", None)],
}
"""Sections of docs/findings.md with the experiments, baselines and BatchNorm statistics of their numbers."""


@pytest.mark.parametrize("heading", COMPARED)
def test_differences_in_findings_are_those_of_the_committed_runs(heading):
    spec = importlib.util.spec_from_file_location("compare_cells", DOCS.parent / "paper" / "tools" / "compare_cells.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    for experiment, baseline, statistics in COMPARED[heading]:
        folder = RESULTS / "long" / experiment
        names = [cell.name for cell in read_grid(folder).cells if cell.runs]
        text += tool.compare(str(folder), [baseline, *names], protocol=statistics, last=1250, reach=80.0)
    findings = " ".join((DOCS / "findings.md").read_text(encoding="utf-8").replace("−", "-").split())
    section = findings.partition(f" {heading}")[2].partition(" ## ")[0]
    stated = EFFECT.findall(section)
    assert len(stated) > 5
    assert set(stated) <= set(EFFECT.findall(text))
