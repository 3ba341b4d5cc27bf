"""The model that comes with the package: small, readable, as good as its card says."""

import json
import re
from pathlib import Path

import pytest
import torch

from command_line import one_sentence, spherenet
from spherenet.data import find_dataset
from spherenet.export import load_metadata, load_model, shipped_model

PICTURES = sorted((Path(__file__).parents[2] / "examples" / "pictures").glob("*.png"))


def _accuracy_of_the_card():
    card = (shipped_model() / "README.md").read_text()
    return float(re.search(r"(\d\d\.\d+) ?%", card)[1]) / 100


def test_it_is_small_and_says_what_it_is():
    assert sum(path.stat().st_size for path in shipped_model().iterdir()) <= 5e6
    assert len(load_metadata(shipped_model())["classes"]) == 10
    assert 0.7 < _accuracy_of_the_card() < 1
    assert not re.search(r"(^|\s)/\w+/", (shipped_model() / "README.md").read_text())  # no path of the machine


def test_it_predicts_out_of_the_box(capsys):
    assert len(PICTURES) == 10
    assert spherenet("predict", *PICTURES, "--json") == 0
    said = capsys.readouterr()
    answers = json.loads(said.out)
    right = [answer["classes"][0]["class"] == Path(answer["image"]).stem for answer in answers]
    assert sum(right) >= 7  # chance is one
    assert "airplane" in said.err
    assert "--run" in said.err


def test_a_photograph_of_any_size_is_read(tmp_path, capsys):
    from PIL import Image

    with Image.open(PICTURES[0]) as small:
        small.convert("RGB").resize((640, 480)).save(tmp_path / "photo.jpg")
    assert spherenet("predict", tmp_path / "photo.jpg", "--top", 1) == 0
    assert "photo.jpg" in capsys.readouterr().out
    (tmp_path / "text.jpg").write_text("not a picture")
    assert spherenet("predict", tmp_path / "text.jpg") == 2
    said = capsys.readouterr().err
    assert "text.jpg" in said
    assert one_sentence(said)


def test_brightness_changes_little():
    """Nine of its ten layers see angles alone: twice the contrast about the mean leaves most answers as they were."""
    model = load_model(shipped_model())
    torch.manual_seed(0)
    images = torch.randn(64, 3, 32, 32).cumsum(-1).cumsum(-2)
    images = 0.4 * images / images.abs().amax((1, 2, 3), keepdim=True)
    with torch.no_grad():
        same = model(images).argmax(1) == model(2 * images).argmax(1)
    assert same.float().mean() > 0.9


@pytest.mark.skipif(find_dataset("cifar10") is None, reason="CIFAR-10 is not here")
def test_it_is_as_good_as_its_card_says():
    from spherenet.data import load_dataset

    model, test = load_model(shipped_model()), load_dataset("cifar10").test
    order = [(0, torch.arange(first, first + 500)) for first in range(0, 10_000, 500)]
    with torch.no_grad():
        right = sum(
            int((model(batch.images).argmax(1) == batch.labels).sum())
            for batch in test.batches(order, device=torch.device("cpu"), augmentation=None)
        )
    assert right / 10_000 == pytest.approx(_accuracy_of_the_card(), abs=2e-4)
