"""Readers of mutated data files raise DataError or return the exact content, without crashes or hangs."""

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
