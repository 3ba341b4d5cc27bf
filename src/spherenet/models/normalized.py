"""Weights of norm 1: matrices of normalized transformers, their learned scales, and the hook that keeps the norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spherenet._util.validation import require_module, require_positive
from spherenet.errors import InvalidArgumentType
from spherenet.ops.norms import direction

__all__ = ["EmbeddingMatrix", "LearnedScale", "has_normalized_weights", "keep_normalized", "normalize_weights", "unit"]


def unit(x: Tensor, axis: int = -1) -> Tensor:
    """Return x/‖x‖ along an axis. eps = 1e-12 changes a norm of 1 by less than rounding; a zero vector stays zero."""
    return direction(x, axis, 1e-12)


class EmbeddingMatrix(nn.Module):
    """A matrix without bias whose vectors along the embedding dimension have norm 1 if `sphere`.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        axis: The embedding dimension of `weight` [out_features, in_features]: 1 if the input is a hidden state, 0 if
            the output is.
        sphere: Whether the vectors have norm 1.
    """

    def __init__(self, in_features: int, out_features: int, axis: int, sphere: bool) -> None:
        super().__init__()
        self.axis, self.sphere = axis, sphere
        self.no_weight_decay = sphere  # `param_groups` reads this
        dim = (out_features, in_features)[axis]
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / math.sqrt(dim))
        self.normalize_()

    @torch.no_grad()
    def normalize_(self) -> None:
        """Scale the vectors along the embedding dimension to norm 1; those of a plain counterpart stay as they are."""
        if self.sphere:
            self.weight.copy_(unit(self.weight, self.axis))

    def forward(self, input: Tensor) -> Tensor:
        """Return W·input, for an input [*, in_features]."""
        return F.linear(input, self.weight)


class LearnedScale(nn.Module):
    """A learned vector s that starts at `init` and is stored as s·scale/init.

    An optimizer such as Adam changes every stored number by about its learning rate per step. `scale` therefore chooses
    how fast s changes relative to the weights, whose entries are about 1/√d.

    Args:
        size: Number of entries.
        init: Initial value of s.
        scale: Initial value of the stored vector.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        self.stored = nn.Parameter(torch.full((size,), float(scale)))
        self.ratio = require_positive("init", init) / require_positive("scale", scale)

    def forward(self) -> Tensor:
        """Return s."""
        return self.stored * self.ratio


def has_normalized_weights(model: nn.Module) -> bool:
    """Return whether a model contains a normalized transformer."""
    return any(isinstance(module, EmbeddingMatrix) and module.sphere for module in model.modules())


def normalize_weights(model: nn.Module) -> None:
    """Scale the vectors of all matrices of normalized transformers in a model to norm 1, along the embedding dimension.

    Plain counterparts are left alone.

    Raises:
        TypeError: If the model is no module.
    """
    require_module("model", model)
    for module in model.modules():
        if isinstance(module, EmbeddingMatrix):
            module.normalize_()


def keep_normalized(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Normalize the weights of a model now and after each step of the optimizer; see `normalize_weights`.

    The hook has no state: a run that loads weights after this call continues as if it had not been interrupted. Weights
    of FSDP2 are normalized in place, along sharded dimensions too. `spherenet train` does this by itself.

    Returns:
        A handle; its `remove()` ends it.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentType("optimizer", f"must be a torch optimizer, got {type(optimizer).__name__}.")
    normalize_weights(model)

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        normalize_weights(model)

    return optimizer.register_step_post_hook(after_step)
