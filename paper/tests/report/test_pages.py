"""The page of results: figure and table first, claims, time to accuracy, published logs, missing runs, appendices."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from grid_folders import make_grid

from made_runs import make_run
from spherenet.report import read_run
from spherenet.runs import RunDirectory
from spherenet_paper.experiments import EXPERIMENTS
from spherenet_paper.experiments.experiment import Logs, Requirement
from spherenet_paper.report import pages
from spherenet_paper.report.csv_tables import grids_as_csv
from spherenet_paper.report.figure import draw_curves, figure_cells, main_grid
from spherenet_paper.report.grids import by_preset
from spherenet_paper.report.pages import grids_page, readme_parts, with_parts
from spherenet_paper.report.quantities import has_steady_pace
from spherenet_paper.report.verdicts import VerdictRow, read_verdicts, verdict_rows, write_verdicts

CLAIMS = [("cosine leads", [["cosine_softmax", "none_softmax"]], "accuracy")]
ACCURACIES = {
    "none_softmax": {0: [0.5, 0.7, 0.8], 1: [0.4, 0.72, 0.81]},
    "cosine_softmax": {0: [0.6, 0.85, 0.9], 1: [0.5, 0.7, 0.91]},
    "none_margin": {},
    "cosine_margin": {0: [0.5, 0.6, 0.7]},
    "linear_softmax": {},
}


def page_of(*grids):
    return grids_page(grids, verdict_rows(grids))


@pytest.fixture
def headline(tmp_path):
    cells = {name: (*name.split("_"), None, runs) for name, runs in ACCURACIES.items()}
    folder = make_grid(tmp_path / "results" / "long" / "headline", cells, CLAIMS, id="headline", preset="long")
    seeds = {"none_softmax": 2, "cosine_softmax": 2, "none_margin": 2, "cosine_margin": 2, "linear_softmax": 0}
    folder.change(baseline="none", seeds=seeds)
    return folder


@pytest.fixture
def protocol(tmp_path):
    cells = {"none_cnn-9": ("none", "cnn-9", None, {}), "cosine_cnn-9": ("cosine", "cnn-9", None, {})}
    folder = make_grid(tmp_path / "results" / "long" / "fig-protocol", cells, id="fig-protocol", preset="long")
    logs = Logs("logs of others", 20, 30, {"none_cnn-9": (86.5, 26.7)})
    folder.change(logs=logs, seeds={"none_cnn-9": 1})
    protocols = {"running": [0.1, 0.4, 0.6], "lagging": [0.1, 0.2, 0.3]}
    make_run(folder / "none_cnn-9" / "seed-0", [0.5, 0.6, 0.8], protocols=protocols)
    return folder


@pytest.fixture
def small(tmp_path):
    cells = {"a": ("a", "x", None, {0: [0.3], 1: [0.31]}), "b": ("b", "x", None, {0: [0.2], 1: [0.2]})}
    claims = [("a leads", [["a", "b"]], "accuracy")]
    return [make_grid(tmp_path / preset, cells, claims, preset=preset) for preset in ("cpu", "cpu-32")]


def test_page_of_long_and_small_grids(headline, protocol, small):
    grids = by_preset([made.read() for made in (*small, protocol, headline)])
    page = page_of(*grids)
    assert re.match(
        r'---\ndescription: "[^"\n]{30,160}"\n---\n\n# All grids\n\nEvery experiment .*\n\nCIFAR-10 images', page
    )
    order = ["](images/headline.svg)", "## headline", "## Claims", "## Time to accuracy", "## fig-protocol",
             "## Planned runs", "## Appendix: small grids, preset cpu\n", "### table1",
             "## Appendix: small grids, preset cpu-32\n"]  # fmt: skip
    assert sorted(order, key=page.index) == order
    presets = [line.split(",")[1] for line in grids_as_csv(grids).splitlines()[1:]]
    assert presets == ["long"] * 7 + ["cpu"] * 4 + ["cpu-32"] * 4  # one run has two protocols


def test_verdicts_are_written_and_read(headline, protocol, tmp_path):
    headline.change_claims(requires=Requirement("accuracy", 99.0))
    rows = verdict_rows([headline.read(), protocol.read()])
    write_verdicts(rows, tmp_path / "verdicts.csv")
    assert read_verdicts(tmp_path / "verdicts.csv") == rows
    [row] = rows
    assert (row.id, row.experiment, row.verdict, row.reached) == (
        "headline.claim-0",
        "headline",
        "out of reach",
        "80.5",
    )
    assert row.shown == (
        f"out of reach, {row.effect}, n = 2; requires an accuracy of at least 99 % of every network, reached 80.5 %"
    )


def stated(id, verdict="confirmed", preset="long"):
    return VerdictRow(id, preset, verdict, id, "Table 1", "-1.00", "-1.50", "-0.50", "points", "1", "3", "", "")


TEMPLATE = (Path(pages.__file__).parent / "templates" / "readme.md.j2").read_text()
OF_README = dict(re.findall(r'"([\w-]+\.[\w-]+)" \| (\w+)', TEMPLATE))


def test_claims_of_the_readme_exist():
    ids = {f"{experiment.id}.{claim.id}" for experiment in EXPERIMENTS.values() for claim in experiment.claims}
    assert len(OF_README) == 7
    assert set(OF_README) <= ids


def test_readme_states_verdicts_of_the_largest_grid():
    rows = [stated(id, word if word == "confirmed" else "refuted") for id, word in OF_README.items()]
    waiting, small = stated("headline.faster", ""), stated("headline.faster", "refuted", "cpu")
    parts = readme_parts([waiting, *rows, small])
    assert (
        "| SphereNets learn faster than the CNN | −1.00 [−1.50, −0.50] points, n = 3 |" in parts["holds"].splitlines()
    )
    assert len(parts["fails"].splitlines()) == 3
    assert "headline.svg" in parts["hero"]
    with pytest.raises(ValueError, match=r"headline\.faster must be confirmed in README\.md, got refuted"):
        readme_parts([waiting, small, *rows])
    arms = ("patch", "cnn", "standardized", "trained")
    light = {"seeds": 5, "claim": "+1.00", **{arm: {"mean": "1.0", "clean": "3.0", "shadow": "2.0"} for arm in arms}}
    assert "light.svg" in readme_parts(rows, light)["hero"]
    assert "| +1.00 |" in readme_parts(rows, light)["holds"]


def test_readme_does_not_deny_a_confirmed_claim():
    with pytest.raises(ValueError, match="must not be confirmed"):
        readme_parts([stated(id) for id in OF_README])


def test_page_without_markers_is_rejected():
    with pytest.raises(ValueError, match="markers of 'hero'"):
        with_parts("# spherenet\n", {"hero": "text"})
    page = "a\n<!-- make results: hero -->\nold\n<!-- end -->\nb"
    assert with_parts(page, {"hero": "new"}) == page.replace("old", "new")


@pytest.mark.parametrize("id", EXPERIMENTS)
def test_ids_of_claims_are_unique(id):
    ids = [claim.id for claim in EXPERIMENTS[id].claims]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9-]+", id) for id in ids)


def test_table_of_the_main_grid(headline):
    page = page_of(headline.read())
    assert "| CNN | 80.50 ± 0.71 (2) | – |\n" in page
    assert "| cosine | **90.50 ± 0.71 (2)** | 70.00 (1) |\n" in page
    assert "| linear |" not in page  # without runs
    assert "| cosine leads (Table 1) | +10.00" in page


def test_missing_runs_are_named(headline, protocol):
    grids = [headline.read(), protocol.read()]
    assert grids[0].missing() == {"none_margin": [0, 1], "cosine_margin": [1]}
    page = grids_page(grids, verdict_rows(grids))
    assert "6 of 9 planned runs are in complete cells; [Planned runs](#planned-runs)" in page
    assert "| headline | 5 | 8 | none_margin: seeds 0, 1; cosine_margin: seed 1 |\n" in page
    assert "| fig-protocol | 1 | 1 | none |\n" in page


def test_claims_wait_for_the_planned_runs_of_all_their_cells(headline):
    pairs = (("cosine_softmax", "none_softmax"), ("cosine_margin", "none_margin"))
    headline.change_claims(pairs=pairs)
    page = page_of(headline.read())
    assert "## Claims whose runs are not complete (1)\n\n- cosine leads (Table 1)\n" in page
    headline.change_claims(pairs=pairs[:1])
    assert "| cosine leads (Table 1) | +10.00" in page_of(headline.read())


def test_runs_with_other_versions_or_hardware_are_counted(small):
    assert "other or unknown" not in page_of(small[0].read())
    file = small[0] / "b" / "seed-1" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hardware": {"device": "cuda"}}))
    page = page_of(small[0].read())
    assert "(torch 2.13.0, device cpu; other or unknown for 1 of the runs)." in page


def test_grids_without_runs_are_listed_as_planned_only(headline, tmp_path):
    cells = {name: (name, "x", None, {}) for name in ("a", "b")}
    claims = [("a leads", [["a", "b"]], "accuracy")]
    folder = make_grid(tmp_path / "results" / "long" / "table3", cells, claims, id="table3", preset="long")
    folder.change(seeds={"a": 2, "b": 2})
    page = page_of(headline.read(), folder.read())
    assert "cosine leads" in page
    assert "a leads" not in page
    assert "## table3" not in page
    assert "| table3 | 0 | 4 | all |\n" in page
    folder.change(logs=Logs("logs", 1, 9, {"a": (86.5, 26.7)}))
    page = page_of(headline.read(), folder.read())
    assert re.search(r"## table3: .*\n\nNo cell is complete\.\n\nMean accuracy.*\n\n.*\n.*\n\| a \| x \| 86\.5", page)


def test_published_logs_are_beside_our_means_of_the_same_iterations(protocol):
    page = page_of(protocol.read())
    assert "over the iterations 20 to 30, ours (number of seeds) beside the logs of others." in page
    # Rows of the iterations 20 and 30: training 60 and 80 %, test 40 and 60 %, 20 and 30 %.
    assert "| none | cnn-9 | 86.5 | 26.7 | 70.0 (1) | 50.0 (1) | 25.0 (1) |\n" in page


def test_time_to_accuracy_without_seconds_of_shared_cores(headline):
    page = page_of(headline.read())
    # The CNN ends at 80 and 81 %, which cosine has at its second evaluation with seed 0, at its third with seed 1.
    assert "| cosine | softmax | 2 of 2 seeds | 25 (20 to 30) | 0.83 (0.67 to 1.00) |\n" in page
    assert "Seconds are left out" in page


def make_paced_run(path, paces):
    """Write a run that took these seconds per ten steps, with an evaluation of ten seconds after each fifth row."""
    run, seconds = RunDirectory.create(path), 0.0
    run.write_config({"format": 1, "train": {"model": "cnn-9"}})
    for number, pace in enumerate(paces, 1):
        seconds += pace + (10 if number % 5 == 1 and number > 1 else 0)
        run.metrics.append({"step": 10 * number, "split": "train", "accuracy": 0.5, "seconds": seconds})
        if number % 5 == 0:
            run.metrics.append({"step": 10 * number, "split": "test", "accuracy": number / 100, "seconds": seconds})
    run.write_summary({"seconds": seconds})
    return path


def test_pace_of_a_run(tmp_path):
    paces = {"alone": [1.0] * 40, "shared": [1.0, 2.0] * 20, "rarely": [1.0] * 37 + [9.0] * 3, "short": [1.0] * 5}
    runs = {name: read_run(make_paced_run(tmp_path / name, own)) for name, own in paces.items()}
    assert {name: has_steady_pace(run) for name, run in runs.items()} == {
        "alone": True,
        "shared": False,
        "rarely": True,
        "short": None,
    }


def test_seconds_of_runs_with_a_steady_pace(headline):
    for name in ("none_softmax", "cosine_softmax"):
        for seed in (0, 1):
            folder = headline / name / f"seed-{seed}"
            for file in (*folder.glob("*.json*"), folder / ".lock"):
                file.unlink(missing_ok=True)
            make_paced_run(folder, [1.0 if name == "none_softmax" else 2.0] * 40)
    page = page_of(headline.read())
    # 40 rows of 1 s and 7 evaluations of 10 s between them: 110 s; 40 rows of 2 s: 150 s.
    assert "2 of 2 seeds | 400 (400 to 400) | 1.00 (1.00 to 1.00) | 150 (150 to 150) | 1.36 (1.36 to 1.36) |" in page


def test_figure_has_one_curve_and_one_band_per_row(headline):
    grid = headline.read()
    assert [cell.name for cell in figure_cells(grid)] == ["none_softmax", "cosine_softmax"]
    text = draw_curves(grid)
    svg = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    paths = [path.get("class") for path in svg.iter(f"{name}path")]
    assert (paths.count("band"), paths.count("curve")) == (2, 4)  # two curves and two lines of the legend
    texts = [element.text for element in svg.iter(f"{name}text")]
    assert "CNN  80.50 ± 0.71 (2)" in texts
    assert "cosine  90.50 ± 0.71 (2)" in texts
    assert "prefers-color-scheme: dark" in text
    numbers = [float(number) for path in svg.iter(f"{name}path") for number in re.findall(r"[\d.]+", path.get("d"))]
    assert all(0 <= number <= 2000 for number in numbers)


def test_main_grid_is_one_of_the_largest_preset_with_runs(headline, protocol, small):
    grids = by_preset([made.read() for made in (*small, protocol, headline)])
    assert [grid.preset for grid in grids] == ["long", "long", "cpu", "cpu-32"]
    assert main_grid(grids).id == "headline"
    assert main_grid(grids[2:]) is None
    assert main_grid([]) is None
