"""Models of finished or running runs, for evaluation, prediction, export and fine-tuning.

What a run remembers of its data, and how they are compared when it is resumed or evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from spherenet.data import Dataset, Preprocessing, Split
from spherenet.errors import CheckpointError, DataError, ModelError, RunError
from spherenet.export import ModelCard, export_model, load_metadata, load_model
from spherenet.export.folder import build_on_meta
from spherenet.models import Classifier
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig
from spherenet.training.state import number, require_fitting

__all__ = [
    "Predictor",
    "SavedRun",
    "card_of",
    "config_of",
    "data_record",
    "export_run",
    "load_predictor",
    "load_run",
    "require_same_data",
    "start_from",
]


@dataclass(frozen=True)
class SavedRun:
    """A model in eval mode, and what it needs to be used.

    accuracy: the test accuracy that the checkpoint was saved with; None for the last one, which need not have any.
    warnings: a sentence for each newer checkpoint that is corrupt and was passed over.
    """

    model: Classifier
    step: int
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    directory: RunDirectory
    config: TrainConfig
    accuracy: float | None = None
    warnings: tuple[str, ...] = ()


def config_of(run: RunDirectory) -> TrainConfig:
    """The configuration of a run; RunError where config.json is not one of ours."""
    return _config(run, run.config)


def _config(run: RunDirectory, description: dict[str, Any]) -> TrainConfig:
    if description.get("format") != 1 or not isinstance(description.get("train"), dict):
        raise RunError(f"{run.path} is not a training run that this version can read.")
    try:
        return TrainConfig.from_dict(description["train"])
    except TypeError as error:
        raise RunError(f"{run.path} has a configuration of another version: {error}") from None
    except ValueError as error:
        raise RunError(f"{run.path} has a configuration that cannot be: {error}") from None


def load_run(path: str | Path, checkpoint: str = "best") -> SavedRun:
    """Load the model of a run from its "best" or "last" checkpoint.

    Raises RunError where the folder is no run, CheckpointError where it has no whole checkpoint of that kind.
    """
    run = RunDirectory.open(path)
    description = run.config
    config = _config(run, description)
    try:
        classes = tuple(str(name) for name in description["classes"])
        preprocessing = Preprocessing.from_dict(description["preprocessing"])
        # Without memory first: the file may ask for more than there is, or than the checkpoint holds.
        model = build_on_meta(description["model"], str(run.path / "config.json"))
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        raise RunError(f"{run.path / 'config.json'} does not describe a model ({error}).") from None
    found, complaints = run.checkpoints.newest("best" if checkpoint == "best" else "step")
    if found is None:
        reason = f": {complaints[0]}" if complaints else "; it may not have come to its first evaluation yet."
        raise CheckpointError(f"{run.path} has no whole {checkpoint} checkpoint{reason}")
    tensors = found.tensors.get("model", {})
    require_fitting(model, tensors, f"the {checkpoint} checkpoint of {run.path}")
    own = model.state_dict()
    model.load_state_dict({name: tensors[name].to(tensor.dtype) for name, tensor in own.items()}, assign=True)
    accuracy = number(found.state, "accuracy") if "accuracy" in found.state else None
    return SavedRun(model.eval(), found.step, classes, preprocessing, run, config, accuracy, tuple(complaints))


@dataclass(frozen=True)
class Predictor:
    """What it takes to say what is in an image; warnings: as those of a `SavedRun`."""

    model: Classifier
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    warnings: tuple[str, ...] = ()


def load_predictor(path: str | Path, checkpoint: str = "best") -> Predictor:
    """The model of a run, or of a folder that `spherenet export` wrote.

    Raises RunError, CheckpointError or ModelError where the folder is neither or is damaged.
    """
    if not _is_exported(path):
        run = load_run(path, checkpoint)
        return Predictor(run.model, run.classes, run.preprocessing, run.warnings)
    metadata = load_metadata(path)
    try:
        classes = tuple(str(name) for name in metadata["classes"])
        preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise ModelError(f"{path} does not say its classes and preprocessing ({error}).") from None
    return Predictor(load_model(path), classes, preprocessing)


def export_run(
    path: str | Path,
    target: str,
    *,
    format: str | None = None,
    checkpoint: str = "best",
    overwrite: bool = False,
    warn: Callable[[str], None] = lambda message: None,
) -> Path:
    """Write the model of a run in a form that others read; return where. warn: hears of what was passed over."""
    if not overwrite and (Path(target).is_file() or (Path(target).is_dir() and any(Path(target).iterdir()))):
        raise ModelError(f"{target} is there already: say --overwrite, or choose another target.")
    run = load_run(path, checkpoint)
    for message in run.warnings:
        warn(message)
    metadata = {"classes": list(run.classes), "preprocessing": run.preprocessing.as_dict()}
    return export_model(run.model, target, format, metadata=metadata, card=card_of(run), overwrite=overwrite)


def card_of(run: SavedRun) -> ModelCard:
    """What the run's folder tells about its model."""
    description = run.directory.config
    versions, command, pictures = (description.get(name) for name in ("versions", "command", "pictures"))
    rows = [row for row in run.directory.metrics.read() if row["split"] == "test" and row["step"] == run.step]
    operator = run.config.operator
    return ModelCard(
        name=run.directory.path.resolve().name,
        architecture=f"{run.config.model}, {operator or 'plain convolution'}, trained with {run.config.loss}",
        trained_on=f"{run.config.data}, {pictures.get('train')} pictures" if isinstance(pictures, dict) else None,
        # What the checkpoint itself says comes first: rows may be of another branch of the run.
        accuracy=run.accuracy if run.accuracy is not None else rows[-1].get("accuracy") if rows else None,
        accuracy_n=rows[-1].get("count") if rows else None,
        accuracy_on=f"the test pictures of {run.config.data}" if rows or run.accuracy is not None else None,
        command=" ".join(map(str, command)) if isinstance(command, list) else None,
        versions={str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else None,
        date=str(description["started"]) if "started" in description else None,
        classes=run.classes,
        input_shape=(1, run.preprocessing.channels, *run.preprocessing.size),
    )


def start_from(model: Classifier, source: str) -> list[str]:
    """Copy the weights of a run or a saved model into a new one, where names and shapes fit; say what did not.

    Fine-tuning changes the head or the loss: what does not fit stays as it was drawn.
    """
    given = _weights_of(source)
    own = model.state_dict()
    fitting = {
        name: tensor
        for name, tensor in given.items()
        if name in own and own[name].shape == tensor.shape and not name.startswith("criterion.")
    }
    if not fitting:
        raise RunError(f"nothing in {source} fits this model.")
    model.load_state_dict(fitting, strict=False)
    left_out = [name for name in own if name not in fitting and not name.startswith("criterion.")]
    return (
        [f"{len(left_out)} tensors start anew, {left_out[0]} the first: {source} has none that fit."]
        if left_out
        else []
    )


def _weights_of(source: str) -> dict[str, Tensor]:
    model = load_model(source) if _is_exported(source) else load_run(source).model
    return model.state_dict()


def _is_exported(path: str | Path) -> bool:
    return (Path(path) / "model.safetensors").is_file()


SPLITS = ("train", "test")
WORDS = {"train": "training", "test": "test"}


def data_record(dataset: Dataset) -> dict[str, Any]:
    """Return the classes and, for each split, its number of images per class and a hash of which images they are."""
    splits = {name: _split_record(getattr(dataset, name), len(dataset.classes)) for name in SPLITS}
    return {"classes": list(dataset.classes), **splits}


def _split_record(split: Split, classes: int) -> dict[str, Any]:
    return {"per_class": split.labels.bincount(minlength=classes).tolist(), "listing": split.listing_hash()}


def require_same_data(description: Mapping[str, Any], dataset: Dataset, remedy: str) -> None:
    """Raise DataError, naming what changed, unless the data are those that a run was started with.

    Args:
        description: The run's config.json. Runs of earlier versions recorded the classes only.
        dataset: The data as they are now.
        remedy: The end of the sentence: what the user can do.
    """
    now = data_record(dataset)
    classes = description.get("classes")
    if classes != now["classes"]:
        raise DataError(
            f"the classes must be those of the run ({_some(classes)}), got {_some(now['classes'])}; {remedy}."
        )
    before = description.get("data")
    if not isinstance(before, Mapping):
        return
    for name in SPLITS:
        saved, found = before.get(name), now[name]
        if not isinstance(saved, Mapping) or saved == found:
            continue
        change = _change(saved.get("per_class"), found["per_class"], now["classes"])
        raise DataError(
            f"the {WORDS[name]} images must be those that the run was started with, got {change}; {remedy}."
        )


def _change(saved: Any, found: list[int], classes: list[str]) -> str:
    """Name the first class whose number of images changed, else that they are others."""
    if isinstance(saved, list) and len(saved) == len(found):
        for label, (count, now) in enumerate(zip(saved, found, strict=True)):
            if count != now:
                return f"{now} of class {classes[label]!r} instead of {count}"
    return "as many, but others"


def _some(classes: Any) -> str:
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        return "none"
    return ", ".join(map(str, classes[:5])) + (f", … ({len(classes)})" if len(classes) > 5 else "")
