"""Export frozen models as ONNX, and `export_model`, which exports to any of the supported formats."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spherenet._util.atomic import atomic_file
from spherenet._util.files import to_json, user_path
from spherenet._util.text import first_line
from spherenet._util.validation import require_one_of
from spherenet.errors import InvalidArgument, ModelError, require_extra
from spherenet.export.card import ModelCard
from spherenet.export.description import metadata_as_json
from spherenet.export.folder import save_model
from spherenet.export.programs import (
    example_batch,
    export_program,
    output_file,
    require_same_scores,
    trace_program,
)
from spherenet.export.weights import writing

__all__ = ["FORMATS", "export_model", "export_onnx", "format_of"]

LARGEST_SINGLE_FILE = 2**31 - 2**24
"""Largest size of tensors in one file, in bytes: protobuf is limited to 2³¹, including the graph."""

OLDEST_OPSET = 18
"""Oldest opset that torch's exporter writes directly."""


def export_onnx(
    model: nn.Module,
    file: str | os.PathLike[str],
    *,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    opset: int | None = None,
    check: bool = True,
) -> Path:
    """Write the frozen model as ONNX for batches of any size.

    The input is named "images" [batch, …] and the output "scores" [batch, classes], without softmax. Tensors of more
    than 2 GB are written to a second file with the suffix .data.

    Args:
        model: Any module that returns one row of scores per input.
        file: File to write or replace, or an existing folder for the file model.onnx.
        example: Batch of inputs, required if the model is not a `Classifier`.
        metadata: JSON values such as class names and preprocessing, saved as metadata_props.
        opset: ONNX opset; None for torch's default.
        check: Whether to run onnx's checker and to compare scores in onnxruntime at two batch sizes.

    Returns:
        The file.

    Raises:
        MissingExtraError: If onnx, onnxscript or onnxruntime is not installed.
        ModelError: If the model cannot be exported, the scores of the ONNX model differ, or the file cannot be written.
        ValueError: If the opset is not supported, or the example is missing or empty.
        TypeError: If the example is not a tensor.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if check else [])):
        require_extra("onnx", package)
    _require_opset(opset)
    example = example_batch(model, example)
    properties = {name: to_json(value, indent=None).strip() for name, value in metadata_as_json(metadata).items()}
    program = _convert(model, example, opset)
    program.model.metadata_props.update(properties)
    with writing(output_file(file, "model.onnx")) as target, atomic_file(target) as path:
        program.save(path, external_data=_size(program) > LARGEST_SINGLE_FILE)
        if check:
            _check_file(path)
            require_same_scores(_session(path), model, example, "the ONNX file in onnxruntime")
    return target


def _require_opset(opset: int | None) -> None:
    newest = require_extra("onnx", "onnx").defs.onnx_opset_version()
    is_integer = isinstance(opset, int) and not isinstance(opset, bool)
    if opset is not None and not (is_integer and OLDEST_OPSET <= opset <= newest):
        raise InvalidArgument("opset", f"must be None or an integer from {OLDEST_OPSET} to {newest}, got {opset!r}.")


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
    except Exception as error:  # torch.onnx and onnxscript raise a dozen types
        raise ModelError(f"the model cannot be written as ONNX: {first_line(error)}.") from error
    assert converted is not None
    written = converted.model.opset_imports[""]
    if opset is not None and written != opset:
        raise ModelError(f"the model cannot be written with opset {opset}; use opset {written}.")
    for node in converted.model.graph:
        # Lines of Python code and paths of this machine.
        node.metadata_props.clear()
    return converted


def _size(program: Any) -> int:
    return sum(value.const_value.nbytes for value in program.model.graph.initializers.values())


def _check_file(path: Path) -> None:
    onnx = require_extra("onnx", "onnx")
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"onnx's checker rejects the exported model: {first_line(error)}.") from error


def _session(path: Path) -> Callable[[Tensor], Tensor]:
    onnxruntime = require_extra("onnx", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the exceptions of onnxruntime have no other common type
        if missing := re.search(r"NOT_IMPLEMENTED.*implementation for (\w+)\(", str(error)):
            raise ModelError(
                f"onnxruntime has no {missing[1]} in float64, which models in float64 and transposed layers with "
                "centered patches need: use float32 and center='weight', or export another format."
            ) from error
        raise ModelError(f"onnxruntime cannot run the exported model: {first_line(error)}.") from error

    def run(images: Tensor) -> Tensor:
        (scores,) = session.run(["scores"], {"images": images.numpy()})
        return torch.from_numpy(scores)

    return run


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress messages of the exporters about deprecated calls, optional packages and failed opset conversions.

    `_convert` checks afterwards whether the opset was written.
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


_SUFFIXES = {".onnx": "onnx", ".pt2": "program", "": "folder"}
_FILES: dict[str, Callable[..., Path]] = {"onnx": export_onnx, "program": export_program}

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
    """Export a model to any of the supported formats.

    The function for the format may raise further errors.

    Args:
        model: Model to export.
        target: Folder or file to write. An existing file is replaced.
        format: "folder" (see `save_model`), or frozen for inference as "onnx" (see `export_onnx`) or "program"
            (`export_program`). None chooses by the suffix of the target: .onnx, .pt2, and a folder without a suffix.
        example: Batch of inputs; not used for folders.
        metadata: JSON values that belong to the model.
        card: Content of README.md; used for folders only.
        overwrite: Whether to replace an existing folder; used for folders only.
        check: Whether to compare the exported model with the model; not used for folders.

    Returns:
        The folder or file.

    Raises:
        ValueError: If the format or suffix is unknown.
    """
    chosen = format_of(target) if format is None else require_one_of("format", format, FORMATS)
    if chosen == "folder":
        save_model(model, target, metadata=metadata, card=card, overwrite=overwrite)
        return user_path(target).resolve()
    return _FILES[chosen](model, target, example=example, metadata=metadata, check=check)


def format_of(target: str | os.PathLike[str]) -> str:
    """Return the format for the suffix of a target. Raises ValueError for an unknown suffix."""
    suffix = Path(target).suffix.lower()
    if suffix not in _SUFFIXES:
        allowed = ", ".join(name for name in _SUFFIXES if name)
        raise InvalidArgument(
            "target",
            f"must end in {allowed} or, for a folder, have no suffix, got {str(target)!r}; otherwise pass format.",
        )
    return _SUFFIXES[suffix]
