"""Muon: momentum whose update is orthogonalized, for convolutions as well as matrices.

A weight [filters, …] is a matrix W with one row per filter. Let M be its momentum with the singular value decomposition
M = U·S·Vᵀ. Muon steps along U·Vᵀ, in which all directions have the same length, instead of along M:

    M ← μM + ∇,  W ← W − lr·O,  O ≈ U·Vᵀ of ∇ + μM (Nesterov) or of M                            docs/choosing.md

O comes from a few Newton–Schulz iterations X ← aX + (bA + cA²)X with A = XXᵀ, which are matrix products only.

`torch.optim.Muon` takes matrices only, always computes in bfloat16 and has no fixed norms. For matrices and `norm=None`
this class makes the same step, up to the precision of the iterations (tests/optim/test_muon.py compares them).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spherenet._util.validation import require_integer, require_memory, require_number, require_one_of
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.ops.norms import working_dtype
from spherenet.optim.kernels import is_dtensor
from spherenet.optim.step import SteppingOptimizer, as_list

__all__ = ["COEFFICIENTS", "Muon", "orthogonalize", "require_matrices"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the iteration by Jordan et al., 2024: the slope at 0 is as large as convergence to about 1 allows."""

NORMS = (None, "frobenius", "filter")


def orthogonalize(
    matrix: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return about U·Vᵀ of a matrix U·S·Vᵀ by Newton–Schulz iterations in the dtype of the matrix.

    Singular values above about 1 % of the Frobenius norm become 0.7 to 1.2 in five steps. They do not converge to 1,
    which training does not need.

    Args:
        matrix: Matrix [rows, columns].
        steps: Number of iterations.
        coefficients: a, b and c.
        eps: Smallest Frobenius norm by which the matrix is divided, so that 0 stays 0.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(SteppingOptimizer):
    """Optimizer that orthogonalizes the momentum of each weight, and can keep the norm of the weight.

    **Learning rate.** O has singular values of about 1, hence the Frobenius norm √min(filters, entries of a filter),
    whatever the gradient. With `norm="frobenius"` or `"filter"` the weight has the Frobenius norm √filters. If a filter
    has at least as many entries as there are filters, a step therefore turns the weight by about arctan(lr) as a whole,
    in every layer and at every scale of the loss: lr = 0.24 is 13°. Without fixed norms the angle shrinks as the weight
    grows. Rates that suit Adam are too small.

    Give biases, scales, embeddings and the class weights to another optimizer: `sn.param_groups(model, filters="muon")`
    with `MixedOptimizer` does.

    Under DDP all processes make the same step. For weights of FSDP2 each process gathers the momentum, one weight at a
    time, and orthogonalizes all of it.

    Args:
        params: Parameters with two dimensions or more, or groups of them.
        lr: Learning rate.
        momentum: μ.
        nesterov: Whether the update looks ahead by one step of the momentum.
        weight_decay: Decoupled weight decay: weights are multiplied by 1 − lr·weight_decay. 0 if norms are kept.
        norm: "frobenius" scales each weight to the Frobenius norm √filters, "filter" each filter to the norm 1, before
            the first step and after every step. None leaves norms alone. Use it only for weights whose norm does not
            matter, such as those of sphere layers, or before BatchNorm.
        steps: Number of Newton–Schulz iterations.
        dtype: Dtype of the iterations; None for bfloat16 on GPUs and the gradient's, at least float32, on CPUs.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or a parameter has fewer than two dimensions.

    Example:
        >>> optimizer = sn.optim.Muon(model.features.parameters(), lr=0.24, momentum=0.6, norm="frobenius", steps=3)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        norm: str | None = None,
        steps: int = 5,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "norm": norm,
            "steps": steps,
            "dtype": dtype,
        }
        super().__init__(as_list("params", params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose options are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name in ("lr", "momentum", "weight_decay"):
                if require_number(name, group[name]) < 0:
                    raise InvalidArgument(name, f"must be at least 0, got {group[name]!r}.")
            if group["momentum"] >= 1:
                raise InvalidArgument("momentum", f"must be less than 1, got {group['momentum']!r}.")
            require_integer("steps", group["steps"], minimum=1)
            require_one_of("norm", group["norm"], NORMS)
            if group["norm"] is not None and group["weight_decay"]:
                raise InvalidArgument(
                    "weight_decay", f"must be 0 if norms are kept, which undoes it, got {group['weight_decay']!r}."
                )
            require_matrices("Muon", group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _step(self) -> None:
        """Make one step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise InvalidArgument(
                "gradients",
                f"must be dense for Muon, got a {gradient.layout} one of shape {list(gradient.shape)}.",
            )
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
            _scale(weight, group["norm"])
        momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        direction = gradient.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        if group["weight_decay"]:
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(_orthogonal(direction, group["steps"], group["dtype"]), alpha=-group["lr"])
        _scale(weight, group["norm"])


def _orthogonal(direction: Any, steps: int, dtype: torch.dtype | None) -> Tensor:
    """Return the orthogonalized update in the shape, dtype and sharding of the momentum."""
    whole: Tensor = direction.full_tensor() if is_dtensor(direction) else direction
    if dtype is None:
        dtype = torch.promote_types(whole.dtype, torch.float32) if whole.device.type == "cpu" else torch.bfloat16
    # The order of a row's entries does not matter: for channels-last weights the matrix is a view.
    rows = whole.permute(0, *range(2, whole.dim()), 1)
    update = orthogonalize(rows.flatten(1).to(dtype), steps).reshape(rows.shape)
    update = update.permute(0, -1, *range(1, whole.dim() - 1)).to(whole.dtype)
    if not is_dtensor(direction):
        return update
    from torch.distributed.tensor import distribute_tensor

    # Every process has computed the same update, so that nothing is sent.
    sharded: Tensor = distribute_tensor(update, direction.device_mesh, direction.placements, src_data_rank=None)
    return sharded


def _scale(weight: Any, norm: str | None) -> None:
    """Scale a weight to the Frobenius norm √filters, or each filter to the norm 1; zeros stay zeros."""
    if norm is None:
        return
    dims = tuple(range(weight.dim())) if norm == "frobenius" else tuple(range(1, weight.dim()))
    norms: Any = torch.linalg.vector_norm(weight, dim=dims, keepdim=True, dtype=working_dtype(weight.dtype))
    target = weight.shape[0] ** 0.5 if norm == "frobenius" else 1.0
    factor = torch.where(norms > 0, target / norms, torch.ones_like(norms))
    weight.mul_(factor)


def require_matrices(optimizer: str, group: dict[str, Any]) -> None:
    """Raise an error if a group has a parameter that an optimizer of matrices cannot treat."""
    names = group.get("param_names", [None] * len(group["params"]))
    for name, parameter in zip(names, group["params"], strict=True):
        label = "params" if name is None else f"params[{name!r}]"
        require_memory(parameter)
        if parameter.dim() < 2:
            raise InvalidArgument(
                label,
                f"must have two dimensions or more for {optimizer}, got shape {list(parameter.shape)}: "
                "give it to another optimizer, see sn.param_groups and MixedOptimizer.",
            )
        if not parameter.is_floating_point():
            raise InvalidArgumentType(
                label, f"must be real floating point numbers for {optimizer}, got {parameter.dtype}."
            )
