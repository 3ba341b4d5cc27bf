"""Small data sets in the official layout: real CIFAR-10 images if they are available, random ones otherwise."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

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


def archive_of(files):
    """Return {name: bytes} as the content of a .tar.gz, with a member for the folder, as in the official archives."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
        folder = tarfile.TarInfo(next(iter(files)).split("/")[0])
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


class TinyCifar:
    """A CIFAR data set of a few images per file that can be written as a folder or an archive."""

    def __init__(self, form, count, images, labels):
        names = [*form.train, *form.test]
        self.form = replace(form, train=dict.fromkeys(form.train, count), test=dict.fromkeys(form.test, count))
        self.images, self.labels = images, labels
        self.rows = {name: slice(index * count, (index + 1) * count) for index, name in enumerate(names)}
        self.train_count = len(form.train) * count
        files = {f"{form.binary_folder}/{name}": data for name, data in self.binary_files().items()}
        self.archive = archive_of({**files, f"{form.binary_folder}/readme.html": b"<p>read me"})
        sha256 = hashlib.sha256(self.archive).hexdigest()
        self.form = replace(self.form, archive_bytes=len(self.archive), archive_sha256=sha256)

    def binary_files(self):
        planes = self.images.transpose(0, 3, 1, 2).reshape(len(self.labels), -1)
        columns = (
            [self.labels[:, None]] if self.form.label_bytes == 1 else [self.labels[:, None] // 5, self.labels[:, None]]
        )
        records = np.concatenate([*columns, planes], axis=1)
        return {f"{name}.bin": records[rows].tobytes() for name, rows in self.rows.items()}

    def write_folder(self, root):
        """Write the binary folder below `root` and return its path."""
        folder = root / self.form.binary_folder
        folder.mkdir(parents=True)
        for name, data in self.binary_files().items():
            (folder / name).write_bytes(data)
        return folder

    def write_archive(self, root):
        """Write the archive into `root` and return its path."""
        root.mkdir(parents=True, exist_ok=True)
        path = root / self.form.archive
        path.write_bytes(self.archive)
        return path


@pytest.fixture(scope="session")
def cifar10():
    """CIFAR-10 with 60 images per file."""
    return TinyCifar(CIFAR10, 60, *(real_images(360) or random_images(360, 10)))


@pytest.fixture(scope="session")
def cifar100():
    return TinyCifar(CIFAR100, 120, *random_images(240, 100))


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
