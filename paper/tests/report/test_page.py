"""The HTML page in a real browser: no errors, no requests, hover labels, phone and desktop, light and dark."""

import pytest
from grid_folders import make_grid

from made_runs import make_run
from spherenet.report import read_run, section_of_runs, write_page
from spherenet_paper.report.page import section_of_grid


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    cells = {
        "cosine": ("cosine", "softmax", 91.0, {0: [0.2, 0.5, 0.7], 1: [0.3, 0.5, 0.72]}),
        "none": ("none", "softmax", 90.0, {0: [0.1, 0.4, 0.6], 1: [0.2, 0.4, 0.61]}),
        **{f"cosine_{number}": ("cosine", f"{number}", None, {0: [0.2, 0.3]}) for number in range(12)},
    }
    cells["learnable"] = ("learnable", "softmax", None, {})
    grid = make_grid(folder / "table1", cells, [("cosine beats none", [["cosine", "none"]], "accuracy")])
    layers = {f"features.stages.{stage}.0.0": [0.1 * stage + 0.01 * i for i in range(20)] for stage in range(3)}
    learnable = folder / "table1" / "learnable"
    make_run(learnable / "seed-0", [0.5, 0.6], operator="learnable", k=layers)
    runs = [read_run(make_run(folder / name, [0.2, 0.6])) for name in ("<i>one", "two")]
    few = {name: cells[name] for name in ("cosine", "none")}
    other = make_grid(folder / "table2", few, [("none beats <b>", [["none", "cosine"]], "accuracy")], id="a table")
    sections = [*(section_of_grid(made.read()) for made in (grid, other)), section_of_runs(runs)]
    write_page(sections, folder / "page.html", "A report")
    return folder / "page.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_page_shows_tables_claims_and_interactive_curves(visit, page_file, width, scheme):
    page = visit(page_file.as_uri(), width, scheme)
    page.wait_for_selector("#plot-4 svg")
    assert page.title() == "A report"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 24, 26)")
    assert page.locator("td.best").first.inner_text() == "71.00 ± 1.41 (2)"
    # Differences of 10 and 11 points in both, n = 2: the interval is 10.5 ± 6.35.
    assert page.locator(".claims").count() == 0, "a claim is shown once, in the table of all claims"
    claims = page.locator(".overview tr")
    assert [" ".join(row.split()) for row in claims.all_inner_texts()] == [
        "confirmed cosine beats none (table1; Table 1; +10.50 [+4.15, +16.85] points over 1 pair, n = 2 seeds)",
        "refuted none beats <b> (a table; Table 1; -10.50 [-16.85, -4.15] points over 1 pair, n = 2 seeds)",
    ]
    claims.last.locator("a").click()
    assert page.locator("section", has_text="a table: A table").bounding_box()["y"] < 900  # scrolled into view
    assert page.locator("b", has_text="<i>one").count() == 1  # shown, not interpreted

    plot = page.locator("#plot-0")
    plot.scroll_into_view_if_needed()
    second = plot.locator("circle").nth(1).bounding_box()  # the evaluation at step 20
    page.mouse.move(second["x"] + 2, plot.bounding_box()["y"] + 100)
    tip = plot.locator(".tip")
    assert tip.inner_text().startswith("20 iterations\nlearnable (n = 1): 60.00%\ncosine (n = 2): 50.00%")
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width

    lines = plot.locator("polyline")
    styles = lines.evaluate_all(
        "lines => lines.map(line => line.getAttribute('stroke') + line.getAttribute('stroke-dasharray'))"
    )
    assert len(set(styles[:7])) == 7, "two curves have the same style"
    legend = page.locator("#plot-0 + .legend button")
    assert legend.all_text_contents()[:3] == ["cosine (n = 2)", "none (n = 2)", "cosine_0 (n = 1)"]
    assert plot.locator("polygon").count() == 2, "one seed has no band"
    assert legend.first.bounding_box()["y"] >= plot.bounding_box()["y"] + 330, "the legend covers the axis"
    assert page.locator("#plot-2 .x-tick").all_text_contents() == ["stages.0.0.0", "stages.1.0.0", "stages.2.0.0"]

    legend.first.click()
    assert legend.first.get_attribute("aria-pressed") == "false"
    assert plot.locator("polygon").count() == 1  # hidden with its band
    assert lines.count() == len(styles) - 1
    assert page.locator("summary").first.inner_text() == "Time and memory"
    page.locator("summary").first.click()
    assert page.locator("td", has_text="321").first.is_visible()


def test_experiment_without_runs_has_no_plots_and_no_claims(tmp_path):
    cells = {name: (name, "softmax", None, {}) for name in ("cosine", "none")}
    grid = make_grid(tmp_path / "grid", cells, [("cosine beats none", [["cosine", "none"]], "accuracy")])
    section = section_of_grid(grid.read())
    assert section.statements == []
    assert section.plots == []


@pytest.mark.parametrize("number", [1, 2])
def test_claims_are_shown_once(tmp_path, number):
    cells = {name: (name, "softmax", None, {0: [0.5, value]}) for name, value in (("cosine", 0.7), ("none", 0.6))}
    claims = [("cosine beats none", [["cosine", "none"]], "accuracy")]
    grids = [make_grid(tmp_path / f"grid{i}", cells, claims, id=f"grid{i}").read() for i in range(number)]
    write_page([section_of_grid(grid) for grid in grids], tmp_path / "page.html", "Claims")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("cosine beats none") == number
    assert text.count("over 1 pair, n = 1 seed)") == number
