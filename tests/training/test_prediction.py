"""Predictions of image files in Python."""

import numpy as np
import pytest
from PIL import Image

import spherenet as sn
from spherenet.errors import DataError
from spherenet.export import load_metadata, shipped_model
from spherenet.training.saved_runs import load_predictor


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("b.png", "a.png", "c.png"):
        Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_predictions_of_files_and_folders(images):
    predictions = sn.predict(shipped_model(), [images / "b.png", images], top=20, batch_size=2)
    assert [image for image, _ in predictions] == [str(images / f"{name}.png") for name in "babc"]
    assert dict(predictions[0].classes) == pytest.approx(dict(predictions[2].classes))
    for _, classes in predictions:
        names, scores = zip(*classes, strict=True)
        assert sorted(names) == sorted(load_metadata(shipped_model())["classes"])
        assert list(scores) == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1)
    assert sn.predict(shipped_model(), str(images / "a.png"), top=1)[0].classes[0][0] == predictions[1].classes[0][0]
    assert sn.predict(shipped_model(), []) == []


def test_network_keeps_its_mode(images):
    predictor = load_predictor(shipped_model())
    predictor.model.train()
    expected = sn.predict(shipped_model(), images)
    assert sn.predict(predictor, images, device="cpu") == expected
    assert predictor.model.training


def test_wrong_input_is_named(images):
    (images / "broken.png").write_bytes(b"x")
    failures = []
    assert len(sn.predict(shipped_model(), images, failures=failures)) == 3
    assert ["broken.png" in message for message in failures] == [True]
    with pytest.raises(DataError, match=r"broken.png' cannot be read"):
        sn.predict(shipped_model(), images)
    with pytest.raises(DataError, match=r"missing.png' cannot be read"):
        sn.predict(shipped_model(), [images / "missing.png"])
    with pytest.raises(TypeError, match="model must be a run of load_run or the folder of a run or exported"):
        sn.predict(sn.load_model(shipped_model()), images)
    for name in ("top", "batch_size"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            sn.predict(shipped_model(), images, **{name: 0})


def test_views_are_averaged(images):
    """With mirror, an image and its mirror image have the same scores."""
    Image.open(images / "a.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(images / "mirrored.png")
    paths = [images / "a.png", images / "mirrored.png"]
    plain, both = (sn.predict(shipped_model(), paths, top=10, tta=tta) for tta in ("none", "mirror"))
    assert dict(plain[0].classes) != pytest.approx(dict(plain[1].classes), rel=1e-3)
    assert dict(both[0].classes) == pytest.approx(dict(both[1].classes), rel=1e-3)
    with pytest.raises(ValueError, match=r"^tta must be one of .*, got 'flip'"):
        sn.predict(shipped_model(), paths, tta="flip")
