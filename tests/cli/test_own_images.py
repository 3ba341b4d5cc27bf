"""Folders of images: train, evaluate and predict; errors in the folder."""

import json

import pytest
from PIL import Image

from command_line import one_sentence, spherenet

OPTIONS = ["--data", "folder", "--image-size", 16, "--model", "cnn-3", "--widths", 4, 4, 4, "--batch-size", 8,
           "--iterations", 30, "--eval-every", 15, "--checkpoint-every", 15, "--learning-rate", 0.01,
           "--set", "orthogonality=0"]  # fmt: skip


@pytest.fixture
def images(tmp_path):
    """Create red and blue images of several sizes, modes and file types."""
    for name, color in (("red", (200, 30, 20)), ("blue", (20, 30, 200))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(24):
            image = Image.new("RGB", (20 + index, 30), tuple(min(255, channel + index) for channel in color))
            suffix = ("jpg", "png", "webp", "PNG")[index % 4]
            mode = "RGBA" if suffix == "png" else "P" if suffix == "PNG" else "RGB"
            image.convert(mode).save(tmp_path / "images" / name / f"{index}.{suffix}")
    return tmp_path / "images"


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_is_trained_on_and_used(images, tmp_path, workers, capsys):
    run = tmp_path / "run"
    assert spherenet("train", *OPTIONS, "--data-dir", images, "--workers", workers, "--output", run) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["classes"] == ["blue", "red"]
    counts = config["images"]
    assert counts["train"] + counts["test"] == 48
    assert 2 <= counts["test"] <= 12
    capsys.readouterr()
    assert spherenet("predict", images / "red" / "0.jpg", images / "blue" / "1.png", "--run", run, "--json") == 0
    classes = [row["classes"][0]["class"] for row in json.loads(capsys.readouterr().out)]
    assert classes == ["red", "blue"]
    assert spherenet("evaluate", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["count"] == counts["test"]


def test_number_of_workers_does_not_change_the_result(images, tmp_path):
    from spherenet.runs import RunDirectory

    rows = []
    for workers in (0, 2):
        run = tmp_path / str(workers)
        assert spherenet("train", *OPTIONS, "--data-dir", images, "--workers", workers, "--output", run) == 0
        rows.append([(row["step"], row["loss"]) for row in RunDirectory.open(run).metrics.read() if "loss" in row])
    assert rows[0] == rows[1]


def test_invalid_folders_are_rejected(images, tmp_path, capsys):
    def fails(message, *options):
        assert spherenet("train", *OPTIONS, "--output", tmp_path / "run", *options) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in said
        assert one_sentence(said)

    fails("blue", "--data-dir", images / "blue")  # has no class folders
    (tmp_path / "one" / "only").mkdir(parents=True)
    (images / "red" / "0.jpg").rename(tmp_path / "one" / "only" / "0.jpg")
    fails("class", "--data-dir", tmp_path / "one")
    (images / "red" / "broken.jpg").write_bytes(b"not an image")
    fails("broken.jpg", "--data-dir", images, "--test-fraction", 0.3)
    assert not (tmp_path / "run" / "summary.json").exists()
