"""Models of saved runs and exported folders, loaded for evaluation, prediction, export and fine-tuning."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from spherenet._util.files import user_path
from spherenet._util.text import short
from spherenet._util.validation import require_one_of
from spherenet.data import Preprocessing
from spherenet.errors import CheckpointError, DataError, InvalidArgument, ModelError, RunError
from spherenet.export import load_metadata, load_model
from spherenet.export.description import build_on_meta
from spherenet.models import Classifier
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig
from spherenet.training.run_format import parse_config
from spherenet.training.state import require_fitting, require_number

__all__ = ["Predictor", "SavedRun", "load_predictor", "load_run"]


@dataclass(frozen=True)
class SavedRun:
    """Model of a run in eval mode, with its classes, preprocessing and configuration.

    Attributes:
        accuracy: Test accuracy saved with a best checkpoint, None for a last checkpoint.
        selected_on: "validation" or "test", the images on which a best checkpoint was selected; None for a last one.
        warnings: One sentence per newer checkpoint that is corrupt and was skipped.
    """

    model: Classifier
    step: int
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    directory: RunDirectory
    config: TrainConfig
    accuracy: float | None = None
    selected_on: str | None = None
    warnings: tuple[str, ...] = ()


def load_run(path: str | Path, checkpoint: str = "last") -> SavedRun:
    """Load the model of a run from its "last" or "best" checkpoint, without an export.

    The best one was selected by its accuracy on the validation images (`--validation-fraction`) or, without them, on
    the test images, on which its accuracy is then too high.

    Args:
        path: Folder of the run, as `spherenet train` wrote it.
        checkpoint: "last" or "best".

    Returns:
        The run, for `predict`, with its `model` in evaluation mode on the CPU, its `classes` and its `preprocessing`.

    Raises:
        RunError: If the folder is not a run.
        CheckpointError: If the run has no valid checkpoint of that name.
        ValueError: If checkpoint is neither "last" nor "best".

    Example:
        >>> run = sn.load_run("runs/flowers", "best")
        >>> scores = run.model(images)
    """
    require_one_of("checkpoint", checkpoint, ("last", "best"))
    run = RunDirectory.open(path)
    description = run.config
    config = parse_config(run, description)
    try:
        preprocessing = Preprocessing.from_dict(description["preprocessing"])
        # On the meta device first: config.json may describe a network that does not fit the memory or the checkpoint.
        model = build_on_meta(description["model"], str(run.path / "config.json"))
        classes = _class_names(description["classes"], model)
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise RunError(f"{run.path / 'config.json'} does not describe a model ({reason}).") from None
    saved, warnings = run.checkpoints.newest("best" if checkpoint == "best" else "step")
    if saved is None:
        reason = f": {warnings[0]}" if warnings else "; there may have been no evaluation yet."
        raise CheckpointError(f"{run.path} has no valid {checkpoint} checkpoint{reason}")
    tensors = saved.tensors.get("model", {})
    require_fitting(model, tensors, f"the {checkpoint} checkpoint of {run.path}")
    own = model.state_dict()
    model.load_state_dict({name: tensors[name].to(tensor.dtype) for name, tensor in own.items()}, assign=True)
    accuracy = require_number(saved.state, "accuracy") if "accuracy" in saved.state else None
    is_best, on_validation = checkpoint == "best", saved.state.get("selected_on") == "validation"
    selected_on = ("validation" if on_validation else "test") if is_best else None
    return SavedRun(
        model.eval(), saved.step, classes, preprocessing, run, config, accuracy, selected_on, tuple(warnings)
    )


def _class_names(names: object, model: Classifier) -> tuple[str, ...]:
    """Return the names of a model's classes. Raises ValueError if they are not one text per class."""
    count = model.head.num_classes
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"classes must be a list of names, got {short(repr(names))}")
    if len(names) != count:
        raise ValueError(f"classes must be the names of the {count} classes of the network, got {len(names)}")
    return tuple(names)


@dataclass(frozen=True)
class Predictor:
    """Model with the classes and preprocessing that predictions need. `warnings` as in `SavedRun`."""

    model: Classifier
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    warnings: tuple[str, ...] = ()


def load_predictor(path: str | Path, checkpoint: str = "last") -> Predictor:
    """Load the model of a run, or of a folder that `spherenet export` wrote.

    Raises:
        RunError, CheckpointError, ModelError: If the folder is neither, or is corrupt.
        ValueError: If the best checkpoint of an exported model is requested.
    """
    if not _is_exported(path):
        run = load_run(path, checkpoint)
        _require_image_size(run.model, run.preprocessing, path)
        return Predictor(run.model, run.classes, run.preprocessing, run.warnings)
    if checkpoint != "last":
        raise InvalidArgument(
            "checkpoint", f"must be last for an exported model, which has no others, got {checkpoint}."
        )
    metadata = load_metadata(path)
    model = load_model(path).float()  # images are float32
    try:
        classes = _class_names(metadata["classes"], model)
        preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    except (KeyError, TypeError, ValueError, DataError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ModelError(f"{path} must have classes and preprocessing in its metadata ({reason}).") from None
    _require_image_size(model, preprocessing, path)
    return Predictor(model, classes, preprocessing)


def _require_image_size(model: Classifier, preprocessing: Preprocessing, path: str | Path) -> None:
    """Raise ModelError if a network does not take images of the size that its preprocessing gives.

    On the meta device: the size comes from a file, and images of that size may not fit the memory.
    """
    height, width = preprocessing.size
    try:
        with torch.no_grad():
            copy.deepcopy(model).to("meta")(torch.zeros(1, preprocessing.channels, height, width, device="meta"))
    except NotImplementedError:  # an operation that needs values
        return
    except (RuntimeError, ValueError):
        shape = f"{height} × {width} with {preprocessing.channels} channels"
        message = f"{path} has a preprocessing for images of {shape}, which its network does not take."
        raise ModelError(message) from None


def _is_exported(path: str | Path) -> bool:
    return (user_path(path) / "model.safetensors").is_file()
