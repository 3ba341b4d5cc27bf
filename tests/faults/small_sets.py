"""Data sets of a few pictures in the official forms, good ones, for the tests to spoil."""

import io
import pickle
import tarfile
from dataclasses import replace

import numpy as np
from PIL import Image

from spherenet.data import registry as catalogue
from spherenet.data.cifar import CIFAR10, CIFAR100

COUNT = 40
"""Pictures a file."""


def small(form):
    """CIFAR-10 or CIFAR-100 with few pictures a file; all else is official."""
    return replace(form, train=dict.fromkeys(form.train, COUNT), test=dict.fromkeys(form.test, COUNT))


SMALL10, SMALL100 = small(CIFAR10), small(CIFAR100)


def use():
    """Let the library take the small forms for the official ones."""
    catalogue.CIFAR_FORMATS.update(cifar10=SMALL10, cifar100=SMALL100)


def pictures(form):
    """{file: (planes uint8 [COUNT, 3072], labels)} of a set."""
    generator = np.random.default_rng(0)
    labels = np.arange(COUNT) % len(form.classes)
    return {
        name: (generator.integers(0, 256, (COUNT, 3072), dtype=np.uint8), labels) for name in (*form.train, *form.test)
    }


def binary_files(form):
    """{name: bytes} of the binary layout."""
    files = {}
    for name, (planes, labels) in pictures(form).items():
        columns = [labels[:, None]] * form.label_bytes
        files[f"{name}.bin"] = np.concatenate([*columns, planes], axis=1).astype(np.uint8).tobytes()
    return files


def pickled_files(form, protocol=2):
    """{name: bytes} of the -py layout."""
    return {
        name: pickle.dumps({b"data": planes, form.label_key.encode(): labels.tolist()}, protocol=protocol)
        for name, (planes, labels) in pictures(form).items()
    }


def write_folder(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def member(name, data=b"", kind=tarfile.REGTYPE, **fields):
    """One member of an archive."""
    made = tarfile.TarInfo(name)
    made.size, made.type = len(data), kind
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


def write_archive(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1, format=tarfile.GNU_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def members_of(form):
    """The members of the official binary archive."""
    return [member(f"{form.binary_folder}/{name}", data) for name, data in binary_files(form).items()]


def write_pictures(root, per_class=4, size=12):
    """A folder of two classes of small pictures; return the picture files."""
    generator = np.random.default_rng(0)
    paths = []
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for index, suffix in zip(range(per_class), ("png", "jpg", "bmp", "gif") * per_class, strict=False):
            paths.append(root / name / f"{index}.{suffix}")
            Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(paths[-1])
    return paths
