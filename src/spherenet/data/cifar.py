"""CIFAR-10 and CIFAR-100 in the official binary layout, read into one uint8 tensor per split.

Names and counts are from https://www.cs.toronto.edu/~kriz/cifar.html. That page states MD5 only; the SHA-256 are those
that TensorFlow Datasets pins for the same archives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spherenet._util.files import read_regular
from spherenet.data.archives import data_folder, download, read_archive
from spherenet.data.splits import DataDir, Dataset, DatasetInfo, LoadOptions, TensorSplit
from spherenet.errors import DataError

__all__ = ["CIFAR10", "CIFAR100", "CifarFormat", "cifar_info", "find_cifar", "read_cifar"]

SIDE = 32
PIXELS = 3 * SIDE * SIDE

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class CifarFormat:
    """Official format of one of the two data sets.

    Attributes:
        name: Name of the data set.
        classes: Names of the classes.
        binary_folder: Folder of the binary layout, whose files are named `x.bin`.
        pickled: Folder and archive of the pickled layout, which is not read.
        train: Number of images per training file.
        test: Number of images per test file.
        label_bytes: Labels at the start of a binary record, of which the last is the class; the planes of red, green
            and blue follow.
        archive: Name of the binary archive.
        archive_bytes: Size of the binary archive.
        archive_sha256: SHA-256 of the binary archive.
        url: Address of the binary archive.
    """

    name: str
    classes: tuple[str, ...]
    binary_folder: str
    pickled: tuple[str, str]
    train: Mapping[str, int]
    test: Mapping[str, int]
    label_bytes: int
    archive: str
    archive_bytes: int
    archive_sha256: str
    url: str


CIFAR10 = CifarFormat(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    binary_folder="cifar-10-batches-bin",
    pickled=("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    train={f"data_batch_{number}": 10_000 for number in range(1, 6)},
    test={"test_batch": 10_000},
    label_bytes=1,
    archive="cifar-10-binary.tar.gz",
    archive_bytes=170_052_171,
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)

CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip

CIFAR100 = CifarFormat(
    name="cifar100",
    classes=CIFAR100_CLASSES,
    binary_folder="cifar-100-binary",
    pickled=("cifar-100-python", "cifar-100-python.tar.gz"),
    train={"train": 50_000},
    test={"test": 10_000},
    label_bytes=2,  # the superclass (of 20), then the class
    archive="cifar-100-binary.tar.gz",
    archive_bytes=168_513_733,
    archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)


class Images(NamedTuple):
    """Images uint8 [N, 32, 32, 3] and labels int64 [N] of one split."""

    images: Tensor
    labels: Tensor


def cifar_info(cifar: CifarFormat, *, augmentation: str) -> DatasetInfo:
    """Return the registry entry of CIFAR-10 or CIFAR-100."""
    return DatasetInfo(
        summary=f"color images of {len(cifar.classes)} classes",
        classes=len(cifar.classes),
        train=sum(cifar.train.values()),
        test=sum(cifar.test.values()),
        size=(SIDE, SIDE),
        channels=3,
        augmentation=augmentation,
        find=partial(_find, cifar),
        load=partial(_load, cifar),
    )


def _find(cifar: CifarFormat, data_dir: DataDir) -> Path | None:
    return find_cifar(cifar, data_folder(data_dir))


def _load(cifar: CifarFormat, options: LoadOptions) -> Dataset:
    """Read the data set, after a download if it is missing and `options.download` allows it."""
    folder = data_folder(options.data_dir)
    path = find_cifar(cifar, folder)
    if path is None:
        if not options.download:
            pickled = [name for name in cifar.pickled if os.path.exists(folder / name)]
            unread = f"; {pickled[0]} has pickled files, which are not read" if pickled else ""
            raise DataError(
                f"{cifar.name} was not found in {str(folder)!r} (searched for {cifar.binary_folder}/ and "
                f"{cifar.archive}{unread}): download it with 'spherenet data {cifar.name} --download' or set "
                "--data-dir or SPHERENET_DATA."
            )
        path = folder / cifar.archive
        download(cifar.url, path, size=cifar.archive_bytes, sha256=cifar.archive_sha256, progress=options.progress)
    train, test = (TensorSplit(*split, options.preprocessing) for split in read_cifar(cifar, path))
    return Dataset(cifar.name, cifar.classes, options.preprocessing, train, test)


def find_cifar(cifar: CifarFormat, folder: Path) -> Path | None:
    """Return the binary folder in `folder`, else `folder` if it holds the files itself, else the archive, else None.

    Names alone decide; nothing is read.
    """
    if os.path.isdir(folder / cifar.binary_folder):
        return folder / cifar.binary_folder
    if os.path.isfile(folder / f"{next(iter(cifar.train))}.bin"):
        return folder
    return folder / cifar.archive if os.path.isfile(folder / cifar.archive) else None


def read_cifar(cifar: CifarFormat, path: Path) -> tuple[Images, Images]:
    """Return the training and the test split from the binary folder or the archive.

    Raises:
        DataError: A file is missing, too long, too short or corrupt, or a label is out of range.
    """
    record = cifar.label_bytes + PIXELS
    counts = {f"{name}.bin": count for name, count in {**cifar.train, **cifar.test}.items()}
    if os.path.isdir(path):
        contents = {name: _read_file(path / name, count * record) for name, count in counts.items()}
    else:
        names = {f"{cifar.binary_folder}/{name}" for name in counts}
        members = read_archive(path, names, size=cifar.archive_bytes, sha256=cifar.archive_sha256)
        contents = {os.path.basename(name): content for name, content in members.items()}

    def split(files: Mapping[str, int]) -> Images:
        # Stored as [N, H, W, C], so that the view [N, C, H, W] is channels-last.
        images = np.empty((sum(files.values()), SIDE, SIDE, 3), dtype=np.uint8)
        labels = np.empty(len(images), dtype=np.int64)
        start = 0
        for name, count in files.items():
            file = f"{name}.bin"
            records = _parse(contents.pop(file), str(path / file), count, record)
            rows = slice(start, start + count)
            labels[rows] = records[:, cifar.label_bytes - 1]
            images[rows] = records[:, cifar.label_bytes :].reshape(count, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
            _require_labels(labels[rows], str(path / file), len(cifar.classes))
            start += count
        return Images(torch.from_numpy(images), torch.from_numpy(labels))

    return split(cifar.train), split(cifar.test)


def _read_file(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit, follow_links=True)
    except OSError as error:
        raise DataError(f"the file {str(path)!r} cannot be read ({error.strerror}).") from None


def _parse(data: bytes, path: str, count: int, record: int) -> Array:
    """Return the bytes as [count, record]."""
    if len(data) != count * record:
        raise DataError(f"{path!r} must have {count * record} bytes, {count} images of {record}, got {len(data)}.")
    return np.frombuffer(data, dtype=np.uint8).reshape(count, record)


def _require_labels(labels: Array, path: str, classes: int) -> None:
    outside = np.flatnonzero(labels >= classes)
    if len(outside):
        index = int(outside[0])
        raise DataError(f"labels in {path!r} must be from 0 to {classes - 1}, got {labels[index]} for image {index}.")
