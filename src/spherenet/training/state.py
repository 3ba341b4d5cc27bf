"""What a run must remember, as tensors and JSON: model, optimiser, loss scaler, counters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spherenet.errors import CheckpointError
from spherenet.losses import obsolete_state

__all__ = ["load_model_tensors", "load_optimizer_tensors", "optimizer_tensors", "require_fitting"]


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load a state dict strictly; CheckpointError says what does not fit."""
    require_fitting(model, tensors, source)
    model.load_state_dict(dict(tensors))


def require_fitting(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise CheckpointError, naming what is missing, unexpected or of another shape or type, unless a state dict fits.

    Floating point numbers may be of another precision; whole and complex numbers are no weights.
    """
    own, obsolete = model.state_dict(), obsolete_state(model)
    common = [name for name in own if name in tensors]
    for problem, names in (
        ("lacks", [name for name in own if name not in tensors]),
        ("has unexpected", [name for name in tensors if name not in own and name not in obsolete]),
        ("has other shapes of", [name for name in common if own[name].shape != tensors[name].shape]),
        ("has other types of", [name for name in common if not _is_like(own[name], tensors[name])]),
    ):
        if names:
            raise CheckpointError(f"{source} does not fit the model: it {problem} {_some(names)}.")


def _is_like(own: Tensor, given: Tensor) -> bool:
    return own.dtype == given.dtype or (own.is_floating_point() and given.is_floating_point())


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as "quantity/parameter" → tensor; its settings come from the config."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{quantity}/{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
        if isinstance(value, Tensor)
    }


_QUANTITIES: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""What each optimiser remembers of a parameter it has updated."""


def load_optimizer_tensors(
    optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], source: str
) -> list[str]:
    """Put back what `optimizer_tensors` returned; CheckpointError where it is not of these parameters.

    What another kind of optimiser remembered is left, and a sentence says so: the new one begins anew.
    """
    expected = _QUANTITIES[type(optimizer)]
    if tensors and not any(key.partition("/")[0] in expected for key in tensors):
        return [f"the state in {source} is of another optimiser: this one begins anew."]
    parameters = dict(model.named_parameters())
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in tensors.items():
        quantity, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or parameter not in updated:
            raise CheckpointError(f"{source} does not fit the model: the optimiser has no parameter {name!r}.")
        missing = [other for other in expected if f"{other}/{name}" not in tensors]
        if quantity not in expected or missing:
            what = f"lacks {missing[0]}" if missing else f"has {quantity!r}"
            raise CheckpointError(f"{source} does not fit the optimiser: it {what} of {name}.")
        if quantity == "step":
            fits = value.dim() == 0 and value.is_floating_point()
        else:
            fits = value.shape == parameter.shape and value.dtype == parameter.dtype
        if not fits:
            found = f"{value.dtype} of shape {tuple(value.shape)}"
            raise CheckpointError(f"{source} does not fit the optimiser: {key} is {found}.")
        on_device = value.dim() > 0 or any(group.get("fused") for group in optimizer.param_groups)
        # As torch keeps it: laid out in memory like the parameter, so that a fused step takes it.
        restored = torch.empty_like(value if quantity == "step" else parameter)
        restored = restored.to(parameter.device) if on_device else restored
        optimizer.state[parameter][quantity] = restored.copy_(value)
    return []


def buffers_of(model: nn.Module) -> list[Tensor]:
    """Copies of all buffers, to be put back when a step did not count."""
    return [buffer.clone() for buffer in model.buffers()]


@torch.no_grad()
def put_back_buffers(model: nn.Module, copies: Iterable[Tensor], where: Tensor | None = None) -> None:
    """Undo what a forward pass did to the buffers (running means, counters), or only if the scalar `where` is true."""
    for buffer, copy in zip(model.buffers(), copies, strict=True):
        buffer.copy_(copy if where is None else torch.where(where, copy, buffer))


def number(state: Mapping[str, Any], key: str) -> float:
    """A finite number of a checkpoint's state; CheckpointError where it is none."""
    value = state.get(key) if isinstance(state, Mapping) else None
    # A whole number that no float holds is nobody's.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise CheckpointError(f"the checkpoint's state has {str(value)[:100]!r} for {key}, not a number.")
    return value


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
