"""Export of a saved run to a file or folder, with its preprocessing and its model card.

The card names no folder of the machine on which the run was trained.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import nn

from spherenet._util.atomic import atomic_file, write_json
from spherenet._util.files import read_json, user_path
from spherenet._util.text import markdown, plain
from spherenet.errors import InvalidArgument, ModelError
from spherenet.export import ModelCard, PixelInput, export_model, format_of, preprocessing_record
from spherenet.export.preprocessing import input_description, pixel_example, preprocessing_file
from spherenet.export.programs import output_file
from spherenet.export.weights import writing
from spherenet.training.config import TrainConfig
from spherenet.training.saved_runs import SavedRun, load_run

__all__ = ["data_title", "export_run", "model_card", "without_folders"]

SELECTIONS = {
    "validation": "The checkpoint was selected on validation images, which were held out of the training images.",
    "test": "The checkpoint was selected on these test images, so that its accuracy on them is too high.",
    None: "This is the last checkpoint of the training; no images were used to select it.",
}
"""Statements on the images on which a checkpoint was selected."""

SUFFIXES = {"onnx": ".onnx", "program": ".pt2"}
"""Suffix of a file by its format, if the target is a folder."""


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
    images = description.get("images")
    operator, data = run.config.operator or "plain convolution", data_title(run.config)
    # The model has the running statistics. Rows name no protocol unless bn_eval is set.
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


def data_title(config: TrainConfig) -> str:
    """Return the name of the data of a run: of the data set, or of the folder of images without its path."""
    name = PureWindowsPath(config.data_dir or "").name  # separates at both kinds of slashes
    return f"the image folder {name}" if config.data == "folder" and name else config.data


def commands_of(description: Mapping[str, Any]) -> list[str]:
    """Return the commands of a run, quoted for a shell: the one that started it and those that resumed it."""
    history = description.get("history")
    commands = (
        [entry.get("command") for entry in history or [] if isinstance(entry, dict)]
        if isinstance(history, list)
        else []
    )
    return [command for command in commands if isinstance(command, str)]


def without_folders(command: str) -> str:
    """Return a command in which absolute paths and paths in home folders are replaced by their last part."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a command that this library has written
        return ""
    return shlex.join(map(_last_part, words))


def _last_part(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    is_absolute = os.path.isabs(value) or PureWindowsPath(value).is_absolute() or value.startswith("~")
    return option + equals + PureWindowsPath(value).name if is_absolute else word
