"""Embeddings of image files: the features that the head of a trained network receives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet.data import Preprocessing, read_pixels
from spherenet.data.images import normalize
from spherenet.data.listing import image_files
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError
from spherenet.training.distributed import Processes
from spherenet.training.saved_runs import Predictor

__all__ = ["embed_images", "find_images"]


def find_images(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths and labels of images and of folders of images.

    The label of an image in a folder is the name of the folder below it that contains the image, as in training. Images
    that are given themselves, and those directly in a folder, have the label "".

    Raises:
        DataError: A path does not exist, or a folder has no images.
    """
    files: list[str] = []
    labels: list[str] = []
    for source in sources:
        if not os.path.exists(source):
            raise DataError(f"there is no image or folder {source!r}.")
        if os.path.isdir(source):
            below = sorted(path for path, is_image in image_files(Path(source)) if is_image)
            if not below:
                raise DataError(f"the folder {source!r} has no images.")
            parts = [Path(path).relative_to(Path(source)).parts for path in below]
            files += below
            labels += [folders[0] if len(folders) > 1 else "" for folders in parts]
        else:
            files.append(source)
            labels.append("")
    return files, labels


class _Reader:
    """Reads image files as one tensor of pixels; an object, since workers may have to pickle it."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing

    def __call__(self, files: Sequence[str]) -> Tensor:
        return torch.from_numpy(np.stack([read_pixels(file, self.preprocessing) for file in files]))


def embed_images(
    predictor: Predictor,
    files: Sequence[str],
    *,
    normalized: bool = False,
    batch_size: int = 64,
    device: str | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Return the embeddings of image files, float32 [N, D] on the CPU.

    Args:
        predictor: Network with its preprocessing.
        files: Paths of the images.
        normalized: Whether each embedding is divided by its norm.
        batch_size: Images per batch.
        device: Device of the network; by default cuda if available.
        workers: Number of processes that decode images.
        progress: Called with (done, total) images.

    Raises:
        DataError: An image cannot be read.
    """
    batches = [tuple(files[first : first + batch_size]) for first in range(0, len(files), batch_size)]
    embeddings: list[Tensor] = []
    done = 0
    with Processes.joined(device) as processes, torch.no_grad():
        features = predictor.model.features.to(processes.device).eval()
        for pixels in read_ahead(_Reader(predictor.preprocessing), batches, workers=workers):
            images = normalize(pixels.to(processes.device), predictor.preprocessing)
            embeddings.append(features(images).float().cpu())
            done += len(pixels)
            if progress is not None:
                progress(done, len(files))
    result = torch.cat(embeddings)
    return F.normalize(result) if normalized else result
