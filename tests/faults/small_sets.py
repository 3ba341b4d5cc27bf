"""Small valid data sets in the official formats, which the tests corrupt."""

import gzip
import hashlib
import io
import tarfile
from dataclasses import replace

import numpy as np
from PIL import Image

from spherenet.data import DATASETS
from spherenet.data.cifar import CIFAR10, CIFAR100, cifar_info

COUNT = 40
"""Images per file."""


def random_images(form):
    """Return {file: (planes uint8 [COUNT, 3072], labels)} of a data set."""
    generator = np.random.default_rng(0)
    labels = np.arange(COUNT) % len(form.classes)
    return {
        name: (generator.integers(0, 256, (COUNT, 3072), dtype=np.uint8), labels) for name in (*form.train, *form.test)
    }


def binary_files(form):
    """Return {name: bytes} in the binary format."""
    files = {}
    for name, (planes, labels) in random_images(form).items():
        columns = [labels[:, None]] * form.label_bytes
        files[f"{name}.bin"] = np.concatenate([*columns, planes], axis=1).astype(np.uint8).tobytes()
    return files


def archive_of(form):
    """Return the official binary archive of a data set, the same at every call."""
    stream = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=stream, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, data in binary_files(form).items():
            info = tarfile.TarInfo(f"{form.binary_folder}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def small(form):
    """Return the format of CIFAR-10 or CIFAR-100 with few images per file."""
    form = replace(form, train=dict.fromkeys(form.train, COUNT), test=dict.fromkeys(form.test, COUNT))
    content = archive_of(form)
    return replace(form, archive_bytes=len(content), archive_sha256=hashlib.sha256(content).hexdigest())


SMALL10, SMALL100 = small(CIFAR10), small(CIFAR100)


def register():
    """Replace the official formats by the small ones."""
    DATASETS.update(
        cifar10=cifar_info(SMALL10, augmentation="flip"), cifar100=cifar_info(SMALL100, augmentation="flips-crop")
    )


def write_folder(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def write_images(root, per_class=4, size=12):
    """Write a folder of two classes of small images and return the paths of the images."""
    generator = np.random.default_rng(0)
    paths = []
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for index, suffix in zip(range(per_class), ("png", "jpg", "bmp", "gif") * per_class, strict=False):
            paths.append(root / name / f"{index}.{suffix}")
            Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(paths[-1])
    return paths
