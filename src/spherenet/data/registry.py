"""The data sets by name: what is known of each, where it lies, and how it is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch

from spherenet.data.cifar import CIFAR10, CIFAR100, CifarFormat, fetch_cifar, find_cifar, read_cifar
from spherenet.data.digits import find_mnist5k, read_mnist5k
from spherenet.data.folder import FolderSplit, list_folder
from spherenet.data.images import Preprocessing
from spherenet.data.splits import Dataset, Progress, TensorSplit
from spherenet.errors import DataError

__all__ = [
    "DATASETS",
    "DatasetFacts",
    "data_folder",
    "default_augmentation",
    "find_dataset",
    "list_datasets",
    "load_dataset",
]

IMAGENET_SIZE, IMAGENET_RESIZE = 224, 256
LARGEST_IMAGE = 4096
LARGEST_SET = 16 << 30  # bytes of images that are held in memory


@dataclass(frozen=True)
class DatasetFacts:
    """What is known of a data set before it is read; None where it depends on the folder."""

    summary: str
    classes: int | None
    train: int | None
    test: int | None
    size: tuple[int, int]
    channels: int
    augmentation: str


DATASETS: dict[str, DatasetFacts] = {
    "mnist5k": DatasetFacts("5,000 handwritten digits, embedded", 10, 4_000, 1_000, (28, 28), 1, "none"),
    "cifar10": DatasetFacts("tiny photographs of 10 kinds", 10, 50_000, 10_000, (32, 32), 3, "flip"),
    "cifar100": DatasetFacts("tiny photographs of 100 kinds", 100, 50_000, 10_000, (32, 32), 3, "flips-crop"),
    "folder": DatasetFacts("your own pictures, class/name.jpg", None, None, None, (224, 224), 3, "imagenet"),
}

CIFAR_FORMATS: dict[str, CifarFormat] = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def list_datasets() -> list[str]:
    """Return the names that `load_dataset` takes."""
    return list(DATASETS)


def default_augmentation(name: str) -> str:
    """Return the name of the augmentation that the paper trains this data set with (SPEC 4)."""
    return _facts(name).augmentation


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return where downloaded sets lie: `data_dir`, else SPHERENET_DATA, else a folder in the user's cache."""
    given = data_dir if data_dir is not None else os.environ.get("SPHERENET_DATA") or None
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "spherenet", "data").expanduser()


def find_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the file or folder that `load_dataset` would read, or None; nothing is read or fetched."""
    _facts(name)
    if name == "mnist5k":
        return find_mnist5k()
    if name == "folder":
        folder = Path(data_dir).expanduser() if data_dir is not None else None
        return folder if folder is not None and os.path.isdir(folder) else None
    source = find_cifar(CIFAR_FORMATS[name], data_folder(data_dir))
    return source.path if source else None


def load_dataset(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """Return a data set by name: `mnist5k`, `cifar10`, `cifar100` or `folder`.

    `image_size` and `channels` (1 or 3) are the network's; by default the set's own, for folders ImageNet's: resized to
    256 × 256, cut to 224 (another size in the same proportion). `val_fraction` and `seed` share out a folder that has
    no `val/`; the other sets come in two parts. CIFAR is looked for in `data_folder(data_dir)` and, with `download`,
    fetched to it; `progress(done, total)` hears of the bytes. What is missing, damaged or refused raises DataError,
    wrong arguments ValueError.
    """
    facts = _facts(name)
    if not (isinstance(val_fraction, (int, float)) and 0 < val_fraction < 1):
        raise ValueError(f"val_fraction must be between 0 and 1, got {val_fraction!r}.")
    if image_size is not None and (type(image_size) is not int or not 1 <= image_size <= LARGEST_IMAGE):
        raise ValueError(f"image_size must be a whole number from 1 to {LARGEST_IMAGE}, got {image_size!r}.")
    size = facts.size if image_size is None else (image_size, image_size)
    preprocessing = Preprocessing.standard(size, facts.channels if channels is None else channels)
    if name == "folder":
        return _load_folder(data_dir, preprocessing, val_fraction, seed)
    taken = ((facts.train or 0) + (facts.test or 0)) * size[0] * size[1] * preprocessing.channels
    if taken > LARGEST_SET:
        raise ValueError(
            f"image_size must keep {name} below {LARGEST_SET / 2**30:.0f} GB in memory, got {image_size}, "
            f"with which it takes {taken / 2**30:,.0f} GB."
        )
    if name == "mnist5k":
        classes = tuple("0123456789")
        train, test = read_mnist5k()
    else:
        form, folder = CIFAR_FORMATS[name], data_folder(data_dir)
        classes = form.classes
        source = find_cifar(form, folder)
        if source is None:
            if not download:
                raise DataError(_not_found(form, folder))
            source = fetch_cifar(form, folder, progress)
        train, test = read_cifar(form, source)
    return Dataset(name, classes, preprocessing, TensorSplit(*train, preprocessing), TensorSplit(*test, preprocessing))


def _load_folder(
    data_dir: str | os.PathLike[str] | None, preprocessing: Preprocessing, val_fraction: float, seed: int
) -> Dataset:
    if data_dir is None:
        raise DataError("the data set 'folder' needs a folder of pictures: give data_dir (--data-dir).")
    root = Path(data_dir).expanduser().absolute()
    resize = round(preprocessing.size[0] * IMAGENET_RESIZE / IMAGENET_SIZE)
    preprocessing = Preprocessing.standard(preprocessing.size, preprocessing.channels, (resize, resize))
    listing = list_folder(root, val_fraction=val_fraction, seed=seed)

    def split(pictures: list[tuple[str, int]]) -> FolderSplit:
        labels = torch.tensor([label for _, label in pictures], dtype=torch.int64)
        return FolderSplit(root, [path for path, _ in pictures], labels, preprocessing)

    return Dataset("folder", listing.classes, preprocessing, split(listing.train), split(listing.test))


def _facts(name: str) -> DatasetFacts:
    if name in DATASETS:
        return DATASETS[name]
    near = get_close_matches(str(name), DATASETS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"data must be one of {', '.join(map(repr, DATASETS))}, got {name!r}.{hint}")


def _not_found(form: CifarFormat, folder: Path) -> str:
    forms = f"{form.binary_folder}/, {form.python_folder}/, {form.archive} and {form.python_archive}"
    return (
        f"{form.name} is not in {str(folder)!r}, where {forms} were looked for: "
        f"'spherenet data {form.name} --download' fetches it, --data-dir or SPHERENET_DATA names another folder."
    )
