"""One door to every format that a model can be written in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spherenet.export.card import ModelCard
from spherenet.export.folder import save_model
from spherenet.export.onnx_file import export_onnx
from spherenet.export.programs import export_program, export_torchscript
from spherenet.ops.arguments import require_one_of

__all__ = ["FORMATS", "export_model", "format_of"]

_SUFFIXES = {".onnx": "onnx", ".pt2": "program", ".ts": "torchscript", ".torchscript": "torchscript", "": "folder"}
_FILES = {"onnx": export_onnx, "torchscript": export_torchscript, "program": export_program}

FORMATS = ("folder", *_FILES)


def export_model(
    model: nn.Module,
    target: str | os.PathLike[str],
    format: str | None = None,
    *,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
    check: bool = True,
) -> Path:
    """Write a model in a format and return where it is.

    format: "folder" (`save_model`, which `load_model` reads), "onnx", "torchscript" or "program" (for inference, each
    frozen); None takes it from the target: .onnx, .ts or .torchscript, .pt2, and a folder without a suffix.
    card and overwrite count for folders; example and check for the others; a file that is there is replaced.
    Raises ValueError for an unknown format or suffix, and what the format's own function raises.
    """
    chosen = format_of(target) if format is None else require_one_of("format", format, FORMATS)
    if chosen == "folder":
        save_model(model, target, metadata=metadata, card=card, overwrite=overwrite)  # type: ignore[arg-type]
        return Path(target).expanduser().resolve()
    return _FILES[chosen](model, target, example=example, metadata=metadata, check=check)


def format_of(target: str | os.PathLike[str]) -> str:
    """The format that a target's suffix names; raises ValueError for another suffix."""
    suffix = Path(target).suffix.lower()
    if suffix not in _SUFFIXES:
        allowed = ", ".join(name for name in _SUFFIXES if name)
        raise ValueError(
            f"target must end in {allowed} or, for a folder, have no suffix, got {str(target)!r}; "
            "or name the format (format=)."
        )
    return _SUFFIXES[suffix]
