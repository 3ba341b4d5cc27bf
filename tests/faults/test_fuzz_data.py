"""Readers of mutated data files raise DataError or return the exact content, without crashes or hangs."""

import gzip
import io
import pickle
import random

import numpy as np
import pytest
import torch

from faults.mutation import call_reader, mutated_bytes
from faults.scale import FUZZ_INPUTS
from faults.small_sets import (
    COUNT,
    SMALL10,
    SMALL100,
    binary_files,
    members_of,
    pickled_files,
    write_archive,
    write_folder,
    write_images,
)
from spherenet.data import check_images, load_dataset
from spherenet.data.cifar import find_cifar, read_cifar
from spherenet.errors import DataError

POINT = 11


def fuzz(read, data, tried, what, times=FUZZ_INPUTS, seed=0):
    """Call a reader with mutations of a file. Some of them must be rejected."""
    chance = random.Random(seed)
    rejected = 0
    for _ in range(times):
        _, message = call_reader(read, mutated_bytes(data, chance), DataError)
        rejected += message is not None
        tried(what)
    assert rejected > times // 10


def read_set(form, folder):
    """Read a data set and check the number of images and the range of labels."""
    train, test = read_cifar(form, find_cifar(form, folder))
    for split, files in ((train, form.train), (test, form.test)):
        assert split.images.shape == (COUNT * len(files), 32, 32, 3)
        assert split.images.dtype == torch.uint8
        assert split.labels.shape == (COUNT * len(files),)
        assert 0 <= int(split.labels.min()) <= int(split.labels.max()) < len(form.classes)
    return train, test


@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
def test_mutated_cifar_binary_file(tmp_path, tried, form):
    folder = write_folder(tmp_path / form.binary_folder, binary_files(form))
    path = folder / f"{next(iter(form.train))}.bin"

    def read(data):
        path.write_bytes(data)
        train, _ = read_set(form, tmp_path)
        records = np.frombuffer(data, np.uint8).reshape(COUNT, 3072 + form.label_bytes)
        assert train.labels[:COUNT].tolist() == records[:, form.label_bytes - 1].tolist()
        images = records[:, form.label_bytes :].reshape(COUNT, 3, 32, 32).transpose(0, 2, 3, 1)
        assert np.array_equal(train.images[:COUNT], images)

    fuzz(read, path.read_bytes(), tried, "a fuzzed CIFAR binary file")


class Oracle(pickle.Unpickler):
    """Python's unpickler, restricted to numpy arrays."""

    def find_class(self, module, name):
        if module.split(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


def unpickle(data):
    """Return what Python reads, None if it raises an error. It is stricter about frames of newer protocols."""
    try:
        return Oracle(io.BytesIO(data)).load()
    except Exception:
        return None


@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_mutated_cifar_pickle(tmp_path, tried, form, protocol):
    folder = write_folder(tmp_path / form.python_folder, pickled_files(form, protocol))
    path = folder / next(iter(form.train))
    original = path.read_bytes()

    def read(data):
        path.write_bytes(data)
        train, _ = read_set(form, tmp_path)
        expected = unpickle(data)
        if expected is not None:
            batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in expected.items()}
            assert train.labels[:COUNT].tolist() == list(batch[form.label_key])
            images = batch["data"].reshape(COUNT, 3, 32, 32).transpose(0, 2, 3, 1)
            assert np.array_equal(train.images[:COUNT], images)

    # The opcodes at both ends, in addition to the pixels between them.
    times, what = FUZZ_INPUTS // 4, "a fuzzed CIFAR -py file"
    fuzz(lambda data: read(data + original[400:]), original[:400], tried, what, times, seed=protocol)
    fuzz(lambda data: read(original[:-400] + data), original[-400:], tried, what, times, seed=protocol + 10)


def test_mutated_archive(tmp_path, tried):
    path = write_archive(tmp_path / SMALL10.archive, members_of(SMALL10))
    expected = read_set(SMALL10, tmp_path)

    def read(data):
        path.write_bytes(data)
        for split, original in zip(read_set(SMALL10, tmp_path), expected, strict=True):
            assert torch.equal(split.images, original.images)
            assert torch.equal(split.labels, original.labels)

    fuzz(read, path.read_bytes(), tried, "a fuzzed archive", FUZZ_INPUTS // 2)


def test_archive_with_mutated_headers(tmp_path, tried):
    path = write_archive(tmp_path / SMALL10.archive, members_of(SMALL10))
    content = gzip.decompress(path.read_bytes())
    headers = content[:1024]

    def read(data):
        path.write_bytes(gzip.compress(data + content[1024:], 1))
        read_set(SMALL10, tmp_path)

    fuzz(read, headers, tried, "an archive with fuzzed headers", FUZZ_INPUTS // 2)


def test_folder_with_mutated_image(tmp_path, tried):
    """A corrupt image is named, and a folder is read completely or not at all."""
    paths = write_images(tmp_path / "images", per_class=4)
    originals = {path: path.read_bytes() for path in paths}
    chance = random.Random(0)

    def read(_):
        dataset = load_dataset("folder", tmp_path / "images", image_size=8)
        assert len(dataset.train) + len(dataset.test) == len(paths)
        problems = check_images(dataset.train) + check_images(dataset.test)
        order = [(0, torch.arange(len(dataset.train)))]
        (batch,) = dataset.train.batches(order, device=torch.device("cpu"), augmentation=None)
        assert batch.images.shape == (len(dataset.train), 3, 8, 8)
        assert batch.images.isfinite().all()
        assert len(problems) <= 1
        return problems

    named = 0
    for _ in range(FUZZ_INPUTS):
        path = chance.choice(paths)
        path.write_bytes(mutated_bytes(originals[path], chance))
        problems, error = call_reader(read, None, DataError)
        message = error or "".join(problems)
        assert not message or path.name in message
        named += bool(message)
        path.write_bytes(originals[path])
        tried("a folder of images with a fuzzed one")
    assert named > FUZZ_INPUTS // 10
