"""Interactive curves: the data of the tables, values by pointer and keyboard, static figures without scripts."""

import json
import re
import runpy
import sys

import pytest

from docs.pages import DOCS

expect = pytest.importorskip("playwright.sync_api").expect

PHONE, DESKTOP = 390, 1440
DATA = DOCS / "assets" / "curves" / "data.js"


def saved():
    """Return the figures of data.js."""
    return json.loads(re.search(r"= (\{.*\});", DATA.read_text("utf-8"), re.DOTALL)[1])


@pytest.fixture
def open_page(browser, site):
    """Return a function that opens a page from disk without a network; at the end, assert that nothing failed."""
    contexts, errors = [], []

    def open_at(name="results.html", width=DESKTOP, scheme="light", scripts=True):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, java_script_enabled=scripts
        )
        page = context.new_page()
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / name).as_uri())
        contexts.append(context)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert errors == []


def values(figure):
    """Return the values beside the names of a figure."""
    return figure.locator("li output").all_inner_texts()


def expected(panel, index):
    return [f"{mean:.1f} ({low:.1f} to {high:.1f})"
            for _, mean, low, high in (curve["points"][index] for curve in panel["curves"])]  # fmt: skip


def test_data_are_those_of_the_tables(tmp_path, monkeypatch):
    """If this fails after new runs: python docs/images/interactive.py."""
    monkeypatch.syspath_prepend(DOCS / "images")
    monkeypatch.setattr(sys, "argv", ["interactive.py", str(tmp_path / "data.js")])
    runpy.run_path(str(DOCS / "images" / "interactive.py"), run_name="__main__")
    assert (tmp_path / "data.js").read_text("utf-8") == DATA.read_text("utf-8")
    assert DATA.stat().st_size < 30_000


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")], ids=["phone", "desktop"])
def test_keyboard_shows_values(open_page, width, scheme):
    page = open_page(width=width, scheme=scheme)
    figure = page.locator("figure.curves").first
    panel = saved()["headline"]["panels"][0]
    assert values(figure) == expected(panel, -1)
    slider = figure.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert values(figure) == expected(panel, -3)
    iteration = panel["curves"][0]["points"][-3][0]
    assert figure.locator("label").inner_text() == f"iteration {iteration:,}"
    assert slider.get_attribute("aria-valuetext").startswith(f"iteration {iteration:,}: CNN ")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert figure.locator("> svg").bounding_box()["width"] <= width


def test_pointer_shows_values(open_page):
    page = open_page()
    figure = page.locator("figure.curves").first
    figure.scroll_into_view_if_needed()
    box = figure.locator("> svg").bounding_box()
    page.mouse.move(box["x"] + 36, box["y"] + box["height"] / 2)
    assert values(figure) == expected(saved()["headline"]["panels"][0], 0)
    page.mouse.move(box["x"] + box["width"] - 9, box["y"] + box["height"] / 2)
    assert values(figure) == expected(saved()["headline"]["panels"][0], -1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_are_those_of_the_scheme(open_page, scheme):
    page = open_page(scheme=scheme)
    curve = page.locator("figure.curves").first.locator("> svg path.curves-line").nth(1)
    color = saved()["headline"]["panels"][0]["curves"][1]["color"][scheme == "dark"]
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    assert curve.evaluate("path => getComputedStyle(path).stroke") == f"rgb({red}, {green}, {blue})"


def test_legend_switches_methods_off_in_all_panels(open_page):
    page = open_page()
    figure = page.locator("figure.curves").nth(1)
    curves = figure.locator("> svg path.curves-line")
    assert curves.count() == 4
    button = figure.get_by_role("button", name="CNN, GroupNorm")
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert curves.count() == 3
    assert values(figure)[1] == ""
    figure.get_by_role("button", name="batches of 32").click()
    shown = expected(saved()["small_batches"]["panels"][2], -1)
    assert values(figure) == [shown[0], "", *shown[2:]]
    assert curves.count() == 3


def test_figures_remain_without_scripts(open_page):
    page = open_page(scripts=False)
    assert page.locator("figure.curves").count() == 0
    image = page.locator("article img[src$='images/headline.svg']")
    expect(image).to_be_visible()
    page = open_page()
    expect(page.locator("article img[src$='images/headline.svg']")).to_be_hidden()


def test_findings_have_them_too(open_page):
    page = open_page("findings.html", PHONE)
    figure = page.locator("figure.curves").nth(1)
    figure.get_by_role("button", name="45 layers with ReLU").click()
    assert values(figure) == expected(saved()["deep"]["panels"][1], -1)
