"""Experiments beside the paper's numbers: means, spreads, verdicts, Markdown and CSV."""

import csv
import io
import json

import pytest

from command_line import one_sentence, spherenet
from made_runs import make_grid, make_run
from spherenet.errors import RunError
from spherenet.report.grids import judge, read_grid
from spherenet.report.tables import as_csv, as_markdown, markdown_page

CELLS = {
    "good": ("good", "softmax", 91.0, {0: [0.2, 0.5, 0.7], 1: [0.3, 0.5, 0.72], 2: [0.25, 0.5, 0.71]}),
    "bad": ("bad", "softmax", 90.0, {0: [0.1, 0.4, 0.6], 1: [0.2, 0.4, 0.61], 2: [0.1, 0.4, 0.62]}),
    "empty": ("empty", "softmax", 89.0, {}),
}
CLAIMS = [
    ("good beats bad", [["good", "bad"]], "accuracy"),
    ("bad beats good", [["bad", "good"]], "early"),
    ("empty beats good", [["empty", "good"]], "accuracy"),
]


@pytest.fixture
def folder(tmp_path):
    return make_grid(tmp_path / "table1", CELLS, CLAIMS)


def test_means_and_spreads(folder):
    cell = read_grid(folder).cell("good")
    mean, deviation = cell.mean_and_std()
    assert mean == pytest.approx(71.0)
    assert deviation == pytest.approx(1.0)
    assert cell.values("early") == pytest.approx([20.0, 30.0, 25.0])
    assert cell.mean_curve().values == pytest.approx([0.25, 0.5, 0.71])


def test_claims_are_judged_by_the_seeds(folder):
    grid = read_grid(folder)
    verdicts = [judge(grid, claim) for claim in grid.claims]
    assert [verdict.verdict for verdict in verdicts] == ["confirmed", "refuted", "not decided"]
    # Differences 10, 11, 9 points: t = 10/(1/√3), two degrees of freedom.
    assert verdicts[0].difference == pytest.approx(10.0)
    assert verdicts[0].deviation == pytest.approx(1.0)
    assert verdicts[0].p == pytest.approx(0.0033, abs=1e-4)
    assert "n = 3 seeds" in verdicts[0].words


def test_steadiness_counts_falls_in_the_first_half(tmp_path):
    falls = [0.2, 0.5, 0.4, 0.6, 0.3, 0.9, 0.1, 0.9, 0.1, 0.9]  # of the first five: 0, 10, 0 and 30 points
    cells = {"a": ("a", "a", None, {0: falls}), "b": ("b", "a", None, {0: [0.5, 0.4]})}
    grid = read_grid(make_grid(tmp_path / "grid", cells, [("a is steady", [["a", "b"]], "steadiness")]))
    assert grid.cell("a").values("steadiness") == pytest.approx([-10.0])
    assert grid.cell("b").values("steadiness") == [0.0]
    assert "-10.00 points less of a fall" in judge(grid, grid.claims[0]).words


def test_a_claim_about_learned_k(tmp_path):
    cells = {"learned": ("learned", "a", None, {}), "fixed": ("fixed", "a", None, {seed: [0.5] for seed in range(3)})}
    claims = [(quantity, [["learned", "fixed"]], quantity) for quantity in ("narrowing", "rise")]
    folder = make_grid(tmp_path / "grid", cells, claims)
    for seed, width in enumerate((0.1, 0.11, 0.12)):
        k = {f"features.stages.{stage}.0.0": [0.5 - width / (1 + stage), 0.5 + width / (1 + stage)] for stage in (0, 1)}
        k |= {"features.stages.1.1.0": [0.6, 0.8], "features.fully_connected": [0.1]}
        make_run(folder / "learned" / f"seed-{seed}", [0.5], operator="learnable", k=k)
    grid = read_grid(folder)
    verdict = judge(grid, grid.claims[0])
    # ±w and ±w/2 have standard deviations of √2·w and √2·w/2.
    assert verdict.difference == pytest.approx(2**0.5 * 0.11 / 2)
    assert verdict.verdict == "confirmed"
    assert "+0.0778 ± 0.0071 in the spread of k over 1 pair, n = 3 seeds" in verdict.words
    assert judge(grid, grid.claims[1]).difference == pytest.approx(0.7 - 0.5)


def test_one_seed_decides_nothing(tmp_path):
    one_seed = {name: (row, column, paper, {0: [0.9] if name == "good" else [0.1]})
                for name, (row, column, paper, _) in CELLS.items()}  # fmt: skip
    grid = read_grid(make_grid(tmp_path / "grid", one_seed, CLAIMS[:1]))
    assert judge(grid, grid.claims[0]).verdict == "not decided"


def test_a_difference_that_could_be_chance_is_not_decided(tmp_path):
    cells = {"good": ("good", "a", None, {0: [0.5], 1: [0.6]}), "bad": ("bad", "a", None, {0: [0.55], 1: [0.5]})}
    grid = read_grid(make_grid(tmp_path / "grid", cells, CLAIMS[:1]))
    assert judge(grid, grid.claims[0]).verdict == "not decided"


def test_seeds_without_all_pairs_are_left_out(tmp_path):
    cells = {
        "good": ("good", "a", None, {0: [0.9], 1: [0.8], 2: [0.1]}),
        "bad": ("bad", "a", None, {0: [0.1], 1: [0.2]}),
    }
    grid = read_grid(make_grid(tmp_path / "grid", cells, CLAIMS[:1]))
    assert judge(grid, grid.claims[0]).seeds == 2


def test_markdown(folder):
    text = as_markdown(read_grid(folder))
    assert "| good | **71.00 ± 1.00 (3)** [91.00] |" in text
    assert "| empty | – [89.00] |" in text
    assert "- **confirmed**: good beats bad (Table 1). +10.00 ± 1.00 points" in text


def test_a_page_of_several_begins_with_the_claims(folder, tmp_path):
    other = make_grid(tmp_path / "table2", CELLS, CLAIMS[1:2], id="table2")
    page = markdown_page([read_grid(folder), read_grid(other)], "Both")
    assert [line for line in page.splitlines() if line.startswith("| **")] == [
        "| **confirmed** | good beats bad | table1 |",
        "| **refuted** | bad beats good | table1 |",
        "| **not decided** | empty beats good | table1 |",
        "| **refuted** | bad beats good | table2 |",
    ]
    assert "| **" not in markdown_page([read_grid(other)], "One").split("##")[0]


def test_csv(folder):
    rows = list(csv.DictReader(io.StringIO(as_csv(read_grid(folder)))))
    assert rows[0]["cell"] == "good"
    assert float(rows[0]["difference"]) == pytest.approx(71.0 - 91.0)
    assert rows[2]["mean"] == ""


def test_unfinished_and_damaged_runs_are_named_and_left_out(folder, tmp_path):
    make_run(folder / "empty" / "seed-0", [0.5], finished=False)
    (folder / "bad" / "seed-0" / "metrics.jsonl").write_text("nonsense\n")
    grid = read_grid(folder)
    assert len(grid.complaints) == 2
    assert len(grid.cell("bad").runs) == 2
    assert spherenet("report", folder, "-o", tmp_path / "page.html") == 0
    assert "has not finished" in (tmp_path / "page.html").read_text()


HOSTILE = [
    "[]",
    "{}",
    '{"format": 2}',
    '{"format": 1}',
    "nonsense",
    "[" * 100_000,
    '{"format": 1, "cells": [], "claims": [{"text": "", "source": "", "pairs": [], "quantity": "luck"}]}',
    '{"format": 1, "cells": [{"name": "../x", "row": "", "column": ""}], "claims": []}',
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_description_is_refused(tmp_path, content):
    (tmp_path / "experiment.json").write_text(content)
    with pytest.raises(RunError):
        read_grid(tmp_path)


def test_a_report_is_made_of_what_can_be_read(folder, tmp_path, capsys):
    other = make_grid(tmp_path / "smoke", {"a": ("a", "b", None, {0: [0.5]})}, preset="smoke")
    run = make_run(tmp_path / "run", [0.1, 0.9])
    files = {name: tmp_path / f"out.{name}" for name in ("html", "md", "csv")}
    code = spherenet("report", folder, other, run, tmp_path / "nothing", "-o", files["html"], "--markdown", files["md"],
                     "--csv", files["csv"])  # fmt: skip
    said = capsys.readouterr()
    assert code == 1
    assert "is of the preset smoke, not cpu" in said.err
    assert "nothing is not a folder" in said.err
    assert all(file.stat().st_size > 100 for file in files.values())
    assert "71.00" in said.out
    assert "90.00%" in said.out


def test_nothing_to_report(tmp_path, capsys):
    assert spherenet("report", tmp_path, "-o", tmp_path / "page.html") == 2
    assert one_sentence(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_results_of_another_version_are_said(folder, capsys):
    told = json.loads((folder / "experiment.json").read_text())
    (folder / "experiment.json").write_text(json.dumps({**told, "format": 9}))
    assert spherenet("report", folder) == 2
    assert "holds results of another version" in capsys.readouterr().err
