"""CIFAR-10 and CIFAR-100 in every form they are handed out in, read into one uint8 tensor for each split."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spherenet.data.archives import read_members
from spherenet.data.cifar_formats import CifarFormat
from spherenet.data.download import download
from spherenet.data.split import Progress
from spherenet.data.unpickling import Array, read_pickled_dict
from spherenet.errors import DataError

__all__ = ["CifarSource", "fetch_cifar", "find_cifar", "read_cifar"]

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
