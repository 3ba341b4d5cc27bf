"""An optimiser hook that keeps scale-invariant kernels at their initial norm.

The gradient of a scale-invariant kernel is orthogonal to it: a step of SGD makes the kernel longer,
‖w'‖² = ‖w‖² + lr²‖∇‖², and since ‖∇‖ ∝ 1/‖w‖ the angle by which it turns shrinks as lr/‖w‖². Rescaling the
kernel after each step leaves the network's function as it is and the effective step where it was. The paper's
recipe does not do this.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spherenet.ops.norms import working_dtype
from spherenet.optim.scale_invariance import scale_invariant_weights

__all__ = ["KeptNorms", "keep_norms"]


def keep_norms(optimizer: Optimizer, model: nn.Module) -> KeptNorms:
    """Rescale each scale-invariant kernel of a model to its present norm after every step of the optimiser.

        kept = sn.keep_norms(optimizer, model)

    Call it after the weights are initialised or loaded and the optimiser has all its parameter groups. Of the
    model's scale-invariant weights those that the optimiser updates are kept; a model without any is left
    alone, so that a CNN twin trains in the same loop. The optimiser's own state (momentum) is not touched.

    Returns the handle: `remove()` ends it, as leaving a `with` block does; `state_dict()` makes resuming exact.
    Raises ValueError where the optimiser updates none of the model's trainable scale-invariant weights, or
    where one of them is lazy or parametrised; TypeError for wrong types.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimiser, got {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
    weights = {name: weight for name, weight in scale_invariant_weights(model).items() if weight.requires_grad}
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    kept = {name: weight for name, weight in weights.items() if id(weight) in updated}
    if weights and not kept:
        raise ValueError(
            f"optimizer must update the model's scale-invariant weights, but it has none of the {len(weights)}, "
            f"{next(iter(weights))!r} the first: was it made for another model?"
        )
    return KeptNorms(optimizer, kept)


class KeptNorms:
    """What `keep_norms` returns: the norms being kept, and the way to stop keeping them.

    A norm is ‖w‖ of one kernel, one index of a weight's first dimension, without eps. After a step the kernel
    has it again up to the rounding of its dtype, and rounding does not add up: each step compares with the
    norm that was remembered. A kernel that was zero at the start, or is zero or not finite now, has no
    direction to keep and is left as it is.

    Resuming: a new hook on loaded weights takes *their* norms, which differ from the original ones by rounding.
    Save `state_dict()` beside the model and load it, and the resumed run is the uninterrupted one bit by bit.
    """

    def __init__(self, optimizer: Optimizer, weights: Mapping[str, nn.Parameter]) -> None:
        """weights: the weights to keep by name; their norms are taken now."""
        self._weights = dict(weights)
        self._norms = {name: _kernel_norms(weight) for name, weight in self._weights.items()}
        self._handle = optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def rescale(self) -> None:
        """Bring every kernel back to its norm now, as each step of the optimiser does."""
        names_by_device: dict[torch.device, list[str]] = {}
        for name, weight in self._weights.items():
            names_by_device.setdefault(weight.device, []).append(name)
        for device, names in names_by_device.items():
            weights: list[Tensor] = [self._weights[name] for name in names]
            # All kernels of a device in one vector: the arithmetic runs once, not once a layer.
            now = torch.cat([_kernel_norms(weight) for weight in weights])
            factor = torch.cat([self._norms[name].to(device) for name in names]) / now
            factor.masked_fill_(~(factor.isfinite() & (factor > 0)), 1)
            factors = torch.split(factor, [len(weight) for weight in weights])
            shaped = [f.view(-1, *[1] * (w.dim() - 1)) for f, w in zip(factors, weights, strict=True)]
            torch._foreach_mul_(weights, shaped)

    def remove(self) -> None:
        """Stop rescaling; calling it again does nothing."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the kept norms by the weight's name, each [kernels]."""
        return {name: norms.clone() for name, norms in self._norms.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the norms that a `state_dict` holds; ValueError where they are of other weights."""
        expected = {name: list(norms.shape) for name, norms in self._norms.items()}
        found = {name: list(norms.shape) for name, norms in state.items()}
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name):
                raise ValueError(
                    f"state must hold the norms of the kept weights, but {name!r} has shape "
                    f"{found.get(name, 'none')} there and {expected.get(name, 'none')} here."
                )
        self._norms = {name: state[name].detach().to(norms).clone() for name, norms in self._norms.items()}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rescale()

    def __enter__(self) -> KeptNorms:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"KeptNorms({sum(map(len, self._norms.values()))} kernels of {len(self._norms)} weights)"


@torch.no_grad()
def _kernel_norms(weight: Tensor) -> Tensor:
    """‖w‖ of each kernel, [kernels], in float32 at least; the memory format is respected, nothing is copied."""
    dims = tuple(range(1, weight.dim()))
    norms: Tensor = torch.linalg.vector_norm(weight, dim=dims, dtype=working_dtype(weight.dtype))
    return norms
