"""Embeddings of image files: the features that the head of a trained network receives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.data import Preprocessing, pixel_limit, read_pixels
from spherenet.data.listing import image_files, split_folders
from spherenet.data.preprocessing import normalize
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError
from spherenet.training.distributed import Processes
from spherenet.training.saved_runs import Predictor

__all__ = ["embed_images", "find_images"]


def find_images(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths and labels of images and of folders of images.

    The label of an image in a folder is the name of its class as in training: of the folder below it that contains the
    image, or of the one below that if the folder has `train/` and `val/` or `test/`. Images that are given themselves,
    and those beside the folders of classes, have the label "". An image that is given twice, e.g. by overlapping
    folders, is returned once: in retrieval it would find itself.

    Raises:
        DataError: A path does not exist, or a folder has no images.
    """
    files: list[str] = []
    labels: list[str] = []
    for source in sources:
        if not os.path.exists(source):
            raise DataError(f"there is no image or folder {source!r}.")
        if os.path.isdir(source):
            # Folders of classes may be links, as in training.
            splits = {folder.name for folder in split_folders(Path(source)).values()}
            images = image_files(Path(source), links=2 if len(splits) > 1 else 1)
            below = sorted(path for path, is_image in images if is_image)
            if not below:
                raise DataError(f"the folder {source!r} has no images.")
            files += below
            for path in below:
                folders = Path(path).relative_to(Path(source)).parts[:-1]
                if len(splits) > 1 and folders and folders[0] in splits:
                    folders = folders[1:]
                labels.append(folders[0] if folders else "")
        else:
            files.append(source)
            labels.append("")
    first = {os.path.realpath(file): index for index, file in reversed(list(enumerate(files)))}
    kept = sorted(first.values())
    return [files[index] for index in kept], [labels[index] for index in kept]


class _Reader:
    """Reads image files as one tensor of pixels; an object, since workers may have to pickle it.

    It returns the pixels of the images that can be read, and a message for each of the others.
    """

    def __init__(self, preprocessing: Preprocessing, max_pixels: int) -> None:
        self.preprocessing, self.max_pixels = preprocessing, max_pixels

    def __call__(self, files: Sequence[str]) -> tuple[Tensor | None, dict[str, str]]:
        pixels, messages = [], {}
        for file in files:
            try:
                pixels.append(read_pixels(file, self.preprocessing, max_pixels=self.max_pixels))
            except DataError as error:
                messages[file] = str(error)
        return torch.from_numpy(np.stack(pixels)) if pixels else None, messages


def embed_images(
    predictor: Predictor,
    files: Sequence[str],
    *,
    normalized: bool = False,
    batch_size: int = 64,
    device: str | None = None,
    workers: int = 0,
    max_megapixels: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    failures: dict[str, str] | None = None,
) -> Tensor:
    """Return the embeddings of image files, float32 [N, D] on the CPU.

    Args:
        predictor: Network with its preprocessing.
        files: Paths of the images.
        normalized: Whether each embedding is divided by its norm.
        batch_size: Images per batch.
        device: Device of the network; by default cuda if available.
        workers: Number of processes that decode images.
        max_megapixels: Largest size of an image file in millions of pixels; the default is 89.
        progress: Called with (done, total) images.
        failures: Receives a message per image that cannot be read, by its path. These images have no row in the result.
            By default such an image raises an error.

    Raises:
        DataError: An image cannot be read, or none of them with `failures`.
    """
    batches = [tuple(files[first : first + batch_size]) for first in range(0, len(files), batch_size)]
    embeddings: list[Tensor] = []
    done = 0
    with Processes.joined(device) as processes, torch.no_grad():
        features = predictor.model.features.to(processes.device).eval()
        reader = _Reader(predictor.preprocessing, pixel_limit(max_megapixels))
        for pixels, messages in read_ahead(reader, batches, workers=workers):
            if messages and failures is None:
                raise DataError(next(iter(messages.values())))
            if failures is not None:
                failures |= messages
            if pixels is not None:
                images = normalize(pixels.to(processes.device), predictor.preprocessing)
                embeddings.append(features(images).float().cpu())
            done += len(messages) + (0 if pixels is None else len(pixels))
            if progress is not None:
                progress(done, len(files))
    if not embeddings:
        raise DataError(
            f"none of {len(files)} images can be read (first: {next(iter((failures or {}).values()), '')})."
        )
    result = torch.cat(embeddings)
    return F.normalize(result) if normalized else result
