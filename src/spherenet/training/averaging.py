"""Moving average of the weights of a run, which is evaluated and saved instead of the weights of the last step.

After step t the average is Σ dᵗ⁻ˢ·wₛ / Σ dᵗ⁻ˢ over the steps s = 1 … t with the decay d, so that the first steps count
no more than later ones. It is computed as ā ← ā + (w − ā)·(1 − d)/(1 − dᵗ), a function of the step without a counter.

`torch.optim.swa_utils.AveragedModel` keeps a second model. Here the average takes the place of the weights while the
model is evaluated, because evaluation protocols and probes refer to the layers of the model that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spherenet.models.transformer import EmbeddingMatrix
from spherenet.optim.kernels import invariant_kernels
from spherenet.training.config import TrainConfig
from spherenet.training.state import require_fitting

__all__ = ["WeightAverage"]


class WeightAverage:
    """Average of the weights and buffers of a model; without effect if `config.average_weights` is 0.

    Running statistics of BatchNorm are averaged like weights; counters are copied. The mean of two weights of the same
    norm is shorter. A weight whose norm `keep_norms`, Muon or a normalized transformer keeps is therefore scaled to
    that norm after each step, as a whole or per vector; the norm of any other weight is that of the mean.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer.
        config: Decay, and whether norms are kept.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: TrainConfig) -> None:
        self.decay = config.average_weights
        self._own: dict[str, Tensor] = {}
        self._norms: dict[str, Callable[[Tensor], Tensor]] = {}
        self._is_applied = False
        if self.decay:
            self._own = {name: parameter.detach() for name, parameter in model.named_parameters()}
            self._own |= dict(model.named_buffers())
            self._norms = _kept_norms(model, optimizer, config)
        self._model = model
        self._average = {name: tensor.clone() for name, tensor in self._own.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights of a step, counted from 1."""
        weight = (1 - self.decay) / (1 - self.decay**step)
        for name, average in self._average.items():
            own = self._own[name]
            if not average.is_floating_point():
                average.copy_(own)
                continue
            average.lerp_(own, weight)
            if name in self._norms:
                factor = self._norms[name](own) / self._norms[name](average)
                average.mul_(factor.masked_fill_(~factor.isfinite(), 1))  # opposite weights have the mean 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the average within the block."""
        if self._is_applied or not self._average:
            yield
            return
        trained = {name: tensor.clone() for name, tensor in self._own.items()}
        self._is_applied = True
        try:
            self._set(self._average)
            yield
        finally:
            self._set(trained)
            self._is_applied = False

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in self._own.items():
            tensor.copy_(tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by name."""
        return {f"average/{name}": tensor for name, tensor in self._average.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model with the average."""
        with self.applied():
            return {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor] | None, source: str) -> list[str]:
        """Load what `state_dict` returned, after the weights of the model.

        Returns:
            A warning if there is nothing to load because the run had no average before; it starts at the weights.

        Raises:
            CheckpointError: If the average does not fit the model.
        """
        if not self._average:
            return []
        if state is not None:
            require_fitting(self._model, state, source)
        for name, average in self._average.items():
            average.copy_(self._own[name] if state is None or name not in state else state[name])
        return [f"{source} has no average of weights: it starts here."] if state is None else []


def _kept_norms(model: nn.Module, optimizer: Optimizer, config: TrainConfig) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return by name of a weight whose norm is kept the function that measures it, in a shape that multiplies it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    norms: dict[str, Callable[[Tensor], Tensor]] = {
        names[id(parameter)]: torch.linalg.vector_norm
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("norm") == "frobenius"
    }
    for name, module in model.named_modules():
        if isinstance(module, EmbeddingMatrix) and module.sphere:
            norms[f"{name}.weight"] = partial(torch.linalg.vector_norm, dim=module.axis, keepdim=True)
    if config.keep_norms:
        norms |= {name: own.norms_of for name, own in invariant_kernels(model).items() if own.weight.requires_grad}
    return norms
