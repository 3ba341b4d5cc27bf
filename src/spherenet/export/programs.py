"""Whether an exported model gives the answers of the model it was made from, and the images to ask it with.

Frozen models as programs of torch's own: torch.export, and TorchScript where torch still supports it.
"""

from __future__ import annotations

import copy
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from spherenet.errors import ModelError
from spherenet.export.folder import metadata_as_json
from spherenet.export.freeze import freeze
from spherenet.files import write_file
from spherenet.models import Classifier
from spherenet.text import first_line

__all__ = [
    "METADATA_FILE",
    "TOLERANCE",
    "example_of",
    "export_program",
    "export_torchscript",
    "place_of",
    "require_same_answers",
    "trace_program",
]

TOLERANCE = 1e-5
"""How far exported scores may be from the model's, relative to the largest of them, or to 1 if that is more."""

ROUNDING_ALLOWANCE = 10.0
"""How many times the model's own rounding error is allowed where that is more.

A network of 69 layers, or of a small k, or in half precision, answers with fewer digits than `TOLERANCE` asks for: its
float32 scores differ from its float64 scores, and other roundings of the same formula differ as much.
"""

PERTURBATIONS = 4
"""How often images are changed in their last digit to see what that does; one lucky sample would show too little."""


def example_of(model: nn.Module, example: Tensor | None) -> Tensor:
    """A batch of at least two inputs on the CPU: the given one, or random images of a `Classifier`'s size.

    Raises ValueError or TypeError for an example that is no batch, or none where the model does not tell its input.
    """
    if example is None:
        if not isinstance(model, Classifier):
            raise ValueError("example must be a batch of inputs for a model that is not a Classifier, got None.")
        size = (2, model.config["in_channels"], *model.config["input_size"])
        dtype = model.head.weight.dtype
        return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    if not isinstance(example, Tensor):
        raise TypeError(f"example must be a tensor, got {type(example).__name__}.")
    if example.dim() < 2 or len(example) < 1:
        raise ValueError(f"example must be a batch of at least one input, got shape {list(example.shape)}.")
    example = example.detach().cpu()
    # A batch of one is taken for a constant by torch.export.
    return example if len(example) > 1 else torch.cat([example, example])


def require_same_answers(run: Callable[[Tensor], Tensor], model: nn.Module, example: Tensor, what: str) -> float:
    """Compare `run` with the model at a batch of one and a larger one; return the largest relative difference.

    Raises ModelError, which begins with `what`, where they differ by more than `TOLERANCE` and more than rounding.
    """
    worst = 0.0
    twin = copy.deepcopy(model).cpu().eval()
    larger = torch.cat([example, example[:1]])
    for batch in (example[:1], larger):
        with torch.no_grad():
            expected = twin(batch)
        difference = _relative(run(batch), expected)
        # Written so that NaN fails.
        if not difference <= TOLERANCE:
            allowed = max(TOLERANCE, ROUNDING_ALLOWANCE * _own_rounding(twin, larger))
            if not difference <= allowed:
                raise ModelError(
                    f"{what} does not give the model's answers: for a batch of {len(batch)} they differ by "
                    f"{difference:.2g}, at most {allowed:.2g} is allowed."
                )
        worst = max(worst, difference)
    return worst


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    peak = max(1.0, expected.double().abs().max().item())
    return (found.double() - expected.double()).abs().max().item() / peak


def _own_rounding(model: nn.Module, batch: Tensor) -> float:
    """How far the model's scores are from those in float64, or move when the images change in their last digit."""
    noise = torch.Generator().manual_seed(0)
    floating = batch.is_floating_point()
    with torch.no_grad():
        scores = model(batch)
        others = [copy.deepcopy(model).double()(batch.double() if floating else batch)]
        for _ in range(PERTURBATIONS if floating else 0):
            change = torch.randn(batch.shape, generator=noise, dtype=torch.float64) * torch.finfo(batch.dtype).eps
            others.append(model((batch * (1 + change)).to(batch.dtype)))
    return max(_relative(scores, other) for other in others)


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
