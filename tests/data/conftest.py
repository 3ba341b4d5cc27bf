"""Small data sets in the official layouts: real CIFAR-10 images if they are available, random ones otherwise."""

import io
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from spherenet.data.cifar import CIFAR10, CIFAR100

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
CPU = torch.device("cpu")


def real_images(count):
    """Return the first test images of CIFAR-10 [N, 32, 32, 3] and their labels, or None."""
    path = SHARED / "cifar10_test.webps"
    if not path.is_file():
        return None
    blob = path.read_bytes()
    total = int.from_bytes(blob[:4], "little")
    labels = np.frombuffer(blob, np.uint8, total, 4)[:count]
    sizes = np.frombuffer(blob, np.uint16, total, 4 + total)[:count].astype(int)
    ends = 4 + 3 * total + np.cumsum(sizes)
    images = [
        np.asarray(Image.open(io.BytesIO(blob[end - size : end])).convert("RGB"))
        for end, size in zip(ends, sizes, strict=True)
    ]
    return np.stack(images), labels


def random_images(count, classes):
    generator = np.random.default_rng(count)
    images = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return images, (np.arange(count) % classes).astype(np.uint8)


def python2_pickle(planes, labels, label_key, extra=()):
    """Return the batch as Python 2's cPickle wrote the official files: protocol 2, byte strings, old names in numpy."""

    def string(text):
        return b"U" + bytes([len(text)]) + text

    def numbers(values):
        return b"](" + b"".join(b"K" + bytes([value]) for value in values) + b"e"

    raw = planes.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01"
        + b"J" + struct.pack("<i", len(planes)) + b"M" + struct.pack("<H", planes.shape[1]) + b"\x86"
        + b"cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )  # fmt: skip
    names = b"](" + b"".join(string(b"image_%d.png" % index) for index in range(len(labels))) + b"e"
    fields = [string(b"data"), array, string(label_key), numbers(labels), string(b"filenames"), names]
    for key, values in extra:
        fields += [string(key), numbers(values)]
    return b"\x80\x02}q\x01(" + b"".join(fields) + string(b"batch_label") + string(b"batch 1 of 1") + b"u."


def write_archive(path, files):
    """Write {name: bytes} as a .tar.gz, with a member for the folder, as in the official archives."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        folder = tarfile.TarInfo(next(iter(files)).split("/")[0])
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


class TinyCifar:
    """A CIFAR data set of a few images per file that can be written in every official layout."""

    def __init__(self, form, count, images, labels):
        names = [*form.train, *form.test]
        self.form = replace(form, train=dict.fromkeys(form.train, count), test=dict.fromkeys(form.test, count))
        self.images, self.labels = images, labels
        self.rows = {name: slice(index * count, (index + 1) * count) for index, name in enumerate(names)}
        self.train_count = len(form.train) * count

    def binary_files(self):
        planes = self.images.transpose(0, 3, 1, 2).reshape(len(self.labels), -1)
        columns = (
            [self.labels[:, None]] if self.form.label_bytes == 1 else [self.labels[:, None] // 5, self.labels[:, None]]
        )
        records = np.concatenate([*columns, planes], axis=1)
        return {f"{name}.bin": records[rows].tobytes() for name, rows in self.rows.items()}

    def pickled_files(self, protocol=None):
        planes = self.images.transpose(0, 3, 1, 2).reshape(len(self.labels), -1)
        key = self.form.label_key.encode()
        files = {}
        for name, rows in self.rows.items():
            labels = self.labels[rows].tolist()
            if protocol is None:
                extra = [] if self.form.label_bytes == 1 else [(b"coarse_labels", [label // 5 for label in labels])]
                files[name] = python2_pickle(planes[rows], labels, key, extra)
            else:
                files[name] = pickle.dumps(
                    {b"data": planes[rows], key: labels, b"batch_label": b"x"}, protocol=protocol
                )
        return files

    def write(self, root, layout):
        """Write the data set below `root` as `bin`, `py`, `py<protocol>`, `bin.tar.gz` or `py.tar.gz`."""
        root.mkdir(parents=True, exist_ok=True)
        if layout.startswith("bin"):
            files, folder, archive = self.binary_files(), self.form.binary_folder, self.form.archive
            files["readme.html"] = b"<p>read me"
        else:
            protocol = int(layout[2]) if layout[2:3].isdigit() else None
            files, folder, archive = self.pickled_files(protocol), self.form.python_folder, self.form.python_archive
        if layout.endswith(".tar.gz"):
            write_archive(root / archive, {f"{folder}/{name}": data for name, data in files.items()})
        else:
            (root / folder).mkdir()
            for name, data in files.items():
                (root / folder / name).write_bytes(data)


@pytest.fixture(scope="session")
def cifar10():
    """CIFAR-10 with 60 images per file."""
    return TinyCifar(CIFAR10, 60, *(real_images(360) or random_images(360, 10)))


@pytest.fixture(scope="session")
def cifar100():
    return TinyCifar(CIFAR100, 120, *random_images(240, 100))


@pytest.fixture(scope="session")
def files():
    """Functions that write archives and pickles."""
    return SimpleNamespace(write_archive=write_archive, python2_pickle=python2_pickle)


@pytest.fixture
def image_folder(tmp_path):
    """A folder of three classes with six small images each, in several formats."""
    generator = np.random.default_rng(0)
    suffixes = ("jpg", "PNG", "bmp", "gif", "webp", "tiff")
    for name in ("ant", "bee", "cat"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index, suffix in enumerate(suffixes):
            pixels = generator.integers(0, 256, (20 + index, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.{suffix}")
    return tmp_path / "images"


@pytest.fixture
def collect():
    """Return the batches of a split for lists of indices."""

    def run(split, *batches, epoch=0, augmentation=None, seed=0, workers=0):
        order = [(epoch, torch.tensor(batch, dtype=torch.int64)) for batch in batches]
        return list(split.batches(order, device=CPU, augmentation=augmentation, seed=seed, workers=workers))

    return run
