"""Most likely classes of image files: `predict`, and the iterator behind `spherenet predict`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet._util.files import user_path
from spherenet._util.validation import require_device, require_integer, require_one_of
from spherenet.data import pixel_limit, read_image
from spherenet.data.listing import image_files
from spherenet.errors import DataError, InvalidArgumentType
from spherenet.models.test_time import TEST_TIME, scores_of_views
from spherenet.training.saved_runs import Predictor, SavedRun, load_predictor

__all__ = ["Prediction", "iterate_predictions", "predict"]


class Prediction(NamedTuple):
    """The path of an image, and its most likely classes with their softmax probabilities, the most likely first."""

    image: str
    classes: list[tuple[str, float]]


def predict(
    model: SavedRun | Predictor | str | os.PathLike[str],
    images: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    top: int = 3,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    max_megapixels: float | None = None,
    tta: str | None = None,
    failures: list[str] | None = None,
) -> list[Prediction]:
    """Return the most likely classes of image files, as `spherenet predict` prints them.

    Args:
        model: Run of `load_run`, or the folder of a run or of an exported model (`spherenet export`).
        images: Paths of image files, or of folders of them.
        top: Classes per image.
        batch_size: Images per batch.
        device: Device of the network, which is moved there; by default it is not moved.
        max_megapixels: Largest size of an image file in millions of pixels; the default is 89.
        tta: Views of each image whose mean score is used: None or "none", "mirror" or "mirror-shift", see
            `scores_of_views`.
        failures: Receives a message per image that cannot be read. By default such an image raises an error.

    Returns:
        One (image, classes) per image that can be read, in order; classes are pairs of a name and a probability.

    Raises:
        DataError: If an image cannot be read and `failures` is None.
        RunError, CheckpointError, ModelError: If the folder is neither a run nor an exported model, or is corrupt.
        TypeError: If model is a network without class names and preprocessing.

    Example:
        >>> run = sn.load_run("runs/flowers")
        >>> for image, classes in sn.predict(run, ["a.jpg", "b.jpg"]):
        ...     print(image, classes[0])
    """
    require_integer("top", top, minimum=1)
    require_integer("batch_size", batch_size, minimum=1)
    if isinstance(model, (str, os.PathLike)):
        model = load_predictor(Path(model))
    if not isinstance(model, (SavedRun, Predictor)):
        raise InvalidArgumentType(
            "model",
            f"must be a run of load_run or the folder of a run or exported model, got {type(model).__name__}; "
            "the folder contains the names of the classes and the preprocessing.",
        )
    several = [images] if isinstance(images, (str, os.PathLike)) else images
    paths = [path for image in several for path in _files(os.fspath(image))]
    network = model.model
    if device is not None:
        network.to(require_device("device", device))
    messages: list[str] = []
    was_training = network.training
    network.eval()
    try:
        predictions = list(
            iterate_predictions(
                model,
                paths,
                top=top,
                batch_size=batch_size,
                max_megapixels=max_megapixels,
                failures=messages,
                tta=require_one_of("tta", "none" if tta is None else tta, TEST_TIME),
            )
        )
    finally:
        network.train(was_training)
    if messages and failures is None:
        raise DataError(messages[0])
    if failures is not None:
        failures += messages
    return predictions


def _files(path: str) -> list[str]:
    """Return the path of an image, or those of the images in a folder."""
    folder = user_path(path)
    if not folder.is_dir():
        return [path]
    return sorted(file for file, is_image in image_files(folder, links=1) if is_image)


def iterate_predictions(
    predictor: SavedRun | Predictor,
    paths: Sequence[str],
    *,
    top: int,
    batch_size: int,
    max_megapixels: float | None,
    failures: list[str],
    tta: str = "none",
) -> Iterator[Prediction]:
    """Yield a prediction per image that can be read, and append a message per other image to `failures`.

    The network must be in evaluation mode; its device is used.
    """
    max_pixels = pixel_limit(max_megapixels)
    device = next(predictor.model.parameters()).device
    for first in range(0, len(paths), batch_size):
        images: dict[int, Tensor] = {}
        for index, path in enumerate(paths[first : first + batch_size], start=first):
            try:
                images[index] = read_image(path, predictor.preprocessing, max_pixels=max_pixels)
            except DataError as error:
                failures.append(str(error))
        if not images:
            continue
        with torch.no_grad():
            batch = torch.stack(list(images.values())).to(device)
            probabilities = scores_of_views(predictor.model, batch, tta).softmax(1).cpu()
        best = probabilities.topk(min(top, len(predictor.classes)))
        for index, scores, labels in zip(images, best.values.tolist(), best.indices.tolist(), strict=True):
            names = [predictor.classes[label] for label in labels]
            yield Prediction(paths[index], list(zip(names, scores, strict=True)))
