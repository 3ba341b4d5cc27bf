"""What the paper argues with, measured on a batch: variances of outputs, norms of weights and features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data import Batch
from spherenet.layers import AngularHead
from spherenet.ops.margins import AngularOutput
from spherenet.regularizers import k_values

__all__ = ["COLLAPSED", "Observation"]

COLLAPSED = 0.05
"""Features shorter than this share of their first length have collapsed: the loss has nothing left to scale."""


class Observation:
    """Measures a model on a batch at each evaluation, and warns when its features collapse (SPEC 1 (5))."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._first_norm: float | None = None

    @torch.no_grad()
    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return output variances and weight norms by layer, the mean feature norm, and the learned k."""
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
                name: _short(parameter.norm().item())
                for name, parameter in model.named_parameters()
                if parameter.dim() > 1
            },
        }
        learned = {name: [_short(k) for k in found["values"]] for name, found in k_values(model).items()}
        if learned:
            row["k"] = learned
        if feature_norms:
            row["feature_norm"] = feature_norms[0]
            self._look_for_collapse(feature_norms[0])
        return row

    def _look_for_collapse(self, norm: float) -> None:
        if self._first_norm is None:
            self._first_norm = norm
        elif norm < COLLAPSED * self._first_norm:
            self._warn(
                f"the feature norm has collapsed from {self._first_norm:.3g} to {norm:.3g}: "
                "the loss scales with it, so training will stand still; try a smaller margin or a slower annealing."
            )


def _short(value: float | None) -> float | None:
    """Five digits: these numbers are looked at, not computed with, and there are many of them."""
    return None if value is None else float(f"{value:.5g}")


@contextmanager
def _hooks(model: nn.Module, variances: dict[str, float | None], feature_norms: list[float]) -> Iterator[None]:
    """Record what layers and head return while the block runs."""

    def of_layer(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            variances[name] = _short(output.float().var().item())

        return record

    def of_head(module: nn.Module, inputs: Any, output: AngularOutput) -> None:
        feature_norms.append(output.feature_norm.mean().item())

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            handles.append(module.register_forward_hook(of_layer(name)))
        elif isinstance(module, AngularHead):
            handles.append(module.register_forward_hook(of_head))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
