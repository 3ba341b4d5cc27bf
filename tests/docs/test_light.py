"""The figure of accuracy under uneven light and its sentences, with made-up tables: no numbers of runs are here."""

import csv
import importlib
import re
from statistics import fmean, stdev

import pytest

from docs.pages import DOCS, ROOT
from spherenet_paper.report import pages

pytest.importorskip("matplotlib")

STRENGTHS = {"clean": [""], "spot": [0.5, 0.7, 0.9], "ramp": [0.5, 0.7, 0.9], "shadow": [0.5, 0.7, 0.9],
             "gamma": [1.5, 2, 3], "cast": [0.3, 0.6, 0.9], "noise": [10]}  # fmt: skip
ARMS = {"cnn": 0.5, "cnn-standardized": 0.6, "cosine": 0.65, "patch": 0.7}


def made_rows():
    """Return rows whose accuracy is that of the arm, higher by 1 point per seed and lower by 2 per strength."""
    return [
        {"arm": arm, "seed": seed, "corruption": name, "strength": strength,
         "accuracy": round(accuracy + 0.01 * seed - 0.02 * index, 4)}
        for arm, accuracy in ARMS.items() for seed in range(3)
        for name, strengths in STRENGTHS.items() for index, strength in enumerate(strengths)
    ]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(rows):
        path = tmp_path / "light.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["arm", "seed", "corruption", "strength", "accuracy"])
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


@pytest.fixture
def light(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "images")
    return importlib.import_module("light")


def test_accuracies_are_means_over_strengths_per_seed(light, write):
    measured = light.read(write(made_rows()))
    assert measured.seeds == [0, 1, 2]
    assert measured.accuracies["patch", "spot"] == pytest.approx([68, 69, 70])
    assert measured.accuracies["cnn", "clean"] == pytest.approx([50, 51, 52])
    assert measured.uneven("cnn-standardized") == pytest.approx([58, 59, 60])
    assert measured.strengths["gamma"] == [1.5, 2, 3]


def test_table_has_all_arms(light, write):
    lines = light.table(light.read(write(made_rows()))).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(ARMS)
    assert lines[-1].endswith(f"| {fmean([68, 69, 70]):.1f} ± {stdev([68, 69, 70]):.1f} |")


@pytest.mark.parametrize("missing", [{"arm": "patch", "seed": 2}, {"corruption": "ramp", "strength": 0.7, "seed": 0},
                                     {"arm": "cnn"}])  # fmt: skip
def test_incomplete_table_is_refused(light, write, missing):
    rows = [row for row in made_rows() if any(row[key] != value for key, value in missing.items())]
    if missing == {"corruption": "ramp", "strength": 0.7, "seed": 0}:
        rows += [row for row in made_rows() if row["arm"] == "cnn" and row not in rows]
    with pytest.raises(SystemExit, match="same seeds and strengths"):
        light.read(write(rows))


def test_figure_has_images_bars_and_colors_of_dark_pages(light, write, tmp_path):
    light.main(tmp_path / "light.svg", write(made_rows()))
    svg = (tmp_path / "light.svg").read_text()
    assert svg.count("<image ") == len(light.LIGHTS)
    style = importlib.import_module("spherenet_paper.style")
    for _, method in light.ARMS.values():
        color = style.COLORS[method]
        assert len(re.findall(rf'd="[^"]*" clip-path="[^"]*" style="fill: {color.light}', svg)) == len(light.LIGHTS)
        assert f'[style*="fill: {color.light}"] {{ fill: {color.dark} !important }}' in svg
    assert "fill: #ffffff" not in svg  # no background


def test_images_differ_by_light(light):
    images = [light.example(name, [0.5, 0.7, 0.9]).tobytes() for name in light.LIGHTS if name != "gamma"]
    assert len(set(images)) == len(images)


def test_readme_states_the_means(light, write, monkeypatch):
    path = write(made_rows())
    monkeypatch.setattr(light, "read", lambda table=path, read=light.read: read(table))
    monkeypatch.setattr(pages, "HERO", "headline")
    assert pages.measured_light(ROOT) is None
    monkeypatch.setattr(pages, "HERO", "light")
    assert pages.measured_light(ROOT) == {"seeds": 3, "patch": "69.0", "cnn": "49.0", "standardized": "59.0"}
