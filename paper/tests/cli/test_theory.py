"""`spherenet theory`: JSON and figure of every demonstration, wrong input."""

import json
import subprocess
import sys
from functools import partial

import pytest
from PIL import Image

from command_line import one_sentence, spherenet
from spherenet_paper.theory import spectra as spectra_module
from spherenet_paper.theory.spectra import spectrum

NAMES = ["conditioning", "phase", "operators", "features", "color"]


@pytest.fixture
def small(monkeypatch):
    """Reduce the work for spectra of networks to seconds."""
    monkeypatch.setattr(spectra_module, "MEASURED_DIGITS", 8)
    monkeypatch.setattr(spectra_module, "PROBES", 1)
    monkeypatch.setattr(spectra_module, "spectrum", partial(spectrum, steps=8))
    monkeypatch.setattr(spectra_module, "SCALES", (1.0, 4.0, 16.0))


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.radial_gradient("L").resize((64, 48)).save(path)
    return path


def options(name, photo):
    return {
        "conditioning": ["conditioning", "--c", "1", "2", "4", "--depths", "2", "3", "--steps", "0"],
        "phase": ["phase", photo],
        "operators": ["operators", "--m", "3"],
        "features": ["features", "--iterations", "2"],
        "color": ["color"],
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_json_and_figure_are_written(name, photo, tmp_path, capsys):
    figure = tmp_path / f"{name}.png"
    assert spherenet("theory", *options(name, photo), "--json", "-o", figure) == 0
    shown = capsys.readouterr()
    assert isinstance(json.loads(shown.out), dict)
    assert shown.err == ""
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{name}.png", "photo.png"])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "features"])  # tested elsewhere: it takes longer
def test_table_is_printed(name, photo, tmp_path, capsys):
    assert spherenet("theory", *options(name, photo)) == 0
    heading = {"conditioning": "exponent", "phase": "correlation", "operators": "saddle"}
    assert heading.get(name, "brightness") in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples_and_does_not_import_torch(name):
    code = (
        "import sys; from spherenet_paper.cli.theory import theory_parser\n"
        f"try: theory_parser().parse_args([{name!r}, '--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert f"usage: spherenet theory {name}" in shown.stdout
    assert f"examples:\n  spherenet theory {name}" in shown.stdout


def test_help_lists_demonstrations(capsys):
    assert spherenet("theory", "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)


def test_conditioning_prints_exponents_and_claims(capsys):
    assert spherenet("theory", "conditioning", "--steps", "0", "--depths", "4", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [curve["case"] for curve in result["matrices"]] == ["G", "G_S, raw", "G_S, renormalized"]
    for curve in result["matrices"] + result["depth"]:
        assert curve["exponent"] == pytest.approx(curve["expected"], abs=0.1)
    assert [curve["paper"] for curve in result["matrices"]] == ["≥ 2", "0", "0"]
    assert [curve["expected"] for curve in result["depth"]] == [8, 4, 0]
    assert result["networks"] is None


def test_conditioning_includes_networks(small, tmp_path, capsys):
    figure = tmp_path / "conditioning.svg"
    arguments = ["--steps", "1", "--depths", "2", "--c", "1", "2", "4", "--operator", "sigmoid", "-o", figure]
    assert spherenet("theory", "conditioning", *arguments) == 0
    shown = capsys.readouterr().out
    assert "SphereNet, renormalized" in shown
    assert "without BatchNorm" in shown
    assert str(figure) in shown
    assert figure.read_bytes().startswith(b"<?xml")


WRONG = {
    "name": (["phse"], "invalid choice: 'phse'"),
    "no name": ([], "required: NAME"),
    "option": (["color", "--opertor", "linear"], "unknown option --opertor, did you mean --operator?"),
    "suffix": (["color", "-o", "figure.jpg"], "--output must end in .png, .svg or .pdf, got 'figure.jpg'"),
    "folder": (["color", "-o", "nowhere/figure.png"], "--output must be in an existing folder"),
    "seed": (["color", "--seed", "-1"], "--seed must be from 0"),
    "large seed": (["color", "--seed", str(2**70)], f"--seed must be below 2^63 in magnitude, got {2**70}"),
    "operator": (["color", "--operator", "cos"], "--operator must be one of"),
    "k above n": (["conditioning", "--n", "2"], "--k must be from 2 to min(n, m), which is 2, got 3"),
    "c": (["conditioning", "--c", "2", "4", "0"], "--c must be finite and greater than 0, got 0"),
    "one c": (["conditioning", "--c", "2"], "two different values"),
    "depth": (["conditioning", "--depths", "1"], "--depths must be at least 2, got 1"),
    "steps": (["conditioning", "--steps", "-1"], "--steps must be at least 0, got -1"),
    "sphere": (["conditioning", "--operator", "none"], "--operator must be one of"),
    "margin": (["operators", "--m", "1"], "--m must be a whole number from 2 to 1000, got 1"),
    "k": (["operators", "--k", "0"], "--k must be greater than 0"),
    "iterations": (["features", "--iterations", "0"], "--iterations must be at least 1, got 0"),
    "feature margin": (["features", "--m", "0.5"], "--m must be at least 1, got 0.5"),
    "missing image": (["phase", "nowhere.png"], "nowhere.png"),
    "not an image": (["phase", "text.png", "-o", "figure.png"], "text.png"),
    "one color": (["phase", "gray.png", "-o", "figure.png"], "single color"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_with_exit_code_2(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.png").write_text("not an image")
    Image.new("L", (8, 8), 99).save("gray.png")
    arguments, message = WRONG[case]
    assert spherenet("theory", *arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert one_sentence(shown.err)
    assert shown.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gray.png", "text.png"]
