"""Checks of what a loss is called with; each failure is one sentence with the value and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from spherenet.kernels.dispatch import can_look_at_values
from spherenet.ops.angular_output import AngularOutput
from spherenet.ops.arguments import require_floating

__all__ = ["check_class_weight", "check_labels", "check_output"]

SUM_TOLERANCE = 0.02
"""How far probabilities may be from a sum of 1: bfloat16 keeps three digits."""


def check_output(output: object) -> AngularOutput:
    """Return `output` if a loss can read it: an `AngularOutput` of at least two classes and fitting shapes."""
    if not isinstance(output, AngularOutput):
        raise TypeError(f"output must be an AngularOutput, what AngularHead returns, got {type(output).__name__}.")
    cosine, feature_norm, weight_norm, bias = output
    require_floating("output.cosine", cosine)
    if cosine.dim() < 1 or cosine.shape[-1] < 2:
        raise ValueError(f"output.cosine must have at least 2 classes in its last dimension, got {list(cosine.shape)}.")
    expected = {
        "feature_norm": (feature_norm, cosine.shape[:-1]),
        "weight_norm": (weight_norm, cosine.shape[-1:]),
        "bias": (bias, cosine.shape[-1:]),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"output.{name} must have shape {list(shape)} for cosines of shape {list(cosine.shape)}, "
                f"got {list(tensor.shape)}."
            )
    return output


def check_labels(labels: Tensor, cosine: Tensor, ignore_index: int) -> Tensor:
    """Return labels for cosines [*, C]: int64 class indices [*], or floating probabilities [*, C].

    Values are looked at on the CPU only, and not while tracing. Elsewhere that would make every step wait for
    the device; an index out of range is caught there by torch's own assertion in the indexing kernels.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")
    if labels.device != cosine.device:
        raise ValueError(f"labels must be on the device of the output, {cosine.device}, got {labels.device}.")
    if torch.is_floating_point(labels):
        if labels.shape != cosine.shape:
            raise ValueError(
                f"labels must be class indices (int64) of shape {list(cosine.shape[:-1])} or floating "
                f"probabilities of shape {list(cosine.shape)}, got {labels.dtype} of shape {list(labels.shape)}."
            )
        if ignore_index >= 0:
            raise ValueError(f"ignore_index must be left out where labels are probabilities, got {ignore_index}.")
        _check_probabilities(labels)
        return labels
    if labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"labels must be class indices (int64) or floating probabilities, got {labels.dtype}.")
    if labels.shape != cosine.shape[:-1]:
        raise ValueError(
            f"labels must have shape {list(cosine.shape[:-1])}, one class index a feature, "
            f"got shape {list(labels.shape)}."
        )
    _check_indices(labels, cosine.shape[-1], ignore_index)
    return labels.long()


def check_class_weight(class_weight: object) -> Tensor | None:
    """Return class weights: None or a floating tensor [C] of finite numbers ≥ 0."""
    if class_weight is None:
        return None
    if not isinstance(class_weight, Tensor):
        raise TypeError(f"class_weight must be None or a tensor, got {type(class_weight).__name__}.")
    require_floating("class_weight", class_weight)
    if class_weight.dim() != 1:
        raise ValueError(f"class_weight must have shape [num_classes], got {list(class_weight.shape)}.")
    wrong = class_weight[~(class_weight.isfinite() & (class_weight >= 0))]
    if len(wrong):
        raise ValueError(f"class_weight must be finite and at least 0, got {wrong[0].item()!r}.")
    return class_weight


def _check_indices(labels: Tensor, num_classes: int, ignore_index: int) -> None:
    if not can_look_at_values(labels):
        return
    wrong = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
    if len(wrong):
        raise ValueError(
            f"labels must be from 0 to {num_classes - 1} or ignore_index ({ignore_index}), got {wrong[0].item()}."
        )


def _check_probabilities(labels: Tensor) -> None:
    if not can_look_at_values(labels):
        return
    values = labels.detach()
    wrong = values[~((values >= 0) & (values <= 1))]
    if len(wrong):
        raise ValueError(f"labels must be probabilities from 0 to 1, got {wrong[0].item()!r}.")
    sums = values.sum(-1, dtype=torch.float64).flatten()
    wrong = sums[(sums - 1).abs() > SUM_TOLERANCE]
    if len(wrong):
        raise ValueError(f"labels must be probabilities that sum to 1 over the classes, got a sum of {wrong[0]:g}.")
