"""Reports of experiments: means, standard deviations, verdicts, Markdown and CSV."""

import csv
import io
import shutil
from dataclasses import replace

import pytest
from grid_folders import finish_job, make_grid
from rich.console import Console

from made_runs import make_run
from spherenet.report import write_page
from spherenet_paper.experiments import find_experiment
from spherenet_paper.experiments.experiment import Requirement
from spherenet_paper.experiments.jobs import create_jobs
from spherenet_paper.report.claims import judge
from spherenet_paper.report.csv_tables import CELL_COLUMNS, grids_as_csv
from spherenet_paper.report.grids import grid_of_runs
from spherenet_paper.report.markdown_tables import accuracy_table, protocol_table, time_table
from spherenet_paper.report.page import section_of_grid
from spherenet_paper.report.pages import grids_page
from spherenet_paper.report.tables import paper_tables
from spherenet_paper.report.verdicts import verdict_rows

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


def test_cell_mean_deviation_and_mean_curve(folder):
    cell = folder.read().cell("good")
    mean, deviation = cell.mean_and_std()
    assert mean == pytest.approx(71.0)
    assert deviation == pytest.approx(1.0)
    assert cell.values("early") == pytest.approx([20.0, 30.0, 25.0])
    assert cell.mean_curve().values == pytest.approx([0.25, 0.5, 0.71])


def test_claims_are_decided_by_a_t_test_over_seeds(folder):
    grid = folder.read()
    verdicts = [judge(grid, claim) for claim in grid.claims]
    assert [verdict.verdict for verdict in verdicts] == ["confirmed", "refuted", "not decided"]
    # Differences 10, 11, 9 points: t = 10/(1/√3), two degrees of freedom.
    assert verdicts[0].difference == pytest.approx(10.0)
    # 4.3027 is the 97.5 % quantile of the t-distribution with two degrees of freedom.
    assert verdicts[0].interval == pytest.approx((10 - 4.3027 / 3**0.5, 10 + 4.3027 / 3**0.5), abs=1e-4)
    assert verdicts[0].effect == "+10.00 [+7.52, +12.48] points"
    assert "n = 3 seeds" in verdicts[0].statistics


def test_claims_under_an_evaluation_protocol(tmp_path):
    """The SphereNet leads with lagging statistics only, because they cost the CNN more."""
    claims = [("it leads", [["sphere", "cnn"]], "mean"), ("the lag costs the CNN more", [["cnn", "sphere"]], "lag")]
    cells = {name: (name, "cnn-9", None, {}) for name in ("sphere", "cnn")}
    folder = make_grid(tmp_path / "grid", cells, claims)
    first, second = folder.experiment.claims
    folder.change(claims=(*(replace(first, protocol=name) for name in ("running", "lagging", "precise")), second))
    for seed in range(3):
        noise = seed / 100
        for name, lagging in (("sphere", 0.4), ("cnn", 0.2)):
            protocols = {"running": [0.5, 0.5], "lagging": [lagging, lagging + noise], "precise": [0.6, 0.6 - noise]}
            make_run(folder / name / f"seed-{seed}", [0.5, 0.5], protocols=protocols)
    grid = folder.read()
    running, lagging, precise, lag = (judge(grid, claim) for claim in grid.claims)
    assert (running.difference, precise.difference) == (0.0, 0.0)
    assert (lagging.verdict, lagging.difference) == ("confirmed", pytest.approx(20.0))
    assert (lag.verdict, lag.difference) == ("confirmed", pytest.approx(20.0))
    assert lagging.claim.statement == "it leads, lagging BatchNorm statistics (Table 1)"
    page = protocol_table(grid)
    assert "| | | running | lagging | precise |\n" in page
    assert "| sphere | cnn-9 | 50.0 (50.0) | 41.0 (40.5) | 59.0 (59.5) |" in page.splitlines()


def test_claim_about_a_protocol_that_runs_do_not_have_is_not_decided(folder):
    first, second, _ = folder.experiment.claims
    folder.change(claims=(replace(first, protocol="precise"), replace(second, quantity="lag")))
    for seed in range(3):  # rows with a protocol belong to no other one
        file = folder / "good" / f"seed-{seed}" / "metrics.jsonl"
        file.write_text(file.read_text().replace('"split": "test"', '"split": "test", "protocol": "running"'))
    grid = folder.read()
    for claim in grid.claims:
        assert judge(grid, claim).statistics == "runs of its cells are missing"


def test_steadiness_is_the_mean_drop_in_the_first_half(tmp_path):
    drops = [0.2, 0.5, 0.4, 0.6, 0.3, 0.9, 0.1, 0.9, 0.1, 0.9]  # of the first five: 0, 10, 0 and 30 points
    cells = {"a": ("a", "a", None, {0: drops}), "b": ("b", "a", None, {0: [0.5, 0.4]})}
    grid = make_grid(tmp_path / "grid", cells, [("a is steady", [["a", "b"]], "steadiness")]).read()
    assert grid.cell("a").values("steadiness") == pytest.approx([-10.0])
    assert grid.cell("b").values("steadiness") == [0.0]
    assert "-10.00 points smaller mean drop" in judge(grid, grid.claims[0]).statistics


def test_claims_about_learned_k(tmp_path):
    cells = {"learned": ("learned", "a", None, {}), "fixed": ("fixed", "a", None, {seed: [0.5] for seed in range(3)})}
    claims = [(quantity, [["learned", "fixed"]], quantity) for quantity in ("narrowing", "rise")]
    folder = make_grid(tmp_path / "grid", cells, claims)
    for seed, width in enumerate((0.1, 0.11, 0.12)):
        k = {f"features.stages.{stage}.0.0": [0.5 - width / (1 + stage), 0.5 + width / (1 + stage)] for stage in (0, 1)}
        k |= {"features.stages.1.1.0": [0.6, 0.8], "features.fully_connected": [0.1]}
        make_run(folder / "learned" / f"seed-{seed}", [0.5], operator="learnable", k=k)
    grid = folder.read()
    verdict = judge(grid, grid.claims[0])
    # ±w and ±w/2 have standard deviations of √2·w and √2·w/2.
    assert verdict.difference == pytest.approx(2**0.5 * 0.11 / 2)
    assert verdict.verdict == "confirmed"
    assert "+0.0778 [+0.0602, +0.0953] in the spread of k over 1 pair, n = 3 seeds" in verdict.statistics
    assert judge(grid, grid.claims[1]).difference == pytest.approx(0.7 - 0.5)


def test_one_seed_is_not_decided(tmp_path):
    one_seed = {name: (row, column, paper, {0: [0.9] if name == "good" else [0.1]})
                for name, (row, column, paper, _) in CELLS.items()}  # fmt: skip
    grid = make_grid(tmp_path / "grid", one_seed, CLAIMS[:1]).read()
    assert judge(grid, grid.claims[0]).verdict == "not decided"


def test_insignificant_difference_is_not_decided(tmp_path):
    cells = {"good": ("good", "a", None, {0: [0.5], 1: [0.6]}), "bad": ("bad", "a", None, {0: [0.55], 1: [0.5]})}
    grid = make_grid(tmp_path / "grid", cells, CLAIMS[:1]).read()
    assert judge(grid, grid.claims[0]).verdict == "not decided"


MORE = {
    "good": ("good", "a", None, {0: [0.9], 1: [0.8], 2: [0.1]}),
    "bad": ("bad", "a", None, {0: [0.1], 1: [0.2]}),
}


def test_further_seeds_of_one_cell_are_ignored(tmp_path):
    grid = make_grid(tmp_path / "grid", MORE, CLAIMS[:1]).read()
    assert judge(grid, grid.claims[0]).seeds == 2


def test_missing_or_failed_runs_yield_no_verdict(tmp_path):
    made = make_grid(tmp_path / "grid", MORE, CLAIMS[:1])
    assert judge(made.read(2), made.read().claims[0]).seeds == 2
    assert judge(made.read(3), made.read().claims[0]).difference is None, "the third seed was requested"
    make_run(made / "bad" / "seed-2", [0.1], finished=False)
    assert judge(made.read(), made.read().claims[0]).difference is None, "it is not finished"
    shutil.rmtree(made / "bad" / "seed-2")
    (made / "bad" / "seed-0" / "metrics.jsonl").write_text("nonsense\n")
    assert judge(made.read(), made.read().claims[0]).difference is None, "it is corrupt"
    shutil.rmtree(made / "bad" / "seed-0")
    assert judge(made.read(), made.read().claims[0]).difference is None, "seed 1 is there without seed 0"


def test_runs_on_digits_are_not_compared_with_the_paper(tmp_path):
    """A report of the preset smoke names its data, and shows no number of the paper."""
    for name in ("table2", "table4"):
        experiment, place = find_experiment(name), tmp_path / "smoke" / name
        assert "CIFAR" in experiment.title
        for job in create_jobs(experiment.cells("smoke"), place, range(1)):
            finish_job(job)
        grid = grid_of_runs(experiment, "smoke", place)
        assert grid.logs is None
        assert [cell.paper for cell in grid.cells if cell.paper is not None] == []
        assert "digits" in grid.title
        write_page([section_of_grid(grid)], tmp_path / "page.html", "Digits")
        assert "CIFAR" not in (tmp_path / "page.html").read_text()
        assert "CIFAR" not in grids_page([grid], verdict_rows([grid]))


def test_markdown_of_an_experiment(folder):
    text = accuracy_table(folder.read())
    assert "| good | **71.00 ± 1.00 (3)** [91.00] |" in text
    assert "| empty | – [89.00] |" in text


def test_markdown_page_of_several_experiments_starts_with_the_claims(folder, tmp_path):
    other = make_grid(tmp_path / "table2", CELLS, CLAIMS[1:2], id="table2")
    grids = [folder.read(), other.read()]
    page = grids_page(grids, verdict_rows(grids))
    overview = page.split("## table1")[0]
    assert [line.split(" (Table 1)")[0] for line in overview.splitlines() if line.startswith(("## ", "| "))] == [
        "## Claims confirmed (1)",
        "| claim | difference | experiment |",
        "| good beats bad",
        "## Claims refuted (2)",
        "| claim | difference | experiment |",
        "| bad beats good",
        "| bad beats good",
        "## Claims whose runs are not complete (1)",
    ]
    assert "\n- empty beats good (Table 1)\n" in overview
    assert "| good beats bad (Table 1) | +10.00 [+7.52, +12.48] points, n = 3 | table1 |" in overview


def test_claim_whose_requirement_is_not_met_is_out_of_reach(tmp_path):
    folder = make_grid(tmp_path / "grid", CELLS, CLAIMS[:2])
    verdicts = {}
    for cells, minimum in (("second", 60.5), ("second", 61.5), ("both", 61.5)):
        folder.change_claims(requires=Requirement("accuracy", minimum, cells))
        grid = folder.read()
        verdicts[cells, minimum] = [judge(grid, claim).verdict for claim in grid.claims]
    # "bad" ends at 61 % and "good" at 71 %; "bad" is the second cell of the first claim.
    assert verdicts["second", 60.5] == ["confirmed", "refuted"]
    assert verdicts["second", 61.5] == ["out of reach", "refuted"]
    assert verdicts["both", 61.5] == ["out of reach", "out of reach"]
    statistics = judge(grid, grid.claims[0]).statistics
    assert "a test requires an accuracy of at least 61.5 % of every network, reached 61.0 %" in statistics


def test_time_to_the_final_accuracy_of_the_baseline(tmp_path):
    folder = make_grid(tmp_path / "grid", CELLS, [])
    folder.change(baseline="bad")
    [(cell, times), (itself, own)] = folder.read().times_to_baseline()
    assert (cell.name, itself.name) == ("good", "bad")
    assert [time.step for time in own] == [30, 30, 30]
    # The baseline ends at 60, 61 and 62 % after the third evaluation; "good" is above only at its third.
    assert [(time.step, time.fraction, time.seconds) for time in times] == [(30, 1.0, None)] * 3
    folder.change(baseline="good")
    grid = folder.read()
    assert grid.times_to_baseline()[1][1] == [None, None, None]
    assert "| bad | softmax | 0 of 3 seeds | – | – |" in time_table(grid)


def test_csv_of_an_experiment_has_one_row_per_run(folder):
    rows = list(csv.DictReader(io.StringIO(grids_as_csv([folder.read()]))))
    assert tuple(rows[0]) == CELL_COLUMNS
    assert [row["cell"] + row["seed"] for row in rows] == ["good0", "good1", "good2", "bad0", "bad1", "bad2"]
    expected = {"experiment": "table1", "preset": "cpu", "paper": "91.0", "protocol": "running", "iterations": "30",
                "accuracy": "70.0", "best_accuracy": "70.0", "best_step": "30", "parameters": "1234", "seconds": "5.0",
                "torch": "2.13.0", "processor": "", "run": str(folder / "good" / "seed-0")}  # fmt: skip
    assert {name: rows[0][name] for name in expected} == expected
    assert float(rows[0]["loss"]) == pytest.approx(2 / 3)


def test_csv_has_one_row_per_protocol(tmp_path):
    folder = make_grid(tmp_path / "grid", {"a": ("a", "b", None, {})})
    make_run(folder / "a" / "seed-0", [0.5, 0.6], protocols={"running": [0.5, 0.6], "lagging": [0.4, 0.3]})
    rows = list(csv.DictReader(io.StringIO(grids_as_csv([folder.read()]))))
    shown = [(row["protocol"], row["accuracy"], row["best_accuracy"], row["best_step"]) for row in rows]
    assert shown == [("running", "60.0", "60.0", "20"), ("lagging", "30.0", "40.0", "10")]


def test_unfinished_and_corrupt_runs_are_listed_and_left_out(folder):
    make_run(folder / "empty" / "seed-0", [0.5], finished=False)
    (folder / "bad" / "seed-0" / "metrics.jsonl").write_text("nonsense\n")
    grid = folder.read()
    assert len(grid.problems) == 2
    assert len(grid.cell("bad").runs) == 2
    assert any("has not finished" in text for _, text in section_of_grid(grid).notes)


def test_terminal_table_wraps_headings_before_it_cuts_names(tmp_path):
    """Row names and numbers of four columns take 79 of 80 characters if the short headings are wrapped."""
    row = "spherenorm_batchnorm"
    numbers = {0: [0.3], 1: [0.31], 2: [0.33]}
    cells = {f"cell-{size}": (row, f"batch {size}", None, numbers if size in (4, 16) else {}) for size in (2, 4, 8, 16)}
    grid = make_grid(tmp_path / "grid", cells).read()
    console = Console(file=io.StringIO(), width=80)
    [table] = paper_tables(grid)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(row in line and line.count("31.33 ± 1.53 (3)") == 2 and line.rstrip().endswith("│") for line in lines)
