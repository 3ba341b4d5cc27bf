"""CIFAR in every official form: all read the same, and whatever is wrong with one is named."""

import os
import pickle
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from spherenet.data import load_dataset
from spherenet.data import registry as catalogue
from spherenet.data.cifar import CIFAR10, CIFAR100, find_cifar, read_cifar
from spherenet.errors import DataError

FORMS = ["bin", "py", "py2", "py4", "py5", "bin.tar.gz", "py.tar.gz", "py4.tar.gz"]


def read(tiny, root):
    return read_cifar(tiny.form, find_cifar(tiny.form, root))


def test_the_official_numbers():
    assert sum(CIFAR10.train.values()) == sum(CIFAR100.train.values()) == 50_000
    assert sum(CIFAR10.test.values()) == sum(CIFAR100.test.values()) == 10_000
    assert len(set(CIFAR10.classes)) == 10
    assert len(set(CIFAR100.classes)) == 100
    assert list(CIFAR100.classes) == sorted(CIFAR100.classes)
    assert CIFAR10.url.startswith("https://")
    assert CIFAR100.url.startswith("https://")


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_every_form_reads_the_same(tmp_path, request, name, kind):
    tiny = request.getfixturevalue(name)
    tiny.write(tmp_path, kind)
    train, test = read(tiny, tmp_path)
    assert np.array_equal(np.concatenate([train.pictures, test.pictures]), tiny.pictures)
    assert np.array_equal(np.concatenate([train.labels, test.labels]), tiny.labels)
    assert len(train.labels) == tiny.trained
    assert train.pictures.dtype == torch.uint8
    assert train.pictures.is_contiguous()
    assert train.labels.dtype == torch.int64


def test_our_python_2_pickle_is_one(cifar100):
    data = cifar100.pickled_files()["train"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's modules have other names since
        batch = pickle.loads(data, encoding="bytes")
    assert sorted(batch) == [b"batch_label", b"coarse_labels", b"data", b"filenames", b"fine_labels"]
    assert batch[b"data"].shape == (120, 3072)


def test_the_folder_itself_may_be_named(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    cifar10.write(tmp_path, "py")
    for folder in (cifar10.form.binary_folder, cifar10.form.python_folder):
        train, _ = read(cifar10, tmp_path / folder)
        assert np.array_equal(train.pictures, cifar10.pictures[: cifar10.trained])


def test_the_binary_folder_comes_first(tmp_path, cifar10):
    for kind in ("py.tar.gz", "bin.tar.gz", "py", "bin"):
        cifar10.write(tmp_path, kind)
        found = find_cifar(cifar10.form, tmp_path)
    assert found.path == tmp_path / cifar10.form.binary_folder
    assert find_cifar(cifar10.form, tmp_path / "nowhere") is None


def change(path, how):
    data = bytearray(path.read_bytes())
    path.write_bytes(how(data))


def relabel(position, value):
    def how(data):
        data[position] = value
        return data

    return how


DAMAGE = {
    "empty": ("bin", "data_batch_2.bin", lambda data: b"", "data_batch_2.bin' has 0 bytes instead of 184380"),
    "cut": ("bin", "data_batch_2.bin", lambda data: data[:-1], "damaged or cut short"),
    "a picture short": ("bin", "test_batch.bin", lambda data: data[:-3073], "has 181307 bytes instead of 184380"),
    "a picture long": ("bin", "test_batch.bin", lambda data: data + bytes(3073), "longer than the 184380 bytes"),
    "label": (
        "bin",
        "data_batch_3.bin",
        relabel(3073 * 7, 10),
        "data_batch_3.bin' gives picture 7 the label 10; allowed",
    ),
    "pickled cut": ("py", "data_batch_1", lambda data: data[:-100], "not a pickled batch, or damaged"),
    "pickled empty": ("py", "data_batch_1", lambda data: b"", "not a pickled batch, or damaged"),
    "pickled long": ("py", "data_batch_1", lambda data: data + bytes(1 << 20), "longer than"),
    "archive cut": ("bin.tar.gz", None, lambda data: data[: len(data) // 2], "damaged or cut short"),
    "archive without its end": ("bin.tar.gz", None, lambda data: data[:-1], "damaged or cut short"),
    "archive empty": ("bin.tar.gz", None, lambda data: b"", "does not hold"),
    "archive of something else": ("bin.tar.gz", None, lambda data: b"<html>", "damaged or cut short"),
    "archive, one bit": ("bin.tar.gz", None, lambda data: flipped(data), "the archive"),
}


def flipped(data):
    data[len(data) * 2 // 3] ^= 4
    return data


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path, cifar10, case):
    kind, name, how, message = DAMAGE[case]
    cifar10.write(tmp_path, kind)
    folder = {"bin": cifar10.form.binary_folder, "py": cifar10.form.python_folder}.get(kind)
    change(tmp_path / folder / name if name else tmp_path / cifar10.form.archive, how)
    with pytest.raises(DataError, match=message) as caught:
        read(cifar10, tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_named(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    (tmp_path / cifar10.form.binary_folder / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin' is missing: the set is not whole"):
        read(cifar10, tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    (tmp_path / cifar10.form.binary_folder / "test_batch.bin").unlink()
    os.mkfifo(tmp_path / cifar10.form.binary_folder / "test_batch.bin")
    with pytest.raises(DataError, match="is missing"):
        read(cifar10, tmp_path)


PICKLED = {
    "no data": ({b"labels": [0]}, "must hold 'data', an array of uint8 .60, 3072."),
    "other type": ({b"data": np.zeros((60, 3072), np.int16), b"labels": [0] * 60}, "must hold 'data'"),
    "other shape": ({b"data": np.zeros((30, 6144), np.uint8), b"labels": [0] * 60}, "must hold 'data'"),
    "no labels": ({b"data": np.zeros((60, 3072), np.uint8)}, "must hold 'labels', a list of 60 whole numbers"),
    "few labels": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": [0] * 59}, "must hold 'labels'"),
    "text for labels": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": ["0"] * 60}, "must hold 'labels'"),
    "huge label": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": [0] * 59 + [10**30]}, "must hold 'labels'"),
    "label 11": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": [0] * 59 + [11]}, "picture 59 the label 11"),
    "label -1": ({b"data": np.zeros((60, 3072), np.uint8), b"labels": np.full(60, -1)}, "picture 0 the label -1"),
    "a list": ([1, 2], "it does not hold a dict"),
}


@pytest.mark.parametrize("case", PICKLED)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_of_something_else_is_named(tmp_path, cifar10, case, protocol):
    value, message = PICKLED[case]
    cifar10.write(tmp_path, "py")
    (tmp_path / cifar10.form.python_folder / "data_batch_1").write_bytes(pickle.dumps(value, protocol=protocol))
    with pytest.raises(DataError, match=message):
        read(cifar10, tmp_path)


def test_a_fortran_array_and_labels_as_an_array(tmp_path, cifar10):
    cifar10.write(tmp_path, "py")
    planes = cifar10.pictures.transpose(0, 3, 1, 2).reshape(360, -1)
    for part, rows in cifar10.rows.items():
        batch = {"data": np.asfortranarray(planes[rows]), "labels": cifar10.labels[rows].astype(">i4")}
        (tmp_path / cifar10.form.python_folder / part).write_bytes(pickle.dumps(batch, protocol=3))
    train, _ = read(cifar10, tmp_path)
    assert np.array_equal(train.pictures, cifar10.pictures[: cifar10.trained])
    assert np.array_equal(train.labels, cifar10.labels[: cifar10.trained])


@pytest.fixture
def small_official(monkeypatch, cifar10):
    """Let the public loader take the tiny set for the official one."""
    monkeypatch.setitem(catalogue.CIFAR_FORMATS, "cifar10", cifar10.form)
    return cifar10


def test_load_dataset(tmp_path, small_official, collect):
    small_official.write(tmp_path, "bin.tar.gz")
    dataset = load_dataset("cifar10", tmp_path, download=False)
    assert dataset.name == "cifar10"
    assert dataset.classes[6] == "frog"
    batch = collect(dataset.train, [0, 299])[0]
    expected = (torch.from_numpy(small_official.pictures[[0, 299]]).permute(0, 3, 1, 2).float() - 127.5) / 128
    assert torch.equal(batch.images, expected)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    grey = load_dataset("cifar10", tmp_path, image_size=16, channels=1, download=False)
    assert collect(grey.test, [5])[0].images.shape == (1, 1, 16, 16)


def test_the_environment_says_where(tmp_path, small_official, monkeypatch):
    small_official.write(tmp_path / "there", "bin")
    monkeypatch.setenv("SPHERENET_DATA", str(tmp_path / "there"))
    assert len(load_dataset("cifar10", download=False).train) == 300
    with pytest.raises(DataError, match="elsewhere"):
        load_dataset("cifar10", tmp_path / "elsewhere", download=False)
    monkeypatch.delenv("SPHERENET_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shutil.copytree(tmp_path / "there", tmp_path / "spherenet" / "data")
    assert len(load_dataset("cifar10", download=False).train) == 300


def test_a_wrong_folder_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError) as caught:
        load_dataset("cifar100", tmp_path, download=False)
    for part in (str(tmp_path), "cifar-100-binary/", "cifar-100-python.tar.gz", "spherenet data cifar100 --download"):
        assert part in str(caught.value)


def test_fewer_pictures_than_the_official_are_refused(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    with pytest.raises(DataError, match=r"has 184380 bytes instead of 30730000"):
        load_dataset("cifar10", tmp_path, download=False)
    assert replace(cifar10.form, train=CIFAR10.train, test=CIFAR10.test) == CIFAR10
