"""CIFAR as a folder and as an archive: both give the same data, and errors name the file."""

import os
import shutil
import tarfile

import numpy as np
import pytest
import torch

from spherenet.data import DATASETS, load_dataset
from spherenet.data.cifar import CIFAR10, CIFAR100, cifar_info, find_cifar, read_cifar
from spherenet.errors import DataError


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


@pytest.mark.parametrize("layout", ["folder", "archive"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_folder_and_archive_give_the_same_data(tmp_path, request, name, layout):
    tiny = request.getfixturevalue(name)
    (tiny.write_folder if layout == "folder" else tiny.write_archive)(tmp_path)
    train, test = read(tiny, tmp_path)
    assert np.array_equal(np.concatenate([train.images, test.images]), tiny.images)
    assert np.array_equal(np.concatenate([train.labels, test.labels]), tiny.labels)
    assert len(train.labels) == tiny.train_count
    assert train.images.dtype == torch.uint8
    assert train.images.is_contiguous()
    assert train.labels.dtype == torch.int64


def test_data_dir_may_be_the_folder_itself(tmp_path, cifar10):
    train, _ = read(cifar10, cifar10.write_folder(tmp_path))
    assert np.array_equal(train.images, cifar10.images[: cifar10.train_count])


def test_folder_is_preferred(tmp_path, cifar10):
    assert find_cifar(cifar10.form, tmp_path) is None
    assert find_cifar(cifar10.form, tmp_path / "nowhere") is None
    archive = cifar10.write_archive(tmp_path)
    assert find_cifar(cifar10.form, tmp_path) == archive
    folder = cifar10.write_folder(tmp_path)
    assert find_cifar(cifar10.form, tmp_path) == folder


@pytest.mark.parametrize("name", ["cifar-10-batches-py", "cifar-10-python.tar.gz"])
def test_pickled_files_are_named_and_not_read(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=f"; {name} has pickled files, which are not read\\): download it with"):
        load_dataset("cifar10", tmp_path, download=False)


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
        "data_batch_2.bin",
        lambda data: b"",
        "data_batch_2.bin' must have 184380 bytes, 60 images of 3073, got 0",
    ),
    "truncated": ("data_batch_2.bin", lambda data: data[:-1], "must have 184380 bytes, .*, got 184379"),
    "one image missing": ("test_batch.bin", lambda data: data[:-3073], "must have 184380 bytes, .*, got 181307"),
    "one image too many": (
        "test_batch.bin",
        lambda data: data + bytes(3073),
        "at most 184,380 bytes, got 187,453",
    ),
    "label": (
        "data_batch_3.bin",
        relabel(3073 * 7, 10),
        "labels in .*data_batch_3.bin' must be from 0 to 9, got 10 for image 7",
    ),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_file_is_refused(tmp_path, cifar10, case):
    name, mutate, message = CORRUPT[case]
    change(cifar10.write_folder(tmp_path) / name, mutate)
    with pytest.raises(DataError, match=message) as caught:
        read(cifar10, tmp_path)
    assert len(str(caught.value).splitlines()) == 1


OTHER_ARCHIVES = {
    "truncated": lambda data: data[: len(data) // 2],
    "without its last byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "text": lambda data: b"<html>",
    "one bit": lambda data: data[:5000] + bytes([data[5000] ^ 4]) + data[5001:],
}


@pytest.mark.parametrize("case", OTHER_ARCHIVES)
def test_other_archive_is_refused_before_it_is_parsed(tmp_path, cifar10, case, monkeypatch):
    change(cifar10.write_archive(tmp_path), OTHER_ARCHIVES[case])
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(DataError, match=r"must have [0-9]+ bytes and the SHA-256 .*: delete it to download it again"):
        read(cifar10, tmp_path)


def test_pipe_in_place_of_an_archive_does_not_block(tmp_path, cifar10):
    os.mkfifo(tmp_path / cifar10.form.archive)
    with pytest.raises(DataError, match=r"cannot be read \(must be a regular file, got a pipe"):
        read_cifar(cifar10.form, tmp_path / cifar10.form.archive)


def test_missing_file_is_named(tmp_path, cifar10):
    (cifar10.write_folder(tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin' cannot be read \(No such file"):
        read(cifar10, tmp_path)


def test_pipe_in_place_of_a_file_does_not_block(tmp_path, cifar10):
    path = cifar10.write_folder(tmp_path) / "test_batch.bin"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="must be a regular file, got a pipe"):
        read(cifar10, tmp_path)


@pytest.fixture
def small_official(monkeypatch, cifar10):
    """Replace the official data set by the small one."""
    monkeypatch.setitem(DATASETS, "cifar10", cifar_info(cifar10.form, augmentation="flip"))
    return cifar10


def test_load_dataset_from_archive(tmp_path, small_official, collect):
    small_official.write_archive(tmp_path)
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
    small_official.write_folder(tmp_path / "data")
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
    for text in (str(tmp_path), "cifar-100-binary/", "cifar-100-binary.tar.gz", "spherenet data cifar100 --download"):
        assert text in str(caught.value)


def test_fewer_images_than_official_are_refused(tmp_path, cifar10):
    cifar10.write_folder(tmp_path)
    with pytest.raises(DataError, match=r"must have 30730000 bytes, .*, got 184380"):
        load_dataset("cifar10", tmp_path, download=False)
