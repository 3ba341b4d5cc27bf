"""Export frozen models as torch.export programs, and compare their scores with the model's."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from spherenet._util.atomic import atomic_file
from spherenet._util.files import to_json, user_path
from spherenet._util.text import first_line
from spherenet.errors import InvalidArgument, InvalidArgumentType, ModelError
from spherenet.export.description import metadata_as_json
from spherenet.export.freeze import freeze
from spherenet.export.weights import writing
from spherenet.models import Classifier

__all__ = [
    "METADATA_FILE",
    "TOLERANCE",
    "example_batch",
    "export_program",
    "output_file",
    "require_same_scores",
    "trace_program",
]

TOLERANCE = 1e-5
"""Allowed difference between exported scores and the model's, relative to the largest score, but at least to 1."""

ROUNDING_ALLOWANCE = 10.0
"""Allowed difference in multiples of the model's own rounding error, if that is more than `TOLERANCE`.

Deep networks, a small k or half precision have larger rounding errors: their scores differ from those in float64, and
other ways to round the same formula differ as much.
"""

PERTURBATIONS = 4
"""Number of perturbations of the images by which the rounding error is estimated."""


def example_batch(model: nn.Module, example: Tensor | None) -> Tensor:
    """Return a batch of at least two inputs on the CPU: `example`, or random images of a `Classifier`'s input size.

    Raises:
        ValueError: If the example is not a batch, or is None for a model that is not a `Classifier`.
        TypeError: If the example is not a tensor.
    """
    if example is None:
        if not isinstance(model, Classifier):
            raise InvalidArgument(
                "example", "must be a batch of inputs for a model that is not a Classifier, got None."
            )
        size = (2, model.config["in_channels"], *model.config["input_size"])
        dtype = model.head.weight.dtype
        return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    if not isinstance(example, Tensor):
        raise InvalidArgumentType("example", f"must be a tensor, got {type(example).__name__}.")
    if example.dim() < 2 or len(example) < 1:
        raise InvalidArgument("example", f"must be a batch of at least one input, got shape {list(example.shape)}.")
    example = example.detach().cpu()
    # torch.export treats a batch size of one as a constant.
    return example if len(example) > 1 else torch.cat([example, example])


def require_same_scores(run: Callable[[Tensor], Tensor], model: nn.Module, example: Tensor, what: str) -> float:
    """Compare `run` with the model at two batch sizes and return the largest relative difference.

    Raises ModelError, which starts with `what`, if they differ by more than `TOLERANCE` and more than by rounding.
    """
    worst = 0.0
    reference = copy.deepcopy(model).cpu().eval()
    larger = torch.cat([example, example[:1]])
    for batch in (example[:1], larger):
        with torch.no_grad():
            expected = reference(batch)
        difference = _relative_difference(run(batch), expected)
        if not difference <= TOLERANCE:  # NaN fails too
            allowed = max(TOLERANCE, ROUNDING_ALLOWANCE * _rounding_error(reference, larger))
            if not difference <= allowed:
                raise ModelError(
                    f"{what} must return the scores of the model up to a difference of {allowed:.2g}, "
                    f"got {difference:.2g} for a batch of {len(batch)}."
                )
        worst = max(worst, difference)
    return worst


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    peak = max(1.0, expected.double().abs().max().item())
    return (actual.double() - expected.double()).abs().max().item() / peak


def _rounding_error(model: nn.Module, batch: Tensor) -> float:
    """Return by how much the scores differ from those in float64 or of images perturbed in their last digit."""
    generator = torch.Generator().manual_seed(0)
    floating = batch.is_floating_point()
    with torch.no_grad():
        scores = model(batch)
        others = [copy.deepcopy(model).double()(batch.double() if floating else batch)]
        for _ in range(PERTURBATIONS if floating else 0):
            change = torch.randn(batch.shape, generator=generator, dtype=torch.float64) * torch.finfo(batch.dtype).eps
            others.append(model((batch * (1 + change)).to(batch.dtype)))
    return max(_relative_difference(scores, other) for other in others)


METADATA_FILE = "metadata.json"
"""Name of the extra file with the metadata inside of a program."""


def export_program(
    model: nn.Module,
    folder_or_file: str | os.PathLike[str],
    *,
    example: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Path:
    """Write the frozen model as a torch.export program for batches of any size.

    The file needs only torch: `torch.export.load(file).module()`.

    Args:
        model: Any module that returns one row of scores per input.
        folder_or_file: File to write or replace, or an existing folder for the file model.pt2.
        example: Batch of inputs, required if the model is not a `Classifier`.
        metadata: JSON values, saved as the extra file metadata.json.
        check: Whether to compare the program with the model at two batch sizes.

    Returns:
        The file.

    Raises:
        ModelError: If the model cannot be traced, the scores of the program differ, or the file cannot be written.
        ValueError: If the example is missing or empty.
        TypeError: If the example is not a tensor.
    """
    example = example_batch(model, example)
    program = trace_program(model, example)
    buffer = io.BytesIO()
    text = to_json(metadata_as_json(metadata), indent=None).strip()
    torch.export.save(program, buffer, extra_files={METADATA_FILE: text})
    if check:
        buffer.seek(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # torch 2.10
            loaded = torch.export.load(buffer).module()
        require_same_scores(loaded, model, example, "the exported program")
    with writing(output_file(folder_or_file, "model.pt2")) as target, atomic_file(target) as path:
        path.write_bytes(buffer.getvalue())
    return target


def trace_program(model: nn.Module, example: Tensor) -> ExportedProgram:
    """Return the frozen model as a torch.export program with the input `images` of any batch size."""
    frozen = _OneInput(freeze(model).cpu()).eval()
    _require_scores(frozen, example)
    try:
        program = torch.export.export(frozen, (example,), dynamic_shapes={"images": {0: Dim("batch")}}, strict=False)
    except Exception as error:  # errors of the model and a dozen types of torch.export
        raise ModelError(f"torch.export cannot trace the model: {first_line(error)}.") from error
    for node in program.graph.nodes:
        # Stack traces contain paths of this machine.
        node.meta.pop("stack_trace", None)
    return program


def output_file(folder_or_file: str | os.PathLike[str], name: str) -> Path:
    """Return the file to write: the path itself, or a file of this name if the path is a folder."""
    path = user_path(folder_or_file)
    return path / name if path.is_dir() else path


class _OneInput(nn.Module):
    """Wrapper that names the input of a model `images`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        return scores


def _require_scores(frozen: nn.Module, example: Tensor) -> None:
    """Raise ModelError if a model cannot be run on the example or does not return one tensor with a row per input."""
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
            f"the model must return one row per input to be exported, got shape {list(scores.shape)} for "
            f"{len(example)} inputs."
        )
