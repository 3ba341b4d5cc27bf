"""Frozen models as ONNX files, checked with onnxruntime.

One door to every format that a model can be written in.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.errors import ModelError
from spherenet.export.card import ModelCard
from spherenet.export.folder import metadata_as_json, save_model
from spherenet.export.programs import (
    example_of,
    export_program,
    export_torchscript,
    place_of,
    require_same_answers,
    trace_program,
)
from spherenet.files import new_file
from spherenet.text import first_line
from spherenet.validation import require_one_of

__all__ = ["FORMATS", "export_model", "export_onnx", "format_of"]

LARGEST_SINGLE_FILE = 2**31 - 2**24
"""Bytes of tensors that one file may hold: protobuf ends at 2³¹, of which the graph takes some."""

OLDEST_OPSET = 18
"""The oldest version of ONNX that torch's exporter writes by itself."""


def export_onnx(
    model: nn.Module,
    file: str | os.PathLike[str],
    *,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    opset: int | None = None,
    check: bool = True,
) -> Path:
    """Write the frozen model as ONNX for batches of any size; return the file, model.onnx in a folder.

    The input is called "images" [batch, …], the output "scores" [batch, classes]; softmax is left to the caller.
    example: a batch of inputs, needed where the model is not a `Classifier`. metadata: JSON values such as class names
    and preprocessing; each becomes an entry of the file's metadata_props, as JSON. opset: of ONNX, torch's default when
    None. check: run onnx's checker, and compare with the model in onnxruntime at two batch sizes. One file, which
    replaces one that is there; above 2 GB the tensors stand beside it in a file of its name and .data.
    Raises ModelError where a package is missing, for a model that cannot be exported or answers otherwise than before
    (with the difference), and for a file that cannot be written; ValueError or TypeError for a wrong example or opset.
    """
    _require_packages("onnx", "onnxscript", *(["onnxruntime"] if check else []))
    _require_opset(opset)
    example = example_of(model, example)
    known = metadata_as_json(metadata)
    program = _convert(model, example, opset)
    program.model.metadata_props.update({name: json.dumps(value, ensure_ascii=False) for name, value in known.items()})
    with new_file(place_of(file, "model.onnx")) as path:
        program.save(path, external_data=_size(program) > LARGEST_SINGLE_FILE)
        if check:
            _check_file(path)
            require_same_answers(_session(path), model, example, "the ONNX file in onnxruntime")
    return place_of(file, "model.onnx").resolve()


def _require_packages(*names: str) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ModelError(
                f"ONNX export needs the package {name}, which is not installed: pip install 'spherenet[onnx]'."
            ) from error


def _require_opset(opset: int | None) -> None:
    newest = importlib.import_module("onnx").defs.onnx_opset_version()
    whole = isinstance(opset, int) and not isinstance(opset, bool)
    if opset is not None and not (whole and OLDEST_OPSET <= opset <= newest):
        raise ValueError(f"opset must be None or a whole number from {OLDEST_OPSET} to {newest}, got {opset!r}.")


def _convert(model: nn.Module, example: Tensor, opset: int | None) -> Any:
    program = trace_program(model, example)
    try:
        with _quiet_exporter():
            converted = torch.onnx.export(
                program,
                (example,),
                dynamo=True,
                input_names=["images"],
                output_names=["scores"],
                dynamic_shapes={"images": {0: "batch"}},
                opset_version=opset,
                verbose=False,
            )
    # torch.onnx and onnxscript raise a dozen types of their own.
    except Exception as error:
        raise ModelError(f"the model cannot be written as ONNX: {first_line(error)}.") from error
    assert converted is not None
    found = converted.model.opset_imports[""]
    if opset is not None and found != opset:
        raise ModelError(f"the model cannot be written as ONNX of opset {opset}; opset {found} can be.")
    for node in converted.model.graph:
        # Lines of Python code and their places on this machine.
        node.metadata_props.clear()
    return converted


def _size(program: Any) -> int:
    return sum(value.const_value.nbytes for value in program.model.graph.initializers.values())


def _check_file(path: Path) -> None:
    onnx = importlib.import_module("onnx")
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"onnx's checker refuses the exported model: {first_line(error)}.") from error


def _session(path: Path) -> Callable[[Tensor], Tensor]:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors, which are raised too
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    # onnxruntime's exceptions have no common type but this.
    except Exception as error:
        raise ModelError(f"onnxruntime cannot run the exported model: {first_line(error)}.") from error

    def run(images: Tensor) -> Tensor:
        (scores,) = session.run(["scores"], {"images": images.numpy()})
        return torch.from_numpy(scores)

    return run


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hold back what the exporters say about themselves: a deprecated call, packages they could know, other versions.

    Whether a version could be written is looked at afterwards.
    """
    names = ("torch.onnx._internal.exporter._registration", "onnxscript.version_converter")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


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
