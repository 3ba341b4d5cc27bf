"""Somebody's own pictures: train on a folder, evaluate, predict, go on, and what can be wrong with it."""

import json

import pytest
from PIL import Image

from command_line import one_sentence, spherenet

OPTIONS = ["--data", "folder", "--image-size", 16, "--model", "cnn-3", "--widths", 4, 4, 4, "--batch-size", 8,
           "--iterations", 30, "--eval-every", 15, "--checkpoint-every", 15, "--learning-rate", 0.01,
           "--orthogonality", 0]  # fmt: skip


@pytest.fixture
def pictures(tmp_path):
    """Red and blue pictures of several sizes, modes and endings."""
    for name, colour in (("red", (200, 30, 20)), ("blue", (20, 30, 200))):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(24):
            picture = Image.new("RGB", (20 + index, 30), tuple(min(255, part + index) for part in colour))
            suffix = ("jpg", "png", "webp", "PNG")[index % 4]
            mode = "RGBA" if suffix == "png" else "P" if suffix == "PNG" else "RGB"
            picture.convert(mode).save(tmp_path / "pictures" / name / f"{index}.{suffix}")
    return tmp_path / "pictures"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_is_learned_and_used(pictures, tmp_path, workers, capsys):
    run = tmp_path / "run"
    assert spherenet("train", *OPTIONS, "--data-dir", pictures, "--workers", workers, "--output", run) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["classes"] == ["blue", "red"]
    assert config["pictures"] == {"train": 44, "test": 4}
    capsys.readouterr()
    assert spherenet("predict", pictures / "red" / "0.jpg", pictures / "blue" / "1.png", "--run", run, "--json") == 0
    answers = [answer["classes"][0]["class"] for answer in json.loads(capsys.readouterr().out)]
    assert answers == ["red", "blue"]
    assert spherenet("evaluate", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["count"] == 4


def test_workers_change_nothing(pictures, tmp_path):
    from spherenet.runs import RunDirectory

    rows = []
    for workers in (0, 2):
        run = tmp_path / str(workers)
        assert spherenet("train", *OPTIONS, "--data-dir", pictures, "--workers", workers, "--output", run) == 0
        rows.append([(row["step"], row["loss"]) for row in RunDirectory.open(run).metrics.read() if "loss" in row])
    assert rows[0] == rows[1]


def test_wrong_folders(pictures, tmp_path, capsys):
    def fails(message, *options):
        assert spherenet("train", *OPTIONS, "--output", tmp_path / "run", *options) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert message in said
        assert one_sentence(said)

    fails("blue", "--data-dir", pictures / "blue")  # no classes in it
    (tmp_path / "one" / "only").mkdir(parents=True)
    (pictures / "red" / "0.jpg").rename(tmp_path / "one" / "only" / "0.jpg")
    fails("class", "--data-dir", tmp_path / "one")
    (pictures / "red" / "broken.jpg").write_bytes(b"no picture")
    fails("broken.jpg", "--data-dir", pictures, "--val-fraction", 0.3)
    assert not (tmp_path / "run" / "summary.json").exists()
