"""What CIFAR-10 and CIFAR-100 are: names, counts and places of everything in the official archives.

The facts are those of https://www.cs.toronto.edu/~kriz/cifar.html; the SHA-256 are the ones that TensorFlow Datasets
pins for the same archives (the page itself gives MD5 only).

CIFAR-10 and CIFAR-100 in every form they are handed out in, read into one uint8 tensor for each split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spherenet.data.archives import download, read_members
from spherenet.data.splits import Progress
from spherenet.data.unpickling import Array, read_pickled_dict
from spherenet.errors import DataError

__all__ = ["CIFAR10", "CIFAR100", "CifarFormat", "CifarSource", "fetch_cifar", "find_cifar", "read_cifar"]


@dataclass(frozen=True)
class CifarFormat:
    """The official form of one of the two sets: names, counts and places of everything in it.

    `train` and `test` give the number of pictures of each file (named `x.bin` in the binary layout, `x` in the
    pickled one). A binary record is `label_bytes` labels, of which the last is the class, then the planes of red,
    green and blue.
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
    train={f"data_batch_{part}": 10_000 for part in range(1, 6)},
    test={"test_batch": 10_000},
    label_bytes=1,
    label_key="labels",
    archive="cifar-10-binary.tar.gz",
    python_archive="cifar-10-python.tar.gz",
    archive_bytes=170_052_171,
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)

CLASSES_OF_100 = (
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
    classes=CLASSES_OF_100,
    binary_folder="cifar-100-binary",
    python_folder="cifar-100-python",
    train={"train": 50_000},
    test={"test": 10_000},
    label_bytes=2,  # one of 20 superclasses, then the class
    label_key="fine_labels",
    archive="cifar-100-binary.tar.gz",
    python_archive="cifar-100-python.tar.gz",
    archive_bytes=168_513_733,
    archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)


SIDE = 32
PIXELS = 3 * SIDE * SIDE
INSTRUCTIONS_PER_PICTURE = 16  # of a pickled batch: a label or two and a file name take about 8


class CifarSource(NamedTuple):
    """Where a set was found: a folder or an archive, of binary or of pickled files."""

    path: Path
    pickled: bool
    archived: bool


class Pictures(NamedTuple):
    """One split: pictures uint8 [N, 32, 32, 3], labels int64 [N]."""

    pictures: Tensor
    labels: Tensor


def find_cifar(form: CifarFormat, folder: Path) -> CifarSource | None:
    """Return the first of the official forms that is in `folder`, by its name alone; nothing is read.

    In this order: the folder of binary files, that of pickled ones, the binary archive, the pickled one. `folder` may
    also be one of the two folders itself.
    """
    first = next(iter(form.train))
    for name, pickled, file in ((form.binary_folder, False, f"{first}.bin"), (form.python_folder, True, first)):
        for place in (folder / name, folder):
            if os.path.isdir(place) if place != folder else os.path.isfile(folder / file):
                return CifarSource(place, pickled, archived=False)
    for name, pickled in ((form.archive, False), (form.python_archive, True)):
        if os.path.isfile(folder / name):
            return CifarSource(folder / name, pickled, archived=True)
    return None


def fetch_cifar(form: CifarFormat, folder: Path, progress: Progress | None = None) -> CifarSource:
    """Download the official binary archive into `folder`, verified."""
    target = folder / form.archive
    download(form.url, target, size=form.archive_bytes, sha256=form.archive_sha256, progress=progress)
    return CifarSource(target, pickled=False, archived=True)


def read_cifar(form: CifarFormat, source: CifarSource) -> tuple[Pictures, Pictures]:
    """Return the training and the test split; anything missing, too long, too short or out of range is a DataError."""
    counts = {**form.train, **form.test}
    names = {part: part if source.pickled else f"{part}.bin" for part in counts}
    if source.pickled:  # as text, in the protocols for Python 2, a byte may take two
        longest = {names[part]: count * (2 * PIXELS + 256) + (1 << 16) for part, count in counts.items()}
    else:
        longest = {names[part]: count * (form.label_bytes + PIXELS) for part, count in counts.items()}
    if source.archived:
        prefix = form.python_folder if source.pickled else form.binary_folder
        members = read_members(source.path, {f"{prefix}/{name}": length for name, length in longest.items()})
        contents = {name: members[f"{prefix}/{name}"] for name in longest}
    else:
        contents = {name: _read_file(source.path / name, length) for name, length in longest.items()}
    parse = _parsed_pickle if source.pickled else _parsed_binary

    def split(parts: Mapping[str, int]) -> Pictures:
        # Stored [N, H, W, C], so that the view [N, C, H, W] is channels-last.
        pictures = np.empty((sum(parts.values()), SIDE, SIDE, 3), dtype=np.uint8)
        labels = np.empty(len(pictures), dtype=np.int64)
        start = 0
        for part, count in parts.items():
            where = str(source.path / names[part])
            planes, labels[start : start + count] = parse(contents.pop(names[part]), where, count, form)
            pictures[start : start + count] = planes.reshape(count, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
            _require_labels(labels[start : start + count], where, len(form.classes))
            start += count
        return Pictures(torch.from_numpy(pictures), torch.from_numpy(labels))

    return split(form.train), split(form.test)


def _read_file(path: Path, longest: int) -> bytes:
    if not os.path.isfile(path):
        raise DataError(f"the file {str(path)!r} is missing: the set is not whole.")
    try:
        with path.open("rb") as file:
            data = file.read(longest + 1)
    except OSError as error:
        raise DataError(f"the file {str(path)!r} cannot be read: {error.strerror}.") from None
    if len(data) > longest:
        raise DataError(f"the file {str(path)!r} is longer than the {longest} bytes that it may have.")
    return data


def _parsed_binary(data: bytes, where: str, count: int, form: CifarFormat) -> tuple[Array, Array]:
    record = form.label_bytes + PIXELS
    if len(data) != count * record:
        raise DataError(
            f"{where!r} has {len(data)} bytes instead of {count * record}, {count} pictures of {record}: "
            "damaged or cut short."
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(count, record)
    return records[:, form.label_bytes :], records[:, form.label_bytes - 1]


def _parsed_pickle(data: bytes, where: str, count: int, form: CifarFormat) -> tuple[Array, Array]:
    batch = read_pickled_dict(data, where, most_instructions=count * INSTRUCTIONS_PER_PICTURE + 1000)
    planes, labels = batch.get("data"), batch.get(form.label_key)
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8 or planes.shape != (count, PIXELS):
        raise DataError(f"{where!r} must hold 'data', an array of uint8 [{count}, {PIXELS}].")
    if isinstance(labels, list) and all(type(label) is int and 0 <= label < 1 << 31 for label in labels):
        labels = np.array(labels, dtype=np.int64)
    if not isinstance(labels, np.ndarray) or labels.shape != (count,):
        raise DataError(f"{where!r} must hold {form.label_key!r}, a list of {count} whole numbers.")
    return planes, labels


def _require_labels(labels: Array, where: str, classes: int) -> None:
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        index = int(outside[0])
        raise DataError(f"{where!r} gives picture {index} the label {labels[index]}; allowed are 0 to {classes - 1}.")
