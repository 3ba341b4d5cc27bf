"""Whether an exported model gives the answers of the model it was made from, and the images to ask it with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spherenet.errors import ModelError
from spherenet.models import Classifier

__all__ = ["TOLERANCE", "example_of", "require_same_answers"]

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
