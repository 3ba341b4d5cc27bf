"""Figures are written whole, refused early, and are the same bytes for the same numbers."""

import sys

import pytest

from spherenet.theory.conditioning import depth_curves, matrix_curves
from spherenet.theory.conditioning_panels import draw
from spherenet.theory.drawing import new_figure, require_output, write

BEGINNINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", BEGINNINGS)
def test_same_bytes_in_every_format(suffix, tmp_path):
    for name in ("first", "second"):
        figure, (axis,) = new_figure(1, 1, width=3, height=2)
        axis.plot([1, 2], [3, 4], label="κ")
        write(figure, require_output(str(tmp_path / f"{name}{suffix}")))
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("first", "second"))
    assert first.startswith(BEGINNINGS[suffix])
    assert first == second
    assert len(list(tmp_path.iterdir())) == 2


def test_a_figure_that_fails_leaves_what_was_there(tmp_path):
    target = tmp_path / "figure.png"
    target.write_text("before")
    figure, (axis,) = new_figure(1, 1, width=3, height=2)
    axis.set_title(r"$\nothing{$")
    with pytest.raises(ValueError, match="Parse"):
        write(figure, target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_no_screen_and_no_global_state_are_asked_for():
    def open_figures():
        pyplot = sys.modules.get("matplotlib.pyplot")  # another test may have drawn with it
        return [] if pyplot is None else pyplot.get_fignums()

    before = open_figures()
    new_figure(2, 2, width=3, height=2)
    assert open_figures() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("figure.jpg", "--output must end in .png, .svg or .pdf"),
        ("figure", "--output must end in"),
        ("nowhere/figure.png", "must lie in a folder that exists"),
        ("folder.png", "is a folder"),
    ],
)
def test_outputs_that_cannot_be(name, message, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=message):
        require_output(str(tmp_path / name))


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'spherenet\[plot\]'"):
        require_output(str(tmp_path / "figure.png"))


@pytest.mark.parametrize("sizes", [(5, 4, 3), (3, 4, 3)], ids=str)
def test_conditioning_is_drawn_with_and_without_growth(sizes, tmp_path):
    scales = [1, 2, 4, 1e5]
    figure = draw(matrix_curves(*sizes, scales), depth_curves(*sizes, [2, 3], scales), None)
    assert len(figure.axes) == 2
    write(figure, tmp_path / "conditioning.svg")
