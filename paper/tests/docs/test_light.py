"""The figure of accuracy under uneven light, and the README's sentence on it, with made-up numbers."""

import importlib
import re

import pytest
from made_answers import made_rows

from docs.pages import DOCS
from spherenet_paper import style
from spherenet_paper.comparisons import write_rows
from spherenet_paper.light import Row
from spherenet_paper.report import pages
from spherenet_paper.report.questions import Questions

pytest.importorskip("matplotlib")


@pytest.fixture
def light(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "images")
    return importlib.import_module("light")


@pytest.fixture
def table(tmp_path):
    write_rows(made_rows(), Row, tmp_path / "light.csv")
    return tmp_path / "light.csv"


def test_figure_has_images_bars_and_colors_of_dark_pages(light, table):
    light.main(table.with_suffix(".svg"), table)
    svg = table.with_suffix(".svg").read_text()
    assert svg.count("<image ") == len(light.COLUMNS)
    for method in light.METHODS.values():
        color = style.COLORS[method]
        assert len(re.findall(rf'd="[^"]*" clip-path="[^"]*" style="fill: {color.light}', svg)) == len(light.COLUMNS)
        assert f'[style*="fill: {color.light}"] {{ fill: {color.dark} !important }}' in svg
    assert "fill: #ffffff" not in svg  # no background


def test_figure_without_an_arm_is_refused(light, table):
    write_rows([row for row in made_rows() if row.arm != "patch"], Row, table)
    with pytest.raises(SystemExit, match="complete runs of cnn, cnn-standardized, cnn-light, patch, got none of patch"):
        light.main(table.with_suffix(".svg"), table)


def test_images_differ_by_light(light):
    images = [light.example(name, [0.5, 0.7, 0.9]).tobytes() for name in light.COLUMNS if name != "gamma"]
    assert len(set(images)) == len(images)


def test_readme_states_the_means(monkeypatch):
    questions = Questions(light=made_rows())
    monkeypatch.setattr(pages, "HERO", "headline")
    assert pages.measured_light(questions) is None
    monkeypatch.setattr(pages, "HERO", "light")
    measured = pages.measured_light(questions)
    assert measured["seeds"] == 5
    assert measured["patch"] == {"mean": "68.2", "clean": "70.2", "shadow": "68.2"}
    assert [measured[name]["mean"] for name in ("cnn", "standardized", "trained")] == ["48.0", "58.0", "60.0"]


@pytest.mark.parametrize("questions", [Questions(), Questions(light=made_rows(**{"cnn-standardized": 0.75}))])
def test_readme_states_no_lead_that_is_not_confirmed(monkeypatch, questions):
    monkeypatch.setattr(pages, "HERO", "light")
    with pytest.raises(ValueError, match=r"the lead over cnn.* must be confirmed in README\.md"):
        pages.measured_light(questions)
