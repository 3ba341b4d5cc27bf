"""Figures are written atomically and reproducibly, and invalid paths are rejected early."""

import sys

import pytest

from spherenet.errors import MissingExtraError
from spherenet_paper.theory.conditioning import depth_curves, matrix_curves
from spherenet_paper.theory.drawing import draw_conditioning, new_figure, require_output, write

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_same_figure_gives_same_bytes_in_every_format(suffix, tmp_path):
    for name in ("first", "second"):
        figure, (axis,) = new_figure(1, 1, width=3, height=2)
        axis.plot([1, 2], [3, 4], label="κ")
        write(figure, require_output(str(tmp_path / f"{name}{suffix}")))
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("first", "second"))
    assert first.startswith(SIGNATURES[suffix])
    assert first == second
    assert len(list(tmp_path.iterdir())) == 2


def test_failed_write_keeps_the_previous_file(tmp_path):
    target = tmp_path / "figure.png"
    target.write_text("before")
    figure, (axis,) = new_figure(1, 1, width=3, height=2)
    axis.set_title(r"$\nothing{$")
    with pytest.raises(ValueError, match="Parse"):
        write(figure, target)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_new_figure_does_not_use_pyplot():
    def open_figures():
        pyplot = sys.modules.get("matplotlib.pyplot")  # another test may have imported it
        return [] if pyplot is None else pyplot.get_fignums()

    before = open_figures()
    new_figure(2, 2, width=3, height=2)
    assert open_figures() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("figure.jpg", "--output must end in .png, .svg or .pdf"),
        ("figure", "--output must end in"),
        ("nowhere/figure.png", "must be in an existing folder"),
        ("folder.png", "is a folder"),
    ],
)
def test_invalid_output_raises_value_error(name, message, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=message):
        require_output(str(tmp_path / name))


def test_missing_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"^matplotlib is not installed: pip install 'spherenet-torch\[plot\]'\.$"
    with pytest.raises(MissingExtraError, match=message):
        require_output(str(tmp_path / "figure.png"))


@pytest.mark.parametrize("sizes", [(5, 4, 3), (3, 4, 3)], ids=str)
def test_conditioning_figure_with_and_without_growth(sizes, tmp_path):
    scales = [1, 2, 4, 1e5]
    figure = draw_conditioning(matrix_curves(*sizes, scales), depth_curves(*sizes, [2, 3], scales), None)
    assert len(figure.axes) == 2
    write(figure, tmp_path / "conditioning.svg")
