"""CIFAR-10 and CIFAR-100 in every official layout, read into one uint8 tensor per split.

Names and counts are from https://www.cs.toronto.edu/~kriz/cifar.html. That page states MD5 only; the SHA-256 are those
that TensorFlow Datasets pins for the same archives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spherenet._util.files import read_regular
from spherenet.data.archives import data_folder, download, read_members
from spherenet.data.splits import DataDir, Dataset, DatasetInfo, LoadOptions, TensorSplit
from spherenet.data.unpickling import Array, read_pickled_dict
from spherenet.errors import DataError

__all__ = ["CIFAR10", "CIFAR100", "CifarFormat", "CifarSource", "cifar_info", "find_cifar", "read_cifar"]

SIDE = 32
PIXELS = 3 * SIDE * SIDE
OPCODES_PER_IMAGE = 16  # of a pickled file: a label or two and a file name take about 8


@dataclass(frozen=True)
class CifarFormat:
    """Official format of one of the two data sets.

    Attributes:
        name: Name of the data set.
        classes: Names of the classes.
        binary_folder: Folder of the binary layout, whose files are named `x.bin`.
        python_folder: Folder of the pickled layout, whose files are named `x`.
        train: Number of images per training file.
        test: Number of images per test file.
        label_bytes: Labels at the start of a binary record, of which the last is the class; the planes of red, green
            and blue follow.
        label_key: Key of the labels in a pickled file.
        archive: Name of the binary archive.
        python_archive: Name of the pickled archive.
        archive_bytes: Size of the binary archive.
        archive_sha256: SHA-256 of the binary archive.
        url: Address of the binary archive.
    """

    name: str
    classes: tuple[str, ...]
    binary_folder: str
    python_folder: str
    train: Mapping[str, int]
    test: Mapping[str, int]
    label_bytes: int
    label_key: str
    archive: str
    python_archive: str
    archive_bytes: int
    archive_sha256: str
    url: str


CIFAR10 = CifarFormat(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    binary_folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    train={f"data_batch_{number}": 10_000 for number in range(1, 6)},
    test={"test_batch": 10_000},
    label_bytes=1,
    label_key="labels",
    archive="cifar-10-binary.tar.gz",
    python_archive="cifar-10-python.tar.gz",
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
    python_folder="cifar-100-python",
    train={"train": 50_000},
    test={"test": 10_000},
    label_bytes=2,  # the superclass (of 20), then the class
    label_key="fine_labels",
    archive="cifar-100-binary.tar.gz",
    python_archive="cifar-100-python.tar.gz",
    archive_bytes=168_513_733,
    archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)


class CifarSource(NamedTuple):
    """Location and layout of a data set: a folder or an archive, of binary or of pickled files."""

    path: Path
    pickled: bool
    archived: bool


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
    source = find_cifar(cifar, data_folder(data_dir))
    return source.path if source else None


def _load(cifar: CifarFormat, options: LoadOptions) -> Dataset:
    """Read the data set, after a download if it is missing and `options.download` allows it."""
    folder = data_folder(options.data_dir)
    source = find_cifar(cifar, folder)
    if source is None:
        if not options.download:
            names = f"{cifar.binary_folder}/, {cifar.python_folder}/, {cifar.archive}, {cifar.python_archive}"
            raise DataError(
                f"{cifar.name} was not found in {str(folder)!r} (searched for {names}): download it with "
                f"'spherenet data {cifar.name} --download' or set --data-dir or SPHERENET_DATA."
            )
        target = folder / cifar.archive
        size, sha256 = cifar.archive_bytes, cifar.archive_sha256
        download(cifar.url, target, size=size, sha256=sha256, progress=options.progress)
        source = CifarSource(target, pickled=False, archived=True)
    train, test = (TensorSplit(*split, options.preprocessing) for split in read_cifar(cifar, source))
    return Dataset(cifar.name, cifar.classes, options.preprocessing, train, test)


def find_cifar(cifar: CifarFormat, folder: Path) -> CifarSource | None:
    """Return the first official layout in `folder`, judged by names alone; nothing is read.

    The order is: binary folder, pickled folder, binary archive, pickled archive. `folder` may also be the binary or
    the pickled folder itself.
    """
    first = next(iter(cifar.train))
    for name, pickled, file in ((cifar.binary_folder, False, f"{first}.bin"), (cifar.python_folder, True, first)):
        if os.path.isdir(folder / name):
            return CifarSource(folder / name, pickled, archived=False)
        if os.path.isfile(folder / file):
            return CifarSource(folder, pickled, archived=False)
    for name, pickled in ((cifar.archive, False), (cifar.python_archive, True)):
        if os.path.isfile(folder / name):
            return CifarSource(folder / name, pickled, archived=True)
    return None


def read_cifar(cifar: CifarFormat, source: CifarSource) -> tuple[Images, Images]:
    """Return the training and the test split.

    Raises:
        DataError: A file is missing, too long, too short or corrupt, or a label is out of range.
    """
    counts = {**cifar.train, **cifar.test}
    file_names = {name: name if source.pickled else f"{name}.bin" for name in counts}
    # Protocols for Python 2 store bytes as text, which takes up to two bytes per byte.
    record = 2 * PIXELS + 256 if source.pickled else cifar.label_bytes + PIXELS
    margin = 1 << 16 if source.pickled else 0
    limits = {file_names[name]: count * record + margin for name, count in counts.items()}
    if source.archived:
        prefix = cifar.python_folder if source.pickled else cifar.binary_folder
        members = read_members(source.path, {f"{prefix}/{name}": limit for name, limit in limits.items()})
        contents = {name: members[f"{prefix}/{name}"] for name in limits}
    else:
        contents = {name: _read_file(source.path / name, limit) for name, limit in limits.items()}
    parse = _parse_pickle if source.pickled else _parse_binary

    def split(files: Mapping[str, int]) -> Images:
        # Stored as [N, H, W, C], so that the view [N, C, H, W] is channels-last.
        images = np.empty((sum(files.values()), SIDE, SIDE, 3), dtype=np.uint8)
        labels = np.empty(len(images), dtype=np.int64)
        start = 0
        for name, count in files.items():
            path = str(source.path / file_names[name])
            planes, labels[start : start + count] = parse(contents.pop(file_names[name]), path, count, cifar)
            images[start : start + count] = planes.reshape(count, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
            _require_labels(labels[start : start + count], path, len(cifar.classes))
            start += count
        return Images(torch.from_numpy(images), torch.from_numpy(labels))

    return split(cifar.train), split(cifar.test)


def _read_file(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit, follow_links=True)
    except OSError as error:
        raise DataError(f"the file {str(path)!r} cannot be read ({error.strerror}).") from None


def _parse_binary(data: bytes, path: str, count: int, cifar: CifarFormat) -> tuple[Array, Array]:
    record = cifar.label_bytes + PIXELS
    if len(data) != count * record:
        raise DataError(f"{path!r} must have {count * record} bytes, {count} images of {record}, got {len(data)}.")
    records = np.frombuffer(data, dtype=np.uint8).reshape(count, record)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1]


def _parse_pickle(data: bytes, path: str, count: int, cifar: CifarFormat) -> tuple[Array, Array]:
    batch = read_pickled_dict(data, path, max_opcodes=count * OPCODES_PER_IMAGE + 1000)
    planes, labels = batch.get("data"), batch.get(cifar.label_key)
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or planes.shape != (count, PIXELS):
        raise DataError(f"{path!r} must hold 'data', an array of uint8 [{count}, {PIXELS}].")
    if isinstance(labels, list) and all(type(label) is int and 0 <= label < 1 << 31 for label in labels):
        labels = np.array(labels, dtype=np.int64)
    if not isinstance(labels, np.ndarray) or labels.shape != (count,):
        raise DataError(f"{path!r} must hold {cifar.label_key!r}, a list of {count} integers.")
    return planes, labels


def _require_labels(labels: Array, path: str, classes: int) -> None:
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        index = int(outside[0])
        raise DataError(f"labels in {path!r} must be from 0 to {classes - 1}, got {labels[index]} for image {index}.")
