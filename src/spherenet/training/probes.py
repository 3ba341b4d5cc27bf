"""Probes: output variances, weight norms, feature norm and learned k of a model, measured on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data import Batch
from spherenet.layers import AngularHead
from spherenet.ops.angular import AngularOutput
from spherenet.regularizers import k_values

__all__ = ["COLLAPSED", "Probes"]

COLLAPSED = 0.05
"""Features have collapsed if their mean norm falls below this fraction of its first value."""


class Probes:
    """Measure a model on a batch, and warn when its feature norm collapses, which annealing (Eq. 7) prevents.

    Args:
        warn: Function that receives the warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._first_norm: float | None = None

    @torch.no_grad()
    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return output variances and weight norms per layer, the mean feature norm, and the learned k."""
        variances: dict[str, float | None] = {}
        feature_norms: list[float] = []
        was_training = model.training
        model.eval()
        with _hooks(model, variances, feature_norms):
            model(batch.images)
        model.train(was_training)
        row: dict[str, Any] = {
            "output_variance": variances,
            "weight_norm": {
                name: _rounded(parameter.norm().item())
                for name, parameter in model.named_parameters()
                if parameter.dim() > 1
            },
        }
        learned = {name: [_rounded(k) for k in entry["values"]] for name, entry in k_values(model).items()}
        if learned:
            row["k"] = learned
        if feature_norms:
            row["feature_norm"] = feature_norms[0]
            self._check_collapse(feature_norms[0])
        return row

    def _check_collapse(self, norm: float) -> None:
        if self._first_norm is None:
            self._first_norm = norm
        elif norm < COLLAPSED * self._first_norm:
            self._warn(
                f"the feature norm has collapsed from {self._first_norm:.3g} to {norm:.3g}: the loss is proportional "
                "to it, so training will stagnate; try a smaller margin or slower annealing."
            )


def _rounded(value: float | None) -> float | None:
    """Round to five digits, because there are many of these values and they are only displayed."""
    return None if value is None else float(f"{value:.5g}")


@contextmanager
def _hooks(model: nn.Module, variances: dict[str, float | None], feature_norms: list[float]) -> Iterator[None]:
    """Record output variances of layers and feature norms of heads while the block runs."""

    def layer_hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            variances[name] = _rounded(output.float().var().item())

        return record

    def head_hook(module: nn.Module, inputs: Any, output: AngularOutput) -> None:
        feature_norms.append(output.feature_norm.mean().item())

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            handles.append(module.register_forward_hook(layer_hook(name)))
        elif isinstance(module, AngularHead):
            handles.append(module.register_forward_hook(head_hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
