"""The model included in the package: size, predictions and the accuracy stated in its card."""

import json
import re
from pathlib import Path

import pytest
import torch

from command_line import one_sentence, spherenet
from spherenet.data import find_dataset
from spherenet.export import load_metadata, load_model, shipped_model

IMAGES = sorted((Path(__file__).parents[2] / "examples" / "images").glob("*.png"))


def _stated_accuracy():
    card = (shipped_model() / "README.md").read_text()
    return float(re.search(r"(\d\d\.\d+) ?%", card)[1]) / 100


def test_size_metadata_and_card():
    assert sum(path.stat().st_size for path in shipped_model().iterdir()) <= 5e6
    assert len(load_metadata(shipped_model())["classes"]) == 10
    assert 0.7 < _stated_accuracy() < 1
    assert not re.search(r"(^|\s)/\w+/", (shipped_model() / "README.md").read_text())  # no local path


def test_predict_uses_it_by_default(capsys):
    assert len(IMAGES) == 10
    assert spherenet("predict", *IMAGES, "--json") == 0
    output = capsys.readouterr()
    predictions = json.loads(output.out)
    correct = [p["classes"][0]["class"] == Path(p["image"]).stem for p in predictions]
    assert sum(correct) >= 7  # one by chance
    assert "airplane" in output.err
    assert "--run" in output.err


def test_predict_reads_images_of_any_size(tmp_path, capsys):
    from PIL import Image

    with Image.open(IMAGES[0]) as small:
        small.convert("RGB").resize((640, 480)).save(tmp_path / "photo.jpg")
    assert spherenet("predict", tmp_path / "photo.jpg", "--top", 1) == 0
    assert "photo.jpg" in capsys.readouterr().out
    (tmp_path / "text.jpg").write_text("not an image")
    assert spherenet("predict", tmp_path / "text.jpg") == 2
    message = capsys.readouterr().err
    assert "text.jpg" in message
    assert one_sentence(message)


@pytest.mark.skipif(find_dataset("cifar10") is None, reason="needs CIFAR-10")
def test_accuracy_matches_the_card():
    from spherenet.data import load_dataset

    model, test = load_model(shipped_model()), load_dataset("cifar10").test
    order = [(0, torch.arange(first, first + 500)) for first in range(0, 10_000, 500)]
    with torch.no_grad():
        correct = sum(
            int((model(batch.images).argmax(1) == batch.labels).sum())
            for batch in test.batches(order, device=torch.device("cpu"), augmentation=None)
        )
    assert correct / 10_000 == pytest.approx(_stated_accuracy(), abs=2e-4)
