"""`mnist5k`: 5,000 MNIST digits, 500 per class, shipped with the package as one PNG file.

The file shows the digits in 50 rows of 100, sorted by class; `tools/pack_digits.py` wrote it. Its source and license
are in `mnist5k.license.txt`.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spherenet.data.augmentation import shuffled
from spherenet.data.splits import DataDir, Dataset, DatasetInfo, LoadOptions, TensorSplit
from spherenet.errors import DataError

__all__ = ["DIGITS", "MNIST5K", "read_mnist5k"]

DIGITS = Path(__file__).with_name("mnist5k.png")
SHA256 = "315cc6bced8d0cb80bc6376e145033531b8d0d27bf780f5144308d3ddf7060bd"
MAX_BYTES = 1 << 20
ROWS, COLUMNS, SIDE = 50, 100, 28
COUNT, CLASSES = ROWS * COLUMNS, 10
TEST_PER_CLASS = 100
SPLIT_SEED = 20170  # fixed, so that results on mnist5k are comparable


def read_mnist5k(path: Path = DIGITS) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) for training and for testing: uint8 [N, 28, 28, 1] and int64 [N].

    The split is fixed: 4,000 digits for training and 1,000 for testing, 400 and 100 per class.

    Raises:
        DataError: The file is missing or is not the one that the package ships.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"the file {str(path)!r} cannot be read ({error.strerror}): reinstall spherenet.") from None
    if hashlib.sha256(content).hexdigest() != SHA256:  # compared first, so that only the known file is decoded
        raise DataError(f"the file {str(path)!r} is corrupt (wrong SHA-256): reinstall spherenet.")
    mosaic = np.array(Image.open(io.BytesIO(content), formats=("PNG",)))
    tiles = mosaic.reshape(ROWS, SIDE, COLUMNS, SIDE).transpose(0, 2, 1, 3)
    images = torch.from_numpy(tiles.reshape(COUNT, SIDE, SIDE, 1).copy())
    labels = torch.arange(CLASSES).repeat_interleave(COUNT // CLASSES)
    is_test = torch.zeros(COUNT, dtype=torch.bool)
    for label in range(CLASSES):
        members = (labels == label).nonzero()[:, 0]
        is_test[members[shuffled(SPLIT_SEED + label, len(members))[:TEST_PER_CLASS]]] = True
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def _find(data_dir: DataDir) -> Path | None:
    return DIGITS if DIGITS.is_file() else None


def _load(options: LoadOptions) -> Dataset:
    train, test = (TensorSplit(*split, options.preprocessing) for split in read_mnist5k())
    return Dataset("mnist5k", tuple("0123456789"), options.preprocessing, train, test)


MNIST5K = DatasetInfo(
    summary="5,000 handwritten digits, included",
    classes=CLASSES,
    train=COUNT - CLASSES * TEST_PER_CLASS,
    test=CLASSES * TEST_PER_CLASS,
    size=(SIDE, SIDE),
    channels=1,
    augmentation="none",
    find=_find,
    load=_load,
)
