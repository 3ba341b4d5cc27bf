"""Keep the norms of scale-invariant kernels while any optimizer of torch trains them.

The gradient of a scale-invariant kernel is orthogonal to it. A step of SGD therefore makes the kernel longer,
‖w'‖² = ‖w‖² + lr²‖∇‖², and because ‖∇‖ ∝ 1/‖w‖, the angle by which later steps rotate it decreases as lr/‖w‖². This is
an implicit decay of the learning rate. `keep_norms` removes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spherenet._util.validation import require_module, require_one_of
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.optim.kernels import Kernels, invariant_kernels, num_kernels

__all__ = ["KeptNorms", "keep_norms"]

MODES = ("renormalize", "project")


def keep_norms(optimizer: Optimizer, model: nn.Module, mode: str = "renormalize") -> KeptNorms:
    """Keep each scale-invariant kernel of a model at its current norm r in every step of the optimizer.

    Let Δ be the update of the optimizer, ŵ = w/‖w‖, and Δ_⊥ = Δ − ŵ(ŵᵀΔ) its component along the sphere.

    - "renormalize": w ← r·(w + Δ)/‖w + Δ‖. The kernel rotates by about ‖Δ_⊥‖/r per step. With SGD, whose gradient is
      proportional to 1/r, this is proportional to lr/r²; with Adam, to lr/r.
    - "project" (Eq. 20): w ← r·(ŵ + Δ_⊥)/‖ŵ + Δ_⊥‖. The radial component, which momentum, adaptive step sizes and
      weight decay add, has no effect, and the update is relative to the norm: the kernel rotates by arctan ‖Δ_⊥‖
      whatever r is. With Adam this is about lr·√n for kernels with n entries, e.g. 1.4° for lr = 1e-3 and n = 576.

    Without `keep_norms`, norms grow and rotations decrease during training. With it, the learning rate schedule alone
    decides how fast they decrease: a run that relied on growing norms needs a schedule or a smaller learning rate.
    Neither mode changes the function that the model computes, or the state of the optimizer.

    Call it after the weights are initialized or loaded and the optimizer has all of its parameter groups. It keeps
    those scale-invariant weights that the optimizer updates; see `param_groups` for which weights these are. A weight
    that is tied to a module that is not scale-invariant, such as an embedding, is left alone, because its norm matters
    there. A model without any is left alone, so that a plain CNN trains in the same loop. All processes of a DDP run
    compute the same update. Weights of FSDP2 (DTensor) must be sharded along their first dimension, which is its
    default.

    Args:
        optimizer: The optimizer that updates the model.
        model: The model.
        mode: "renormalize" or "project".

    Returns:
        A handle. `remove()` or leaving a `with` block ends it; `state_dict()` makes resuming exact.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the mode is unknown, the optimizer updates none of the model's trainable scale-invariant weights,
            or one of them is lazy, parametrized or sharded along another dimension.

    Example:
        >>> kept = sn.keep_norms(optimizer, model, mode="project")
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentType("optimizer", f"must be a torch optimizer, got {type(optimizer).__name__}.")
    require_module("model", model)
    require_one_of("mode", mode, MODES)
    weights = {name: kernels for name, kernels in invariant_kernels(model).items() if kernels.weight.requires_grad}
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    kept = {name: kernels for name, kernels in weights.items() if id(kernels.weight) in updated}
    if weights and not kept:
        raise InvalidArgument(
            "optimizer",
            f"must update the scale-invariant weights of the model, but has none of the {len(weights)}, of "
            f"which the first is {next(iter(weights))!r}; was it created for another model?",
        )
    return KeptNorms(optimizer, kept, mode)


class KeptNorms:
    """Handle of `keep_norms`: it holds the norms and ends the keeping.

    A norm is ‖w‖ of one kernel, without eps. After a step the kernel has this norm again up to the rounding of its
    dtype. Rounding errors do not accumulate, because each step compares with the stored norm. A kernel that was zero at
    the start, or is zero or not finite before or after a step, has no direction and is left as the optimizer set it.

    A new handle on loaded weights measures their norms, which differ from the original ones by rounding. Save
    `state_dict()` with the model and load it, and a resumed run is bit-identical to an uninterrupted one.

    Args:
        optimizer: The optimizer.
        weights: Weights to keep by name. Their norms are measured now.
        mode: "renormalize" or "project".
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, Kernels], mode: str = "renormalize") -> None:
        self.mode = mode
        self._weights = dict(weights)
        self._norms = {name: kernels.norms(kernels.local()) for name, kernels in self._weights.items()}
        self._before: dict[str, Tensor] = {}
        self._handles = [optimizer.register_step_post_hook(self._after_step)]
        if mode == "project":
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    @torch.no_grad()
    def rescale(self) -> None:
        """Scale every kernel to its norm now, as each step in the mode "renormalize" does."""
        values = {name: kernels.local() for name, kernels in self._weights.items()}
        by_device: dict[torch.device, list[str]] = {}
        for name, value in values.items():
            by_device.setdefault(value.device, []).append(name)
        for device, names in by_device.items():
            # All kernels of a device in one vector: the arithmetic runs once instead of once per layer.
            now = [self._weights[name].norms(values[name]) for name in names]
            factor = torch.cat([self._norms[name].to(device).flatten() for name in names])
            factor /= torch.cat([norms.flatten() for norms in now])
            factor.masked_fill_(~(factor.isfinite() & (factor > 0)), 1)
            factors = torch.split(factor, [norms.numel() for norms in now])
            shaped = [part.view(norms.shape) for part, norms in zip(factors, now, strict=True)]
            torch._foreach_mul_([values[name] for name in names], shaped)

    def remove(self) -> None:
        """Stop keeping the norms; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the kept norms by the name of the weight, each [kernels]. All processes of FSDP2 must call it."""
        return {name: kernels.gather(self._norms[name]) for name, kernels in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the norms of a `state_dict`.

        Raises:
            ValueError: If they belong to other weights.
        """
        expected = {name: [num_kernels(kernels)] for name, kernels in self._weights.items()}
        actual = {name: list(norms.shape) for name, norms in state.items()}
        for name in {**expected, **actual}:
            if expected.get(name) != actual.get(name):
                raise InvalidArgument(
                    "state",
                    f"must hold the norms of the kept weights, but {name!r} has shape "
                    f"{actual.get(name, 'none')} there and {expected.get(name, 'none')} here.",
                )
        self._norms = {name: self._weights[name].scatter(state[name], norms) for name, norms in self._norms.items()}

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = {name: kernels.local().clone() for name, kernels in self._weights.items()}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.mode == "project":
            self._project()
        else:
            self.rescale()

    @torch.no_grad()
    def _project(self) -> None:
        """Replace the update of the last step by the projected one (Eq. 20)."""
        for name, before in self._before.items():
            kernels, values, kept = self._weights[name], self._weights[name].local(), self._norms[name]
            start = before.to(kept.dtype)
            direction = start / kernels.norms(start)
            update = values.to(kept.dtype) - start
            dims = [dim for dim, size in enumerate(kept.shape) if size == 1]
            radial = (direction * update).sum(dims, keepdim=True)
            direction = torch.addcmul(direction + update, direction, radial, value=-1)
            kept = kept.to(values.device)
            projected = direction * (kept / kernels.norms(direction))
            usable = projected.isfinite().all(dims, keepdim=True) & (kept > 0)
            values.copy_(torch.where(usable, projected, values.to(projected.dtype)))
        self._before = {}

    def __enter__(self) -> KeptNorms:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        count = sum(map(num_kernels, self._weights.values()))
        return f"KeptNorms({count} kernels of {len(self._weights)} weights, mode={self.mode!r})"
