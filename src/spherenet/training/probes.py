"""Probes: what a network is like on a batch at each evaluation, beside its accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data import Batch, Split
from spherenet.layers import AngularHead
from spherenet.metrics import neural_collapse
from spherenet.ops.angular import AngularOutput
from spherenet.regularizers import k_values

__all__ = ["COLLAPSED", "Probes", "class_angles", "probe_batch"]

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
        """Return output variances and weight norms per layer, the mean feature norm, k or p, and angles of classes."""
        variances: dict[str, float | None] = {}
        features: list[Tensor] = []
        feature_norms: list[float] = []
        was_training = model.training
        model.eval()
        with _hooks(model, variances, features, feature_norms):
            model(batch.images, batch.labels)  # with labels, because the scores of a sharded head are not gathered
        model.train(was_training)
        row: dict[str, Any] = {
            "output_variance": variances,
            "weight_norm": {
                name: _rounded(_norm(parameter)) for name, parameter in model.named_parameters() if parameter.dim() > 1
            },
        }
        for name, entry in k_values(model).items():
            row.setdefault(entry["parameter"], {})[name] = [_rounded(value) for value in entry["values"]]
        if feature_norms:
            row["feature_norm"] = feature_norms[0]
            self._check_collapse(feature_norms[0])
            row |= class_angles(features[0], batch.labels)
        return row

    def _check_collapse(self, norm: float) -> None:
        if self._first_norm is None:
            self._first_norm = norm
        elif norm < COLLAPSED * self._first_norm:
            self._warn(
                f"the feature norm has collapsed from {self._first_norm:.3g} to {norm:.3g}: the loss is proportional "
                "to it, so training will stagnate; try a smaller margin or slower annealing."
            )


def probe_batch(split: Split, batch_size: int, device: torch.device) -> Batch:
    """Return a fixed random sample of a split, without augmentation: images of a folder are sorted by class."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:batch_size]
    return next(iter(split.batches([(0, order)], device=device, augmentation=None)))


def class_angles(features: Tensor, labels: Tensor) -> dict[str, float]:
    """Return angles in radians within and between classes and the distance to a simplex; see `neural_collapse`.

    Classes with one image in the batch have no angle within them and are left out. The result is empty if fewer than
    two classes are left, or if a value is not finite or a class has no direction.
    """
    counts = torch.bincount(labels)
    used = counts[labels] > 1
    if not bool(used.any()):
        return {}
    try:
        result = neural_collapse(features[used].float().cpu(), labels[used].cpu())
    except ValueError:
        return {}
    names = ("within_class_angle", "between_class_angle", "simplex_distance")
    return {name: float(f"{getattr(result, name):.5g}") for name in names}


def _norm(parameter: Any) -> float:
    """Return the norm of a parameter, also of a sharded one; all processes must call it then."""
    norm = parameter.detach().norm()
    return float((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())


def _rounded(value: float | None) -> float | None:
    """Round to five digits, because there are many of these values and they are only displayed."""
    return None if value is None else float(f"{value:.5g}")


@contextmanager
def _hooks(
    model: nn.Module, variances: dict[str, float | None], features: list[Tensor], feature_norms: list[float]
) -> Iterator[None]:
    """Record output variances of layers, and features and their norms of heads, while the block runs."""

    def layer_hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            variances[name] = _rounded(output.float().var().item())

        return record

    def head_hook(module: nn.Module, inputs: Any, output: AngularOutput) -> None:
        features.append(inputs[0])
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
