"""Fuzzed data files: a clean DataError, or exactly what stands in them; never a crash, a hang or a part."""

import gzip
import io
import pickle
import random

import numpy as np
import pytest
import torch

from faults.mutation import answer, mutated_bytes
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
    write_pictures,
)
from spherenet.data import check_images, load_dataset
from spherenet.data.cifar import find_cifar, read_cifar
from spherenet.errors import DataError

POINT = 11


def fuzz(read, data, tried, what, times=FUZZ_INPUTS, seed=0):
    """Give a reader mutations of a file; both answers must occur."""
    chance = random.Random(seed)
    refused = 0
    for _ in range(times):
        _, sentence = answer(read, mutated_bytes(data, chance), DataError)
        refused += sentence is not None
        tried(what)
    assert refused > times // 10


def read_set(form, folder):
    """Read a set and check that it is one: all pictures, all labels in range."""
    train, test = read_cifar(form, find_cifar(form, folder))
    for split, parts in ((train, form.train), (test, form.test)):
        assert split.pictures.shape == (COUNT * len(parts), 32, 32, 3)
        assert split.pictures.dtype == torch.uint8
        assert split.labels.shape == (COUNT * len(parts),)
        assert 0 <= int(split.labels.min()) <= int(split.labels.max()) < len(form.classes)
    return train, test


@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
def test_cifar_binary(tmp_path, tried, form):
    folder = write_folder(tmp_path / form.binary_folder, binary_files(form))
    path = folder / f"{next(iter(form.train))}.bin"

    def read(data):
        path.write_bytes(data)
        train, _ = read_set(form, tmp_path)
        records = np.frombuffer(data, np.uint8).reshape(COUNT, 3072 + form.label_bytes)
        assert train.labels[:COUNT].tolist() == records[:, form.label_bytes - 1].tolist()
        pictures = records[:, form.label_bytes :].reshape(COUNT, 3, 32, 32).transpose(0, 2, 3, 1)
        assert np.array_equal(train.pictures[:COUNT], pictures)

    fuzz(read, path.read_bytes(), tried, "a fuzzed CIFAR binary file")


class Oracle(pickle.Unpickler):
    """Python's own reader, let loose on numpy's arrays alone."""

    def find_class(self, module, name):
        if module.split(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(module)
        return super().find_class(module, name)


def by_python(data):
    """What Python reads, None where it refuses; it is stricter than ours on the frames that newer protocols have."""
    try:
        return Oracle(io.BytesIO(data)).load()
    except Exception:
        return None


@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_cifar_pickled(tmp_path, tried, form, protocol):
    folder = write_folder(tmp_path / form.python_folder, pickled_files(form, protocol))
    path = folder / next(iter(form.train))
    whole = path.read_bytes()

    def read(data):
        path.write_bytes(data)
        train, _ = read_set(form, tmp_path)
        expected = by_python(data)
        if expected is not None:
            batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in expected.items()}
            assert train.labels[:COUNT].tolist() == list(batch[form.label_key])
            pictures = batch["data"].reshape(COUNT, 3, 32, 32).transpose(0, 2, 3, 1)
            assert np.array_equal(train.pictures[:COUNT], pictures)

    # The instructions at both ends, not only the pixels between them.
    times, what = FUZZ_INPUTS // 4, "a fuzzed CIFAR -py file"
    fuzz(lambda data: read(data + whole[400:]), whole[:400], tried, what, times, seed=protocol)
    fuzz(lambda data: read(whole[:-400] + data), whole[-400:], tried, what, times, seed=protocol + 10)


def test_archives(tmp_path, tried):
    path = write_archive(tmp_path / SMALL10.archive, members_of(SMALL10))
    expected = read_set(SMALL10, tmp_path)

    def read(data):
        path.write_bytes(data)
        for found, whole in zip(read_set(SMALL10, tmp_path), expected, strict=True):
            assert torch.equal(found.pictures, whole.pictures)
            assert torch.equal(found.labels, whole.labels)

    fuzz(read, path.read_bytes(), tried, "a fuzzed archive", FUZZ_INPUTS // 2)


def test_archives_inside_their_compression(tmp_path, tried):
    path = write_archive(tmp_path / SMALL10.archive, members_of(SMALL10))
    unpacked = gzip.decompress(path.read_bytes())
    headers = unpacked[:1024]

    def read(data):
        path.write_bytes(gzip.compress(data + unpacked[1024:], 1))
        read_set(SMALL10, tmp_path)

    fuzz(read, headers, tried, "an archive with fuzzed headers", FUZZ_INPUTS // 2)


def test_picture_folders(tmp_path, tried):
    """A damaged picture is named; a folder is read whole or not at all."""
    paths = write_pictures(tmp_path / "pictures", per_class=4)
    whole = {path: path.read_bytes() for path in paths}
    chance = random.Random(0)

    def read(_):
        dataset = load_dataset("folder", tmp_path / "pictures", image_size=8)
        assert len(dataset.train) + len(dataset.test) == len(paths)
        complaints = check_images(dataset.train) + check_images(dataset.test)
        order = [(0, torch.arange(len(dataset.train)))]
        (batch,) = dataset.train.batches(order, device=torch.device("cpu"), augmentation=None)
        assert batch.images.shape == (len(dataset.train), 3, 8, 8)
        assert batch.images.isfinite().all()
        assert len(complaints) <= 1
        return complaints

    named = 0
    for _ in range(FUZZ_INPUTS):
        path = chance.choice(paths)
        path.write_bytes(mutated_bytes(whole[path], chance))
        complaints, sentence = answer(read, None, DataError)
        said = sentence or "".join(complaints)
        assert not said or path.name in said
        named += bool(said)
        path.write_bytes(whole[path])
        tried("a folder of pictures with a fuzzed one")
    assert named > FUZZ_INPUTS // 10
