"""The HTML page in a real browser: no errors, no requests, light and dark, distinct ticks."""

import json
import math

import pytest

from made_runs import make_run
from spherenet.report import Section, Statement, read_run, section_of_runs, write_page


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [read_run(make_run(folder / name, [0.2, 0.6])) for name in ("<i>one", "two")]
    claims = Section("Claims", "a b", statements=[Statement("not decided", "one beats <b>", "ours", "n = 1")])
    write_page([section_of_runs(runs), claims], folder / "page.html", "A report")
    return folder / "page.html"


@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_page_shows_runs_and_statements_without_requests(visit, page_file, width):
    page = visit(page_file.as_uri(), width)
    page.wait_for_selector("#plot-2 svg")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("b", has_text="<i>one").count() == 1  # shown, not interpreted
    assert page.locator("#plot-0 + .legend button").all_text_contents() == ["<i>one", "two"]
    assert page.locator(".claims li.not-decided").inner_text() == "not decided: one beats <b> (ours; n = 1)"


def test_page_is_small(page_file):
    assert page_file.stat().st_size < 50_000


def test_values_that_are_not_finite_are_left_out(tmp_path):
    runs = [read_run(make_run(tmp_path / name, values)) for name, values in (("a", [0.2, float("nan"), 0.6]),)]
    (accuracy, *_) = section_of_runs(runs).plots
    assert accuracy.lines[0].y == [0.2, 0.6]


def test_page_follows_a_change_of_the_color_scheme(visit, page_file):
    page = visit(page_file.as_uri())
    page.wait_for_selector("#plot-0 svg")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("getComputedStyle(document.querySelector('#plot-0 svg')).fill === 'rgb(160, 164, 172)'")


@pytest.mark.parametrize("accuracies", [[0.1, 0.101, 0.102], [0.9, 0.95, 0.99], [0.0, 0.5, 1.0]])
def test_ticks_of_accuracies_differ(visit, tmp_path, accuracies):
    run = read_run(make_run(tmp_path / "run", accuracies))
    write_page([section_of_runs([run])], tmp_path / "page.html", "Ticks")
    page = visit((tmp_path / "page.html").as_uri())
    page.wait_for_selector("#plot-0 svg")
    ticks = page.locator("#plot-0 .y-tick").all_text_contents()
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks)


def test_angles_of_classes_are_plotted_in_degrees_if_they_were_measured(tmp_path):
    path = make_run(tmp_path / "run", [0.2, 0.6])
    plain = section_of_runs([read_run(path)])
    with (path / "metrics.jsonl").open("a") as file:
        row = {"within_class_angle": math.pi / 6, "between_class_angle": math.pi / 2, "simplex_distance": 0.25}
        file.write(json.dumps({"step": 7, "split": "probes", **row}) + "\n")
    measured = section_of_runs([read_run(path)])
    added = measured.plots[len(plain.plots) :]
    assert [(plot.heading.split(",")[0], plot.lines[0].x, plot.lines[0].y) for plot in added] == [
        ("Angle within classes", [7], pytest.approx([30])),
        ("Angle between classes", [7], pytest.approx([90])),
        ("Distance of class means from a simplex", [7], [0.25]),
    ]
