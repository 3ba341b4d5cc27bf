"""Data sets behind one interface: a split turns an order of indices into batches on the device.

`load_dataset` returns a named set with its two splits; sets in memory are augmented in batches on the device, folders
of pictures are decoded by workers. Files are read, never believed: every reader answers with the data or a DataError.
"""

from spherenet.data.augmentation import AUGMENTATIONS, Augmentation
from spherenet.data.folder import FolderSplit, check_images
from spherenet.data.images import Preprocessing, read_image
from spherenet.data.registry import (
    DATASETS,
    DatasetFacts,
    data_folder,
    default_augmentation,
    find_dataset,
    list_datasets,
    load_dataset,
)
from spherenet.data.splits import Batch, Dataset, Split, TensorSplit

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "Augmentation",
    "Batch",
    "Dataset",
    "DatasetFacts",
    "FolderSplit",
    "Preprocessing",
    "Split",
    "TensorSplit",
    "check_images",
    "data_folder",
    "default_augmentation",
    "find_dataset",
    "list_datasets",
    "load_dataset",
    "read_image",
]
