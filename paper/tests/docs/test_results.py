"""The pages agree with the tables of runs, and these agree with the current experiments."""

import csv
import importlib.util
import re

import pytest

from docs.pages import DOCS
from spherenet.training import FREE
from spherenet_paper.experiments import EXPERIMENTS, find_experiment
from spherenet_paper.experiments.jobs import create_jobs
from spherenet_paper.records import RESULTS, read_records, write_records
from spherenet_paper.report.csv_tables import grids_as_csv
from spherenet_paper.report.figure import draw_curves, main_grid
from spherenet_paper.report.grids import stored_grid, stored_grids
from spherenet_paper.report.pages import grids_page, measured_light, readme_parts, results_page, with_parts
from spherenet_paper.report.questions import Questions
from spherenet_paper.report.verdicts import read_verdicts, verdict_rows


@pytest.fixture(scope="module")
def grids():
    return stored_grids()


@pytest.fixture(scope="module")
def verdicts():
    return read_verdicts(RESULTS / "verdicts.csv")


def test_verdicts_are_those_of_the_runs(grids, verdicts):
    main = main_grid(grids)
    assert verdict_rows(sorted(grids, key=lambda grid: grid is not main)) == verdicts, "run make results"
    assert {row.verdict for row in verdicts} == {"confirmed", "refuted", "not decided", "out of reach"}


def test_pages_and_figure_are_those_of_the_runs(grids, verdicts):
    questions = Questions.read(RESULTS)
    assert grids_page(grids, verdicts) == (DOCS / "grids.md").read_text(encoding="utf-8"), "run make results"
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert results_page(grids, verdicts, questions) == page, "run make results"
    assert draw_curves(main_grid(grids)) == (DOCS / "images" / "headline.svg").read_text(encoding="utf-8")
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert with_parts(readme, readme_parts(verdicts, measured_light(questions))) == readme, "run make results"


def test_table_of_cells_is_that_of_the_runs(grids):
    table = grids_as_csv(grids)
    assert table == (RESULTS / "cells.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines()))
    assert all(0 < float(row["accuracy"]) <= float(row["best_accuracy"]) <= 100 for row in rows)
    runs = {tuple(row[name] for name in ("experiment", "preset", "cell", "seed", "protocol")) for row in rows}
    assert len(runs) == len(rows)


def test_tables_are_written_as_they_were_read(tmp_path):
    """Nothing is lost when runs are added: what is read is written again, byte for byte."""
    records = read_records()
    assert len(records) >= 570
    write_records(records, tmp_path)
    for table in tmp_path.iterdir():
        assert table.read_bytes() == (RESULTS / table.name).read_bytes(), table.name


def test_runs_name_no_folder_of_a_machine():
    for record in read_records():
        assert not re.search(r"(^|[ =])/\w", " ".join(record.run.config["command"])), record.key


def test_runs_agree_with_experiments():
    checked = set()
    for record in read_records():
        preset, id, name, seed = record.key
        if id in EXPERIMENTS and preset in ("cpu", "long"):
            cells = {cell.name: cell for cell in find_experiment(id).cells(preset)}
            [job] = create_jobs([cells[name]], RESULTS, [seed])
            wanted = {k: v for k, v in job.config.as_dict().items() if k not in FREE and k != "init_from"}
            assert {option: record.run.setting(option) for option in wanted} == wanted, record.key
            checked.add((preset, id))
    assert len(checked) >= 20


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
    text = (DOCS / "grids.md").read_text(encoding="utf-8").replace("−", "-")
    for experiment, baseline, statistics in COMPARED[heading]:
        grid = stored_grid("long", experiment)
        names = [cell.name for cell in grid.cells if cell.runs]
        text += tool.compare(grid, [baseline, *names], protocol=statistics, last=1250, reach=80.0)
    findings = " ".join((DOCS / "findings.md").read_text(encoding="utf-8").replace("−", "-").split())
    section = findings.partition(f" {heading}")[2].partition(" ## ")[0]
    stated = EFFECT.findall(section)
    assert len(stated) > 5
    assert set(stated) <= set(EFFECT.findall(text))
