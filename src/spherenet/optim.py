"""Which weights a model's output does not feel the length of.

A module says so itself with an attribute `scale_invariant`, on its class or on the instance: a head whose loss
normalises the class weights sets it to True, and so may anybody's own layer. Sphere layers need not say it.

Parameter groups for torch's optimisers: weight decay on plain weights only (SPEC 4).

Decay of a scale-invariant weight regularises nothing, it only raises the effective learning rate; decay of the
parameter behind k pulls every k towards 0.7 (softplus of 0), and decay of a scale fights what the scale is for.

An optimiser hook that keeps scale-invariant kernels at their initial norm.

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
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from spherenet.angles import AngleFunction
from spherenet.layers import SphereLayer
from spherenet.ops.norms import working_dtype
from spherenet.validation import require_number

__all__ = ["KeptNorms", "keep_norms", "param_groups"]


def is_scale_invariant(module: nn.Module) -> bool:
    """Return whether the module's output depends on the directions of its kernels only."""
    declared: object = getattr(module, "scale_invariant", None)
    return isinstance(module, SphereLayer) if declared is None else declared is True


def scale_invariant_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the scale-invariant weights of a model under their names, shared ones once.

    The weight of a scale-invariant module holds one kernel an index of its first dimension. Raises ValueError
    for a weight that is still lazy, or that a parametrisation computes: nobody can set the length of that.
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if not is_scale_invariant(module):
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        weight = module._parameters.get("weight")
        if weight is None and getattr(module, "weight", None) is not None:
            raise ValueError(f"model must own its scale-invariant weights, but a parametrisation computes {name}.")
        if weight is not None and id(weight) not in seen:
            require_initialised(name, weight)
            seen.add(id(weight))
            if weight.dim() >= 2:  # a vector of scales holds no kernels
                found[name] = weight
    return found


def require_initialised(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter of a lazy module that has not seen an input yet."""
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"model must be initialised, but {name} is lazy and has no shape yet: run one batch through it first."
        )


_NEVER_DECAYED = (
    AngleFunction,  # k
    _NormBase,  # BatchNorm, InstanceNorm and their kin
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,  # looked up, not multiplied: decay would shrink rows that no batch has seen
    nn.EmbeddingBag,
)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups "decay" and "no_decay" that hold every trainable parameter of a model once.

        torch.optim.Adam(sn.param_groups(model, 5e-4), lr=1e-3)

    Decayed: weights of two dimensions or more, that is of plain convolutions and linear layers (attention,
    recurrent and hand-written ones, and an `AngularHead` under plain softmax, included).
    Not decayed: everything in a sphere layer (its weight, k, β, γ, bias) or in a module with
    `scale_invariant = True`; any angle function's k; normalisation layers; embeddings; and whatever has fewer
    than two dimensions: biases, scales, single numbers.
    A parameter shared by several modules is decayed only if each of them would decay it.

    Both groups are always there, an empty one included, so that an optimiser's saved state fits whatever is
    frozen. Frozen parameters (`requires_grad=False`) are left out: freeze before, not after.

    weight_decay: a finite number of at least 0.
    Raises ValueError for a wrong weight_decay or a lazy parameter without a shape, TypeError for no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
    weight_decay = require_number("weight_decay", weight_decay)
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay!r}.")
    decayed: dict[nn.Parameter, bool] = {}
    _judge(model, "", False, decayed)
    return [
        {"name": "decay", "params": [p for p, yes in decayed.items() if yes], "weight_decay": weight_decay},
        {"name": "no_decay", "params": [p for p, yes in decayed.items() if not yes], "weight_decay": 0.0},
    ]


def _judge(module: nn.Module, prefix: str, spared: bool, decayed: dict[nn.Parameter, bool]) -> None:
    """Note for each trainable parameter under `module` whether it is decayed; a spared module spares its parts.

    The parts matter: a learned k belongs to the layer's angle, a parametrised weight to a list in the layer.
    """
    spared = spared or isinstance(module, _NEVER_DECAYED) or is_scale_invariant(module)
    for name, parameter in module.named_parameters(prefix, recurse=False):
        if parameter.requires_grad:
            require_initialised(name, parameter)
            decayed[parameter] = not spared and parameter.dim() >= 2 and decayed.get(parameter, True)
    for name, child in module.named_children():
        _judge(child, f"{prefix}.{name}" if prefix else name, spared, decayed)


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
