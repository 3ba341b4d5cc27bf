"""Small valid data sets in the official formats, which the tests corrupt."""

import io
import pickle
import tarfile
from dataclasses import replace

import numpy as np
from PIL import Image

from spherenet.data import DATASETS
from spherenet.data.cifar import CIFAR10, CIFAR100, cifar_info

COUNT = 40
"""Images per file."""


def small(form):
    """Return the format of CIFAR-10 or CIFAR-100 with few images per file."""
    return replace(form, train=dict.fromkeys(form.train, COUNT), test=dict.fromkeys(form.test, COUNT))


SMALL10, SMALL100 = small(CIFAR10), small(CIFAR100)


def register():
    """Replace the official formats by the small ones."""
    DATASETS.update(
        cifar10=cifar_info(SMALL10, augmentation="flip"), cifar100=cifar_info(SMALL100, augmentation="flips-crop")
    )


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


def pickled_files(form, protocol=2):
    """Return {name: bytes} in the -py format."""
    return {
        name: pickle.dumps({b"data": planes, form.label_key.encode(): labels.tolist()}, protocol=protocol)
        for name, (planes, labels) in random_images(form).items()
    }


def write_folder(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def member(name, data=b"", member_type=tarfile.REGTYPE, **fields):
    """Return a member of an archive and its data."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), member_type
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def write_archive(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.GNU_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def members_of(form):
    """Return the members of the official binary archive."""
    return [member(f"{form.binary_folder}/{name}", data) for name, data in binary_files(form).items()]


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
