"""Frozen models as programs of torch's own: torch.export, and TorchScript where torch still supports it."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from spherenet.errors import ModelError
from spherenet.export.atomic import write_file
from spherenet.export.config import metadata_as_json
from spherenet.export.freeze import freeze
from spherenet.export.messages import first_line
from spherenet.export.parity import example_of, require_same_answers

__all__ = ["METADATA_FILE", "export_program", "export_torchscript", "place_of", "trace_program"]

METADATA_FILE = "metadata.json"
"""The name of the extra file with the metadata inside both kinds of program."""


def export_program(
    model: nn.Module,
    folder_or_file: str | os.PathLike[str],
    *,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Path:
    """Write the frozen model as a torch.export program for batches of any size; return the file, model.pt2 in a folder.

    example: a batch of inputs, needed where the model is not a `Classifier`. metadata: JSON values, kept in the file
    as the extra file metadata.json. check: compare with the model at two batch sizes. The file needs torch alone to
    be used (`torch.export.load(file).module()`), and replaces one that is there.
    Raises ModelError for a model that cannot be traced or answers otherwise than before, and for a file that cannot
    be written; ValueError or TypeError for a wrong example.
    """
    example = example_of(model, example)
    program = trace_program(model, example)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={METADATA_FILE: _json(metadata)})
    if check:
        buffer.seek(0)
        require_same_answers(torch.export.load(buffer).module(), model, example, "the exported program")
    return write_file(place_of(folder_or_file, "model.pt2"), lambda path: path.write_bytes(buffer.getvalue()))


def export_torchscript(
    model: nn.Module,
    file: str | os.PathLike[str],
    *,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Path:
    """Write the frozen model as TorchScript for batches of any size; return the file, model.ts in a folder.

    torch has deprecated TorchScript in favour of torch.export; this is for programs that still load it. Arguments and
    errors as in `export_program`. The file needs torch alone to be used (`torch.jit.load(file)`).
    """
    example = example_of(model, example)
    text = _json(metadata)
    buffer = io.BytesIO()
    with _deprecated_torchscript():
        traced = _trace_script(model, example)
        torch.jit.save(traced, buffer, _extra_files={METADATA_FILE: text.encode()})
        if check:
            buffer.seek(0)
            loaded = torch.jit.load(buffer)  # type: ignore[no-untyped-call]
            require_same_answers(loaded, model, example, "the TorchScript program")
    return write_file(place_of(file, "model.ts"), lambda path: path.write_bytes(buffer.getvalue()))


def trace_program(model: nn.Module, example: Tensor) -> ExportedProgram:
    """The frozen model as a torch.export program of plain operations, its input `images` of any batch size."""
    frozen = _OneInput(freeze(model).cpu()).eval()
    _require_scores(frozen, example)
    try:
        program = torch.export.export(frozen, (example,), dynamic_shapes={"images": {0: Dim("batch")}}, strict=False)
    # torch.export raises whatever the code of a model raises, and a dozen types of its own.
    except Exception as error:
        raise ModelError(f"torch.export cannot trace the model: {first_line(error)}.") from error
    for node in program.graph.nodes:
        # Where a line of code lies on this machine is nobody's business elsewhere.
        node.meta.pop("stack_trace", None)
    return program


def place_of(folder_or_file: str | os.PathLike[str], name: str) -> Path:
    """The file to write: the given one, or one of this name in a folder that exists."""
    path = Path(folder_or_file).expanduser()
    return path / name if path.is_dir() else path


class _OneInput(nn.Module):
    """A model whose input is called `images`, whatever the model calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return scores


def _require_scores(frozen: nn.Module, example: Tensor) -> None:
    """Refuse a model that cannot be run on the example or does not answer with one tensor, a row an input."""
    try:
        with torch.no_grad():
            scores = frozen(example)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"the model cannot be run on an input of shape {list(example.shape)}: {first_line(error)}."
        ) from error
    if not isinstance(scores, Tensor):
        raise ModelError(f"the model must return one tensor to be exported, got {type(scores).__name__}.")
    if scores.dim() < 1 or len(scores) != len(example):
        raise ModelError(
            f"the model must return a row for each input to be exported, got shape {list(scores.shape)} for "
            f"{len(example)} inputs."
        )


def _trace_script(model: nn.Module, example: Tensor) -> torch.jit.ScriptModule:
    frozen = _OneInput(freeze(model).cpu()).eval()
    _require_scores(frozen, example)
    try:
        with torch.no_grad():
            traced: torch.jit.ScriptModule = torch.jit.trace(frozen, example, check_trace=False)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"TorchScript cannot trace the model: {first_line(error)}.") from error
    node: Any
    for node in traced.inlined_graph.nodes():
        # Angle functions and layers of somebody's own may call Python or our kernels. torch.export sees through both.
        if node.kind() == "prim::PythonOp" or not node.kind().startswith(("aten::", "prim::")):
            name = node.pyname() if node.kind() == "prim::PythonOp" else node.kind()
            raise ModelError(
                f"TorchScript cannot hold the model: {name} is no operation of torch; export a program or ONNX instead."
            )
    return traced


@contextmanager
def _deprecated_torchscript() -> Iterator[None]:
    """Say nothing of what the docstring of `export_torchscript` says already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        yield


def _json(metadata: Mapping[str, Any] | None) -> str:
    return json.dumps(metadata_as_json(metadata), ensure_ascii=False)
