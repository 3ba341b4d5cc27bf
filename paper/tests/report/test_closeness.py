"""The sentence about the distance to the paper."""

from types import SimpleNamespace

import pytest

from spherenet_paper.report.closeness import closeness, distance


def cell(name, column, ours, paper):
    runs = {} if ours is None else {0: None}
    return SimpleNamespace(name=name, column=column, paper=paper, runs=runs, values=lambda: [ours])


def grid(*cells, preset="cpu"):
    return SimpleNamespace(cells=list(cells), preset=preset)


def test_differences_and_orders():
    cells = [cell("a", "x", 60.0, 90.0), cell("b", "x", 62.0, 91.0), cell("c", "x", 50.0, 92.0), cell("d", "y", 70, 90)]
    assert closeness(grid(*cells, cell("e", "x", 1.0, None), cell("f", "x", None, 90.0))) == (
        "How close to the paper: -30.2 points over 4 cells with published numbers (farthest: -42.0, c); "
        "1 of 3 pairs in a column are in the paper's order."
    )
    assert distance(grid(*cells)) == ({"a": -30.0, "b": -29.0, "c": -42.0, "d": -20.0}, 3, 1)
    assert distance(grid(cell("e", "x", 1.0, None))) is None


@pytest.mark.parametrize(
    ("cells", "preset", "text"),
    [
        ([cell("a", "x", 91.5, 90.0)], "paper", "+1.5 points over 1 cell with a published number."),
        ([cell("a", "x", 91.5, None)], "paper", "it has no numbers for the finished cells."),
        ([cell("a", "x", 91.5, 90.0)], "smoke", "a smoke test of a few steps, which cannot be compared."),
    ],
)
def test_other_cases(cells, preset, text):
    assert closeness(grid(*cells, preset=preset)) == f"How close to the paper: {text}"
