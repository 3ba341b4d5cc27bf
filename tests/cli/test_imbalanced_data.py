"""Folders with frequent and rare classes, and with very large photographs, on the command line."""

import json

import pytest
from PIL import Image

from command_line import spherenet
from spherenet.runs import RunDirectory

OPTIONS = ["--image-size", 8, "--widths", 2, 2, 2, "--batch-size", 8, "--eval-every", 2, "--checkpoint-every", 2,
           "--workers", 0, "--threads", 1]  # fmt: skip


@pytest.fixture
def images(tmp_path):
    """Create 40 images of a frequent class and 6 of a rare one, all the same."""
    for name, count in (("frequent", 40), ("rare", 6)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (12, 10), (90, 90, 90)).save(tmp_path / "images" / name / f"{index}.png")
    return tmp_path / "images"


def test_predictions_of_one_class_are_reported(images, tmp_path, capsys):
    run = tmp_path / "run"
    assert spherenet("train", "--data", images, *OPTIONS, "--iterations", 2, "--output", run) == 0
    output = capsys.readouterr()
    count = json.loads((run / "config.json").read_text())["images"]["test"]
    assert f"all {count} test predictions are the class '" in output.err
    assert "balanced accuracy 50.00%" in output.out
    assert json.loads((run / "summary.json").read_text())["balanced_accuracy"] == 0.5
    rows = [row for row in RunDirectory.open(run).metrics.read() if row["split"] == "test"]
    assert [row["balanced_accuracy"] for row in rows] == [0.5]
    assert spherenet("evaluate", run, "--json", "--split", "train") == 0
    output = capsys.readouterr()
    assert "training predictions are the class '" in output.err
    assert json.loads(output.out)["balanced_accuracy"] == 0.5
    assert spherenet("evaluate", run) == 0
    assert "balanced accuracy 50.00%" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--class-weights", "balanced"], ["--class-weights", "rare=5", "frequent=0.5"],
                                     ["--sampling", "balanced"]], ids=" ".join)  # fmt: skip
def test_runs_with_balance_are_resumed_and_evaluated(images, tmp_path, capsys, options):
    run = tmp_path / "run"
    assert spherenet("train", "--data", images, *OPTIONS, "--iterations", 2, *options, "--output", run) == 0
    assert spherenet("train", "--resume", run, "--allow-changes", "--iterations", 4) == 0
    recorded = json.loads((run / "config.json").read_text())
    weights = recorded["model"]["loss_options"].get("class_weight")
    assert (weights is None) == ("--sampling" in options)
    assert weights is None or weights[1] > 2 * weights[0]
    last = [row for row in RunDirectory.open(run).metrics.read() if row["split"] == "test"][-1]
    capsys.readouterr()
    assert spherenet("evaluate", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(last["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--class-weights", "cat=2"], "--class-weights must name classes (frequent, rare), got 'cat'."),
        (["--class-weights", "rare"], "--class-weights must be balanced alone, or NAME=WEIGHT per class"),
        (["--sampling", "balanced", "--class-weights", "balanced"], "--class-weights must be left out with"),
        (["--sampling", "even"], "--sampling must be shuffled or balanced, got 'even'"),
        (["--max-megapixels", "0"], "--max-megapixels must be greater than 0, got 0"),
    ],
)
def test_wrong_options_are_named(images, tmp_path, capsys, options, message):
    assert spherenet("train", "--data", images, *OPTIONS, *options, "--output", tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_limit_of_large_photographs_is_an_option(images, tmp_path, capsys):
    run = tmp_path / "run"
    assert spherenet("train", "--data", images, *OPTIONS, "--iterations", 1, "--output", run) == 0
    limit = ["--max-megapixels", "0.01"]
    photo = images / "rare" / "large.png"
    Image.new("RGB", (200, 60)).save(photo)
    capsys.readouterr()
    refused = "must have at most 10000 pixels, got 200 × 60 (--max-megapixels sets the limit)"
    for arguments in (
        ["predict", photo, "--run", run],
        ["embed", run, photo, "-o", tmp_path / "x.npy"],
        ["data", images],
        ["train", "--data", images, *OPTIONS, "--iterations", 8, "--output", tmp_path / "other"],
        ["evaluate", run, "--data-dir", images, "--allow-changes", "--split", "train"],
    ):
        assert spherenet(*arguments, *limit) == 2, arguments
        assert refused in "".join(capsys.readouterr()), arguments
    assert spherenet("predict", photo, "--run", run, "--max-megapixels", 0.012) == 0


def test_limit_of_a_photograph_is_an_option_of_theory(images, tmp_path, capsys):
    photo = tmp_path / "large.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown rotated by 90 degrees
    Image.linear_gradient("L").resize((200, 60)).save(photo, exif=exif)
    assert spherenet("theory", "phase", photo, "--json", "--max-megapixels", 0.01) == 2
    assert "at most 10000 pixels, got 200 × 60 (--max-megapixels sets" in capsys.readouterr().err
    assert spherenet("theory", "phase", photo, "--json", "--max-megapixels", 0.012) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["height"], result["width"]) == (200, 60)
