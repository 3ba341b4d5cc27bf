"""CIFAR in every official layout: all give the same data, and errors name the file."""

import os
import pickle
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from spherenet.data import DATASETS, load_dataset
from spherenet.data.cifar import CIFAR10, CIFAR100, cifar_info, find_cifar, read_cifar
from spherenet.errors import DataError

LAYOUTS = ["bin", "py", "py2", "py4", "py5", "bin.tar.gz", "py.tar.gz", "py4.tar.gz"]


def read(tiny, root):
    return read_cifar(tiny.form, find_cifar(tiny.form, root))


def test_official_counts_and_classes():
    assert sum(CIFAR10.train.values()) == sum(CIFAR100.train.values()) == 50_000
    assert sum(CIFAR10.test.values()) == sum(CIFAR100.test.values()) == 10_000
    assert len(set(CIFAR10.classes)) == 10
    assert len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)
    assert CIFAR10.url.startswith("https://")
    assert CIFAR100.url.startswith("https://")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_every_layout_gives_the_same_data(tmp_path, request, name, layout):
    tiny = request.getfixturevalue(name)
    tiny.write(tmp_path, layout)
    train, test = read(tiny, tmp_path)
    assert np.array_equal(np.concatenate([train.images, test.images]), tiny.images)
    assert np.array_equal(np.concatenate([train.labels, test.labels]), tiny.labels)
    assert len(train.labels) == tiny.train_count
    assert train.images.dtype == torch.uint8
    assert train.images.is_contiguous()
    assert train.labels.dtype == torch.int64


def test_python2_pickle_is_valid(cifar100):
    data = cifar100.pickled_files()["train"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy has renamed its modules
        batch = pickle.loads(data, encoding="bytes")
    assert sorted(batch) == [b"batch_label", b"coarse_labels", b"data", b"filenames", b"fine_labels"]
    assert batch[b"data"].shape == (120, 3072)


def test_data_dir_may_be_the_binary_or_python_folder(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    cifar10.write(tmp_path, "py")
    for folder in (cifar10.form.binary_folder, cifar10.form.python_folder):
        train, _ = read(cifar10, tmp_path / folder)
        assert np.array_equal(train.images, cifar10.images[: cifar10.train_count])


def test_binary_folder_is_preferred(tmp_path, cifar10):
    for layout in ("py.tar.gz", "bin.tar.gz", "py", "bin"):
        cifar10.write(tmp_path, layout)
        source = find_cifar(cifar10.form, tmp_path)
    assert source.path == tmp_path / cifar10.form.binary_folder
    assert find_cifar(cifar10.form, tmp_path / "nowhere") is None


def change(path, mutate):
    data = bytearray(path.read_bytes())
    path.write_bytes(mutate(data))


def relabel(position, value):
    def mutate(data):
        data[position] = value
        return data

    return mutate


CORRUPT = {
    "empty": (
        "bin",
        "data_batch_2.bin",
        lambda data: b"",
        "data_batch_2.bin' must have 184380 bytes, 60 images of 3073, got 0",
    ),
    "truncated": ("bin", "data_batch_2.bin", lambda data: data[:-1], "must have 184380 bytes, .*, got 184379"),
    "one image missing": ("bin", "test_batch.bin", lambda data: data[:-3073], "must have 184380 bytes, .*, got 181307"),
    "one image too many": (
        "bin",
        "test_batch.bin",
        lambda data: data + bytes(3073),
        "at most 184,380 bytes, got 187,453",
    ),
    "label": (
        "bin",
        "data_batch_3.bin",
        relabel(3073 * 7, 10),
        "labels in .*data_batch_3.bin' must be from 0 to 9, got 10 for image 7",
    ),
    "pickle truncated": ("py", "data_batch_1", lambda data: data[:-100], "not a pickled CIFAR file, or is corrupt"),
    "pickle empty": ("py", "data_batch_1", lambda data: b"", "not a pickled CIFAR file, or is corrupt"),
    "pickle too long": ("py", "data_batch_1", lambda data: data + bytes(1 << 20), "must have at most"),
    "archive truncated": ("bin.tar.gz", None, lambda data: data[: len(data) // 2], "corrupt or truncated"),
    "archive without its last byte": ("bin.tar.gz", None, lambda data: data[:-1], "corrupt or truncated"),
    "archive empty": ("bin.tar.gz", None, lambda data: b"", "does not hold"),
    "archive replaced by text": ("bin.tar.gz", None, lambda data: b"<html>", "corrupt or truncated"),
    "archive, one bit": ("bin.tar.gz", None, lambda data: flip_bit(data), "the archive"),
}


def flip_bit(data):
    data[len(data) * 2 // 3] ^= 4
    return data


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_file_is_refused(tmp_path, cifar10, case):
    layout, name, mutate, message = CORRUPT[case]
    cifar10.write(tmp_path, layout)
    folder = {"bin": cifar10.form.binary_folder, "py": cifar10.form.python_folder}.get(layout)
    change(tmp_path / folder / name if name else tmp_path / cifar10.form.archive, mutate)
    with pytest.raises(DataError, match=message) as caught:
        read(cifar10, tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_file_is_named(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    (tmp_path / cifar10.form.binary_folder / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin' cannot be read \(No such file"):
        read(cifar10, tmp_path)


def test_pipe_in_place_of_a_file_does_not_block(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    (tmp_path / cifar10.form.binary_folder / "test_batch.bin").unlink()
    os.mkfifo(tmp_path / cifar10.form.binary_folder / "test_batch.bin")
    with pytest.raises(DataError, match="must be a regular file, got a pipe"):
        read(cifar10, tmp_path)


PICKLED = {
    "no data": ({b"labels": [0]}, "must hold 'data', an array of uint8 .60, 3072."),
    "other type": ({b"data": np.zeros((60, 3072), np.int16), b"labels": [0] * 60}, "must hold 'data'"),
    "other shape": ({b"data": np.zeros((30, 6144), np.uint8), b"labels": [0] * 60}, "must hold 'data'"),
    "no labels": ({b"data": np.zeros((60, 3072), np.uint8)}, "must hold 'labels', a list of 60 integers"),
    "few labels": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": [0] * 59}, "must hold 'labels'"),
    "text for labels": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": ["0"] * 60}, "must hold 'labels'"),
    "huge label": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": [0] * 59 + [10**30]}, "must hold 'labels'"),
    "label 11": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": [0] * 59 + [11]}, "got 11 for image 59"),
    "label -1": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": np.full(60, -1)}, "got -1 for image 0"),
    "a list": ([1, 2], "it does not hold a dict"),
}


@pytest.mark.parametrize("case", PICKLED)
@pytest.mark.parametrize("protocol", [2, 4])
def test_pickle_of_other_data_is_refused(tmp_path, cifar10, case, protocol):
    value, message = PICKLED[case]
    cifar10.write(tmp_path, "py")
    (tmp_path / cifar10.form.python_folder / "data_batch_1").write_bytes(pickle.dumps(value, protocol=protocol))
    with pytest.raises(DataError, match=message):
        read(cifar10, tmp_path)


def test_fortran_order_and_label_array_are_read(tmp_path, cifar10):
    cifar10.write(tmp_path, "py")
    planes = cifar10.images.transpose(0, 3, 1, 2).reshape(360, -1)
    for name, rows in cifar10.rows.items():
        batch = {"data": np.asfortranarray(planes[rows]), "labels": cifar10.labels[rows].astype(">i4")}
        (tmp_path / cifar10.form.python_folder / name).write_bytes(pickle.dumps(batch, protocol=3))
    train, _ = read(cifar10, tmp_path)
    assert np.array_equal(train.images, cifar10.images[: cifar10.train_count])
    assert np.array_equal(train.labels, cifar10.labels[: cifar10.train_count])


@pytest.fixture
def small_official(monkeypatch, cifar10):
    """Replace the official data set by the small one."""
    monkeypatch.setitem(DATASETS, "cifar10", cifar_info(cifar10.form, augmentation="flip"))
    return cifar10


def test_load_dataset_from_archive(tmp_path, small_official, collect):
    small_official.write(tmp_path, "bin.tar.gz")
    dataset = load_dataset("cifar10", tmp_path, download=False)
    assert dataset.name == "cifar10"
    assert dataset.classes[6] == "frog"
    batch = collect(dataset.train, [0, 299])[0]
    expected = (torch.from_numpy(small_official.images[[0, 299]]).permute(0, 3, 1, 2).float() - 127.5) / 128
    assert torch.equal(batch.images, expected)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    gray = load_dataset("cifar10", tmp_path, image_size=16, channels=1, download=False)
    assert collect(gray.test, [5])[0].images.shape == (1, 1, 16, 16)


def test_data_folder_from_environment(tmp_path, small_official, monkeypatch):
    small_official.write(tmp_path / "data", "bin")
    monkeypatch.setenv("SPHERENET_DATA", str(tmp_path / "data"))
    assert len(load_dataset("cifar10", download=False).train) == 300
    with pytest.raises(DataError, match="elsewhere"):
        load_dataset("cifar10", tmp_path / "elsewhere", download=False)
    monkeypatch.delenv("SPHERENET_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shutil.copytree(tmp_path / "data", tmp_path / "spherenet" / "data")
    assert len(load_dataset("cifar10", download=False).train) == 300


def test_missing_data_names_searched_files(tmp_path):
    with pytest.raises(DataError) as caught:
        load_dataset("cifar100", tmp_path, download=False)
    for text in (str(tmp_path), "cifar-100-binary/", "cifar-100-python.tar.gz", "spherenet data cifar100 --download"):
        assert text in str(caught.value)


def test_fewer_images_than_official_are_refused(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    with pytest.raises(DataError, match=r"must have 30730000 bytes, .*, got 184380"):
        load_dataset("cifar10", tmp_path, download=False)
    assert replace(cifar10.form, train=CIFAR10.train, test=CIFAR10.test) == CIFAR10
