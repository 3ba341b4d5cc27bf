"""Converted models of transformers in its own folders: `save_pretrained` and `load_pretrained`.

`from_pretrained` builds a plain model, because the configuration of transformers does not know of sphere layers; for an
operator without parameters nothing even tells that they are missing. These functions add the conversion record to the
folder, and apply it before the weights are loaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from spherenet._util.files import user_path, write_json
from spherenet._util.text import first_line, first_names
from spherenet.convert import apply_conversion, conversion_record
from spherenet.errors import ModelError
from spherenet.export.folder import read_json_object
from spherenet.export.weights import writing
from spherenet.layers import SphereLayer

__all__ = ["CONVERSION_FILE", "load_pretrained", "save_pretrained"]

CONVERSION_FILE = "spherenet.json"

M = TypeVar("M", bound=nn.Module)


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a converted transformers model with its own `save_pretrained`, and its conversion record as spherenet.json.

    Args:
        model: Model of transformers, converted by `to_sphere`.
        folder: Folder to write, as for `model.save_pretrained`.
        **options: Further arguments of `model.save_pretrained`.

    Raises:
        TypeError: If the model has no method `save_pretrained`.
        ModelError: If the conversion cannot be recorded (see `conversion_record`), layers share a learned k, or the
            file cannot be written.
    """
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}; use save_model.")
    record = conversion_record(model)
    if shared := _shared_parameter(model):
        raise ModelError(f"{shared} belongs to several layers, which transformers does not save; use save_model.")
    save(user_path(folder), **options)
    with writing(user_path(folder) / CONVERSION_FILE) as target:
        write_json(target, record)


def _shared_parameter(model: nn.Module) -> str | None:
    """Return the name of a parameter of angle functions that several layers share (`k_sharing`), or None."""
    names: dict[nn.Parameter, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SphereLayer):
            for own, parameter in layer.angle.named_parameters():
                if parameter in names:
                    return names[parameter]
                names[parameter] = f"{name}.angle.{own}"
    return None


def load_pretrained(cls: type[M], folder: str | os.PathLike[str], **options: Any) -> M:
    """Load a model of transformers that `save_pretrained` of this module saved, with its sphere layers.

    The weights are read by `cls.from_pretrained`, from local safetensors files only. The conversion record names layers
    and options, never code.

    Args:
        cls: Class of transformers, e.g. `transformers.ViTForImageClassification`.
        folder: Folder with spherenet.json.
        **options: Further arguments of `cls.from_pretrained`, such as dtype.

    Returns:
        The model in evaluation mode.

    Raises:
        TypeError: If cls is not a class with the method `from_pretrained`.
        ModelError: If the folder has no conversion record, the record does not fit the class, or weights are missing,
            unexpected or of another shape.
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "from_pretrained", None)):
        raise TypeError(f"cls must be a class of transformers, such as ViTForImageClassification, got {cls!r}.")
    path = user_path(folder)
    file = path / CONVERSION_FILE
    if not file.is_file():
        raise ModelError(
            f"{path} must have the conversion record {CONVERSION_FILE}: save the model by save_pretrained."
        )
    record = read_json_object(file)

    def initialize(self: Any, *arguments: Any, **keywords: Any) -> None:
        cls.__init__(self, *arguments, **keywords)
        apply_conversion(self, record)

    converted: Any = type(cls.__name__, (cls,), {"__init__": initialize, "__module__": cls.__module__})
    model = _loaded(converted, path, options)
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
