"""Data sets behind one interface: a split turns an order of indices into batches on the device.

`load_dataset` returns a data set with a training and a test split. Data sets in memory are augmented in batches on the
device; the images of folders are decoded by worker processes. Files are not trusted: every reader returns valid data or
raises DataError.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from spherenet._util.files import user_path
from spherenet._util.validation import require_one_of
from spherenet.data.archives import data_folder
from spherenet.data.augmentation import AUGMENTATIONS, Augmentation
from spherenet.data.cifar import CIFAR10, CIFAR100, cifar_info
from spherenet.data.corruptions import CORRUPTIONS, Corruption, CorruptionInfo, corrupt, parse_corruption
from spherenet.data.digits import MNIST5K
from spherenet.data.folder import FOLDER, FolderSplit, broken_images, check_images, describe_broken
from spherenet.data.images import MAX_PIXELS, decode, oriented_size, pixel_limit, read_image, read_pixels
from spherenet.data.preprocessing import Preprocessing
from spherenet.data.splits import Batch, Dataset, DatasetInfo, LoadOptions, Progress, Split, TensorSplit
from spherenet.errors import InvalidArgument

__all__ = [
    "AUGMENTATIONS",
    "CORRUPTIONS",
    "DATASETS",
    "MAX_PIXELS",
    "Augmentation",
    "Batch",
    "Corruption",
    "CorruptionInfo",
    "Dataset",
    "DatasetInfo",
    "FolderSplit",
    "LoadOptions",
    "Preprocessing",
    "Progress",
    "Split",
    "TensorSplit",
    "broken_images",
    "check_images",
    "corrupt",
    "data_folder",
    "decode",
    "default_augmentation",
    "describe_broken",
    "find_dataset",
    "list_datasets",
    "load_dataset",
    "locate",
    "oriented_size",
    "parse_corruption",
    "pixel_limit",
    "read_image",
    "read_pixels",
]

MAX_IMAGE_SIZE = 4096
RESIZE_MODES = ("squash", "crop")
MAX_BYTES_IN_MEMORY = 16 << 30

DATASETS: dict[str, DatasetInfo] = {
    "mnist5k": MNIST5K,
    "cifar10": cifar_info(CIFAR10, augmentation="flip"),
    "cifar100": cifar_info(CIFAR100, augmentation="flips-crop"),
    "folder": FOLDER,
}
"""The registry: one line per data set."""


def list_datasets() -> list[str]:
    """Return the names that `load_dataset` accepts."""
    return list(DATASETS)


def default_augmentation(name: str) -> str:
    """Return the name of the augmentation that the paper uses for a data set."""
    return DATASETS[require_one_of("data", name, DATASETS)].augmentation


def find_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the file or folder that `load_dataset` would read, or None; nothing is read or downloaded."""
    return DATASETS[require_one_of("data", name, DATASETS)].find(data_dir)


def locate(data: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[str, str | None]:
    """Return the name of a data set and its absolute folder, from a name, or from the path of a folder of images.

    Args:
        data: Name of a data set, or path of a folder of images. A name is preferred; `./cifar10` is a folder.
        data_dir: Folder of the data set as in `load_dataset`.

    Raises:
        ValueError: `data` is neither, or `data_dir` contradicts it.
    """
    if data in DATASETS:
        if data == "mnist5k" and data_dir is not None:
            raise InvalidArgument(
                "data_dir",
                f"must be left out with mnist5k, which is part of the package, got {str(data_dir)!r}; "
                "set data (--data) to that folder, or to the name of the data set in it.",
            )
        return data, None if data_dir is None else str(user_path(data_dir).absolute())
    folder = user_path(data)
    if not data.strip():  # as a path it would be the current folder
        raise InvalidArgument("data", f"must be the name of a data set or a folder, got {data!r}.")
    if not os.path.isdir(folder):
        similar = [name for name in get_close_matches(data, DATASETS, n=1) if os.sep not in data]
        hint = f" Did you mean {similar[0]!r}?" if similar else ""
        names = ", ".join(name for name in DATASETS if name != "folder")
        raise InvalidArgument("data", f"must be {names} or an existing folder, got {data!r}.{hint}")
    if data_dir is not None and user_path(data_dir).resolve() != folder.resolve():
        raise InvalidArgument("data_dir", f"must be left out if data is the folder {data!r}, got {str(data_dir)!r}.")
    return "folder", str(folder.absolute())


def load_dataset(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    resize: str = "crop",
    standardize: str = "data",
    test_fraction: float = 0.1,
    seed: int = 0,
    on_broken: Literal["stop", "skip"] = "stop",
    broken: Collection[str] | None = None,
    workers: int = 0,
    max_megapixels: float | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """Load a data set by name: `mnist5k`, `cifar10`, `cifar100` or `folder`.

    Args:
        name: Name of the data set.
        data_dir: For `folder`, the folder of images. For CIFAR, the folder that holds it or to which it is downloaded;
            the default is `data_folder()`.
        image_size: Height and width of the network's input. By default the size of the data set; for `folder` 224,
            cropped from 256 × 256 (other sizes in the same proportion).
        channels: 1 (gray) or 3 (RGB); by default as in the data set.
        resize: How the images of a folder become square: "crop" keeps their aspect ratio and cuts off two sides,
            "squash" distorts them. No effect on other data sets, whose images are square.
        standardize: "data" scales the pixels of all images alike, "image" also standardizes each image by its own mean
            and standard deviation; see `Preprocessing`.
        test_fraction: Fraction of each class that a folder without `val/` keeps for testing.
        seed: Seed of this choice, which depends on a hash of the file name and on no other file.
        on_broken: What happens to images of a folder that cannot be read: "stop" raises DataError when one is read, or
            at once if its format is not supported; "skip" decodes all images first and leaves those out.
        broken: Paths of images to leave out, if they are already known from `Dataset.broken`.
        workers: Number of processes that decode images for `on_broken`.
        max_megapixels: Largest size of an image file of a folder in millions of pixels; the default is 89.
        download: Whether to download CIFAR if it is missing.
        progress: Called with (done, total): bytes during a download, images while a folder is decoded.

    Raises:
        DataError: The data are missing, corrupt or refused.
        ValueError: An argument is wrong.
    """
    info = DATASETS[require_one_of("data", name, DATASETS)]
    if not (isinstance(test_fraction, (int, float)) and 0 < test_fraction < 1):
        raise InvalidArgument("test_fraction", f"must be between 0 and 1, got {test_fraction!r}.")
    require_one_of("on_broken", on_broken, ("stop", "skip"))
    if image_size is not None and (type(image_size) is not int or not 1 <= image_size <= MAX_IMAGE_SIZE):
        raise InvalidArgument("image_size", f"must be an integer from 1 to {MAX_IMAGE_SIZE}, got {image_size!r}.")
    size = info.size if image_size is None else (image_size, image_size)
    channels = info.channels if channels is None else channels
    preprocessing = Preprocessing.standard(size, channels, standardize=standardize)
    size_in_memory = ((info.train or 0) + (info.test or 0)) * size[0] * size[1] * preprocessing.channels
    if size_in_memory > MAX_BYTES_IN_MEMORY:
        raise InvalidArgument(
            "image_size",
            f"must keep {name} below {MAX_BYTES_IN_MEMORY / 2**30:.0f} GB in memory, got {image_size}, "
            f"which takes {size_in_memory / 2**30:,.0f} GB.",
        )
    require_one_of("resize", resize, RESIZE_MODES)
    return info.load(
        LoadOptions(
            data_dir,
            preprocessing,
            test_fraction,
            seed,
            download,
            progress,
            on_broken=on_broken,
            broken=broken,
            workers=workers,
            resize=resize,
            max_pixels=pixel_limit(max_megapixels),
        )
    )
