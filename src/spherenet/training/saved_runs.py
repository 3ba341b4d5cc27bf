"""Models of saved runs, for evaluation, prediction, export and fine-tuning, and the record of a run's data."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spherenet._util.files import atomic_file, read_json, user_path, write_json
from spherenet._util.text import markdown, plain, short
from spherenet._util.validation import require_one_of
from spherenet.data import Dataset, FolderSplit, Preprocessing, Split
from spherenet.errors import CheckpointError, DataError, InvalidArgument, ModelError, RunError
from spherenet.export import (
    ModelCard,
    PixelInput,
    export_model,
    format_of,
    load_metadata,
    load_model,
    preprocessing_record,
)
from spherenet.export.description import build_on_meta
from spherenet.export.preprocessing import input_description, pixel_example, preprocessing_file
from spherenet.export.programs import output_file
from spherenet.export.weights import writing
from spherenet.models import Classifier
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig
from spherenet.training.publishing import commands_of, data_title, without_folders
from spherenet.training.state import require_fitting, require_number

__all__ = [
    "Predictor",
    "SavedRun",
    "broken_of",
    "commands_of",
    "config_of",
    "data_record",
    "export_run",
    "load_predictor",
    "load_run",
    "model_card",
    "require_same_data",
]

SELECTIONS = {
    "validation": "The checkpoint was selected on validation images, which were held out of the training images.",
    "test": "The checkpoint was selected on these test images, so that its accuracy on them is too high.",
    None: "This is the last checkpoint of the training; no images were used to select it.",
}
"""Statements on the images on which a checkpoint was selected."""

SUFFIXES = {"onnx": ".onnx", "program": ".pt2", "torchscript": ".ts"}
"""Suffix of a file by its format, if the target is a folder."""

MAX_NAMED = 3
"""Number of changed classes that a message names."""


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


def config_of(run: RunDirectory) -> TrainConfig:
    """Return the configuration of a run. Raises RunError if config.json does not contain one."""
    return _parse_config(run, run.config)


def _parse_config(run: RunDirectory, description: dict[str, Any]) -> TrainConfig:
    if description.get("format") != 1 or not isinstance(description.get("train"), dict):
        raise RunError(f"{run.path} is not a training run that this version can read.")
    values = dict(description["train"])
    if "scale" not in values:  # saved when GA- and A-Softmax had the form of the paper only
        if values.get("loss") in ("ga-linear", "ga-cosine", "ga-sigmoid", "a"):
            values |= {"m": values.get("m") or 4.0, "scale": "norm", "margin_gradient": "full"}
        elif values.get("annealing") is True:  # the default then, without effect on other losses
            del values["annealing"]
    if values.get("data") == "folder":
        values.setdefault("split_rule", "index")  # missing if saved before folders were split by name
        values.setdefault("resize", "squash")  # missing if saved when images were always squashed
    values.setdefault("center", "none")  # missing if saved before centering became the default without BatchNorm
    try:
        return TrainConfig.from_dict(values)
    except TypeError as error:
        raise RunError(f"{run.path} has the configuration of another version: {error}") from None
    except ValueError as error:
        raise RunError(f"{run.path} has an invalid configuration: {error}") from None


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
    config = _parse_config(run, description)
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
    selected_on = None
    if checkpoint == "best":  # earlier versions had no validation images
        selected_on = "validation" if saved.state.get("selected_on") == "validation" else "test"
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


def export_run(
    path: str | Path,
    target: str,
    *,
    format: str | None = None,
    checkpoint: str = "last",
    overwrite: bool = False,
    with_preprocessing: bool = False,
    warn: Callable[[str], None] = lambda message: None,
) -> Path:
    """Export the model of a run and return the path of the result.

    The preprocessing of a file is written next to it: digits.preprocessing.json for digits.onnx.

    Args:
        path: Folder of the run.
        target: File or folder to write.
        format: Format as in `export_model`.
        checkpoint: "last" or "best".
        overwrite: Whether an existing target is replaced.
        with_preprocessing: Whether the input of the file are pixels, normalized inside of the file (`PixelInput`).
        warn: Function that receives a warning per corrupt checkpoint that was skipped.
    """
    is_folder = (format_of(target) if format is None else format) == "folder"
    if with_preprocessing and is_folder:
        raise InvalidArgument("with_preprocessing", "must be left out for a folder, which contains its preprocessing.")
    format = format_of(target) if format is None else format
    file = user_path(target) if is_folder else output_file(target, f"model{SUFFIXES.get(format, '')}")
    record = None if is_folder else preprocessing_file(file)
    if not overwrite and (file.is_file() or (file.is_dir() and any(file.iterdir()))):
        raise ModelError(f"{target} exists: add --overwrite, or choose another target.")
    run = load_run(path, checkpoint)
    for message in run.warnings:
        warn(message)
    metadata = {"classes": list(run.classes), "preprocessing": run.preprocessing.as_dict()}
    if record is not None:  # so that no caller normalizes the input of a file twice
        metadata["input"] = input_description(run.preprocessing, pixel_input=with_preprocessing)
    model: nn.Module = run.model
    example = None
    if with_preprocessing:
        model, example = PixelInput(run.model, run.preprocessing).eval(), pixel_example(run.preprocessing)
    if record is None:
        return export_model(model, target, format, metadata=metadata, card=model_card(run), overwrite=overwrite)
    content = preprocessing_record(run.preprocessing, pixel_input=with_preprocessing, metadata=metadata)
    _require_own_record(record, content, file, overwrite)
    # One block for both files, which must belong together.
    with writing(file) as file, atomic_file(file) as temporary:
        try:
            export_model(model, temporary, format, example=example, metadata=metadata)
        except ModelError as error:
            raise ModelError(str(error).replace(str(temporary), str(file))) from error
        write_json(preprocessing_file(temporary), content)
    return file


def _require_own_record(record: Path, content: dict[str, Any], target: Path, overwrite: bool) -> None:
    """Raise ModelError if the description next to an exported file would change that of another file or model.

    Files of one name in several formats share the description: digits.onnx and digits.pt2.
    """
    if not record.exists():
        return
    with suppress(OSError, ValueError):
        if read_json(record) == json.loads(json.dumps(content)):
            return
    for suffix in SUFFIXES.values():
        other = target.with_suffix(suffix)
        if other != target and other.is_file():
            raise ModelError(f"{record} describes {other}, which has another input or model: choose another target.")
    if not overwrite:
        raise ModelError(f"{record} exists: add --overwrite, or choose another target.")


def model_card(run: SavedRun) -> ModelCard:
    """Return a model card with what the run directory records about the model."""
    description = run.directory.config
    versions, commands = description.get("versions"), commands_of(description)
    images = description.get("images", description.get("pictures"))  # "pictures" in runs of earlier versions
    operator, data = run.config.operator or "plain convolution", data_title(run.config)
    # The model has the running statistics. Rows of earlier versions name no protocol.
    rows = [row for row in run.directory.metrics.rows() if row["split"] == "test" and row["step"] == run.step]
    rows = [row for row in rows if row.get("protocol", "running") == "running"]
    accuracy = run.accuracy if (run.config.bn_eval or ["running"])[0] == "running" else None
    return ModelCard(
        name=run.directory.path.resolve().name,
        architecture=markdown(f"{run.config.model}, {operator}, trained with {run.config.loss}"),
        trained_on=markdown(f"{data}, {images.get('train')} images") if isinstance(images, dict) else None,
        # The checkpoint comes first, because the rows may belong to another branch of the run.
        accuracy=accuracy if accuracy is not None else rows[-1].get("accuracy") if rows else None,
        accuracy_n=rows[-1].get("count") if rows else None,
        accuracy_on=f"the test images of {data}" if rows or accuracy is not None else None,
        dataset=None if run.config.data == "folder" else run.config.data,
        selection=SELECTIONS[run.selected_on],
        command="\n".join(plain(without_folders(command)) for command in commands) or None,
        versions={str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else None,
        date=markdown(description["started"]) if "started" in description else None,
        classes=run.classes,
        input_shape=(1, run.preprocessing.channels, *run.preprocessing.size),
    )


def _is_exported(path: str | Path) -> bool:
    return (user_path(path) / "model.safetensors").is_file()


SPLITS = {"train": "training", "validation": "validation", "test": "test"}


def data_record(dataset: Dataset) -> dict[str, Any]:
    """Return the images that were left out and, per split, what identifies its images."""
    splits = {name: split for name in SPLITS if (split := getattr(dataset, name)) is not None}
    records = {name: _split_record(split, len(dataset.classes)) for name, split in splits.items()}
    return {"broken": list(dataset.broken), **records}


def _split_record(split: Split, classes: int) -> dict[str, Any]:
    """Return the number of images per class, a hash of all images and, for a folder, of the names per class."""
    record = {"per_class": split.labels.bincount(minlength=classes).tolist(), "listing": split.listing_hash()}
    return {**record, "names": split.class_hashes(classes)} if isinstance(split, FolderSplit) else record


def broken_of(description: Mapping[str, Any]) -> list[str]:
    """Return the images that a run has left out because they could not be read."""
    data = description.get("data")
    broken = data.get("broken") if isinstance(data, Mapping) else None
    return [path for path in broken if isinstance(path, str)] if isinstance(broken, list) else []


def require_same_data(description: Mapping[str, Any], dataset: Dataset, remedy: str) -> None:
    """Raise DataError, naming the change, if the data are not those that a run was started with.

    Args:
        description: The run's config.json. Runs of earlier versions recorded the classes and numbers of images only.
        dataset: Current data.
        remedy: End of the sentence: what the user can do.
    """
    current, names = data_record(dataset), list(dataset.classes)
    classes = description.get("classes")
    if classes != names:
        raise DataError(
            f"the classes must be those of the run ({_first_classes(classes)}), got {_first_classes(names)}; {remedy}."
        )
    before = description.get("data")
    counts = description.get("images", description.get("pictures"))  # "pictures" in runs of earlier versions
    for split, title in SPLITS.items():
        saved = before.get(split) if isinstance(before, Mapping) else None
        record: Any = current.get(split)
        change = None
        if isinstance(saved, Mapping) and record is None:
            change = "none"
        elif isinstance(saved, Mapping):
            if any(saved.get(name) != record[name] for name in ("per_class", "listing")):
                change = _describe_change(saved, record, names)
        elif isinstance(counts, Mapping) and split in counts and counts[split] != len(getattr(dataset, split) or ()):
            change = f"{len(getattr(dataset, split) or ())} instead of {counts[split]}"
        if change is not None:
            raise DataError(f"the {title} images must be those that the run was started with, got {change}; {remedy}.")


def _describe_change(saved: Mapping[str, Any], current: Mapping[str, Any], classes: list[str]) -> str:
    """Name the classes whose number of images or names of images changed."""
    changes: list[str] = []
    for key, text in (("per_class", "{now} of class {name!r} instead of {before}"), ("names", "others of {name!r}")):
        old, new = saved.get(key), current.get(key)
        if not changes and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            changes = [
                text.format(now=now, name=name, before=before)
                for name, before, now in zip(classes, old, new, strict=True)
                if before != now
            ]
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    return ", ".join(changes[:MAX_NAMED]) + more if changes else "the same number of other images"


def _first_classes(classes: Any) -> str:
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        return "none"
    return ", ".join(map(str, classes[:5])) + (f", … ({len(classes)})" if len(classes) > 5 else "")
