"""Converted models of transformers in its own folders: `save_pretrained` and `load_pretrained`.

`from_pretrained` builds a plain model, because the configuration of transformers does not know of sphere layers.
`load_pretrained` applies the conversion record in config.json before the weights are loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from spherenet._util.files import user_path
from spherenet._util.text import first_line, first_names
from spherenet.convert import apply_conversion
from spherenet.convert.record import RECORD_ENTRY, is_pretrained_model, save_with_record
from spherenet.errors import InvalidArgumentType, ModelError
from spherenet.export.folder import CONFIG_FILE, read_json_object
from spherenet.export.foreign_values import build_configuration
from spherenet.export.weights import writing
from spherenet.layers import SphereLayer

__all__ = ["load_pretrained", "save_pretrained"]

ADAPTER_FILE = "adapter_config.json"

M = TypeVar("M", bound=nn.Module)


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a converted transformers model with its own `save_pretrained`, and its conversion record in config.json.

    The method `save_pretrained` of a model that `to_sphere` converted does the same, also for the checkpoints of a
    `Trainer`. This function also accepts a model of which only a part was converted.

    Args:
        model: Model of transformers, converted by `to_sphere`.
        folder: Folder to write, as for `model.save_pretrained`.
        **options: Further arguments of `model.save_pretrained`.

    Raises:
        TypeError: If the model is not of transformers.
        ModelError: If the conversion cannot be recorded (see `conversion_record`), layers share a learned k, or a file
            cannot be written.
    """
    if not is_pretrained_model(model):
        raise InvalidArgumentType(
            "model", f"must be a model of transformers, got {type(model).__name__}; use save_model."
        )
    with writing(folder) as target:
        save_with_record(model, target, **options)


def load_pretrained(cls: type[M], folder: str | os.PathLike[str], **options: Any) -> M:
    """Load a converted model of transformers with its sphere layers, e.g. from a checkpoint of a `Trainer`.

    The weights are read by `cls.from_pretrained`, from local safetensors files only. The conversion record names layers
    and options, never code. Entries of config.json that can select code or other files are ignored.

    Args:
        cls: Class of transformers, e.g. `transformers.ViTForImageClassification`.
        folder: Folder that `save_pretrained` of a converted model wrote.
        **options: Further arguments of `cls.from_pretrained`, such as dtype.

    Returns:
        The model in evaluation mode.

    Raises:
        TypeError: If cls is not a class with the method `from_pretrained`.
        ModelError: If the folder has no conversion record or contains an adapter, the record does not fit the class,
            weights are missing, unexpected or of another shape, or an option replaced sphere layers.
    """
    config_class = getattr(cls, "config_class", None)
    if not isinstance(cls, type) or not callable(getattr(cls, "from_pretrained", None)) or config_class is None:
        raise InvalidArgumentType(
            "cls", f"must be a class of transformers, such as ViTForImageClassification, got {cls!r}."
        )
    path = user_path(folder)
    file = path / CONFIG_FILE
    values = read_json_object(file) if file.is_file() else {}
    if RECORD_ENTRY not in values:
        raise ModelError(
            f"{path} must have a conversion record in {CONFIG_FILE}, as save_pretrained of a converted model writes it."
        )
    if (path / ADAPTER_FILE).exists():  # it would name another model
        raise ModelError(f"{path} must not contain {ADAPTER_FILE}: merge the adapter before the model is saved.")
    record = values.pop(RECORD_ENTRY)
    config = build_configuration(config_class, values, str(file))

    def initialize(self: Any, *arguments: Any, **keywords: Any) -> None:
        cls.__init__(self, *arguments, **keywords)
        apply_conversion(self, record)

    converted: Any = type(cls.__name__, (cls,), {"__init__": initialize, "__module__": cls.__module__})
    model = _loaded(converted, path, {**options, "config": config})
    lost = [name for name in record["layers"] if not isinstance(model.get_submodule(name), SphereLayer)]
    if lost:
        raise ModelError(f"the options must not replace sphere layers, got a plain layer for {first_names(lost)}.")
    model.__class__ = cls
    return model  # type: ignore[no-any-return]


def _loaded(converted: Any, path: Path, options: dict[str, Any]) -> Any:
    fixed = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        model, report = converted.from_pretrained(path, **{**options, **fixed})
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load {path}: {first_line(error)}.") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(problem, ())))
        if names:
            title = problem.partition("_")[0]
            raise ModelError(f"{path} does not fit {converted.__name__}: {len(names)} {title}: {first_names(names)}.")
    return model.eval()
