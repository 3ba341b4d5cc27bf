"""The digits that the package ships: complete, unchanged and split in the same way for everyone."""

import hashlib
import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from spherenet.data import digits as module
from spherenet.data import find_dataset, load_dataset
from spherenet.data.digits import DIGITS, read_mnist5k
from spherenet.errors import DataError


@pytest.fixture(scope="module")
def digits():
    return load_dataset("mnist5k")


def test_shapes_classes_and_counts(digits, collect):
    assert digits.classes == tuple("0123456789")
    assert (len(digits.train), len(digits.test)) == (4000, 1000)
    assert digits.train.labels.bincount().tolist() == [400] * 10
    assert digits.test.labels.bincount().tolist() == [100] * 10
    assert digits.preprocessing.as_dict() == {
        "size": [28, 28], "channels": 1, "mean": [127.5], "std": [128.0], "resize": None
    }  # fmt: skip
    batch = collect(digits.test, list(range(1000)))[0]
    assert batch.images.shape == (1000, 1, 28, 28)
    assert batch.images.min() == -127.5 / 128
    assert batch.images.max() == 127.5 / 128


def test_split_never_changes():
    # Results on mnist5k are comparable only on the same digits.
    (images, labels), _ = read_mnist5k()
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert digest == "61144b8dac992f91001ff3e632484de1d582cb87becb12b35f8607d36482b1ac"
    _, (images, labels) = read_mnist5k()
    digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert digest == "bbbf44f5e7ec2b13abfc06f90be9ced47b42ac8ed758b60454c137aa9e1ccf69"


def test_train_and_test_share_no_digit():
    (train, _), (test, _) = read_mnist5k()
    train_contents = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in train_contents for image in test)


def test_labels_match_images(digits, collect):
    # The nearest class mean classifies four of five digits; with mixed-up labels it could not.
    train = collect(digits.train, list(range(4000)))[0]
    test = collect(digits.test, list(range(1000)))[0]
    means = torch.stack([train.images[train.labels == label].flatten(1).mean(0) for label in range(10)])
    nearest = torch.cdist(test.images.flatten(1), means).argmin(1)
    assert (nearest == test.labels).double().mean() > 0.75


def test_other_size_and_channels(collect):
    digits = load_dataset("mnist5k", image_size=32, channels=3)
    assert collect(digits.test, [0, 1])[0].images.shape == (2, 3, 32, 32)
    assert digits.preprocessing.size == (32, 32)


def test_file_is_small_and_has_a_license():
    assert DIGITS.stat().st_size < 1_000_000
    license_text = DIGITS.with_name("mnist5k.license.txt").read_text("utf-8")
    for text in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", "https://creativecommons.org/licenses/by-sa/3.0/"):
        assert text in license_text


def test_missing_file_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "DIGITS", tmp_path / "mnist5k.png")
    assert find_dataset("mnist5k") is None
    with pytest.raises(DataError, match=r"mnist5k.png' cannot be read \(No such file or directory\): reinstall"):
        read_mnist5k(tmp_path / "mnist5k.png")


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


CONTENT = DIGITS.read_bytes()
CORRUPT = {
    "empty": b"",
    "not a PNG": b"0,1,2",
    "truncated": CONTENT[:-12],
    "one byte too many": CONTENT + b"\0",
    "one bit changed": CONTENT[:400_000] + bytes([CONTENT[400_000] ^ 1]) + CONTENT[400_001:],
    "too few digits": png(np.zeros((28, 2800), np.uint8)),
    "too many digits": png(np.zeros((1428, 2800), np.uint8)),
    "another image": png(np.zeros((1400, 2800), np.uint8)),
    "color": png(np.zeros((1400, 2800, 3), np.uint8)),
    "bomb": png(np.zeros((20_000, 20_000), np.uint8)),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_file_is_refused_before_decoding(tmp_path, case, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("decoded"))
    (tmp_path / "digits.png").write_bytes(CORRUPT[case])
    with pytest.raises(DataError, match=r"digits.png' is corrupt \(wrong SHA-256\): reinstall spherenet"):
        read_mnist5k(tmp_path / "digits.png")


def test_long_file_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "digits.png").open("wb") as file:
        file.truncate(1 << 36)  # sparse: 64 GB that would not fit in memory
    with pytest.raises(DataError, match="is corrupt"):
        read_mnist5k(tmp_path / "digits.png")


def test_copy_of_the_file_is_read(tmp_path):
    shutil.copy(DIGITS, tmp_path / "copy.png")
    (images, _), _ = read_mnist5k(tmp_path / "copy.png")
    assert torch.equal(images, read_mnist5k()[0][0])
