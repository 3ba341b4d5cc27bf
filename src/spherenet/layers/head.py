"""AngularHead: the class weights of a classifier that answers with angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spherenet.kernels.blockwise import angular_cosine, plain_angular_cosine
from spherenet.kernels.dispatch import blockwise
from spherenet.ops.margins import AngularOutput
from spherenet.ops.norms import DEFAULT_EPS, norm, without_autocast, working_dtype
from spherenet.validation import require_floating, require_positive

__all__ = ["AngularHead"]


class AngularHead(nn.Module):
    """Class weights w_j and, for a feature x, cos θ_j = w_jᵀx / (‖w_j‖‖x‖), ‖x‖, ‖w_j‖ and b_j (SPEC 6).

    Every loss of `spherenet.losses` makes its logits from that, so the weights live in the model: they are
    saved, moved, trained and wrapped with it, and the loss can be changed under them. bias: for imbalanced
    data. eps: added under both square roots of the norms.

    Norms and cosines are computed in float32 for half-precision features or weights, under autocast too: a
    cosine rounded to bfloat16 leaves angles near 0 uncertain by 5 degrees, more than a margin. Features may be
    half precision where the weights are not, and the other way round.
    A zero feature has cosine 0 with every class and finite gradients. A feature or weight whose squares
    overflow (norm > 1e21 in float32) is treated as a zero one, its gradient is 0.

    Raises ValueError or TypeError for a wrong argument: in_features < 1, num_classes < 2 (a single class leaves
    nothing to tell apart), eps ≤ 0; in forward for a wrong number of features or dtype.
    Shapes: [*, in_features] → `AngularOutput` of [*, num_classes], [*], [num_classes], [num_classes] or None;
    `weight` [num_classes, in_features].
    """

    bias: nn.Parameter | None
    scale_invariant: bool = False
    """Whether the loss ignores ‖w‖, so that weight decay and norm-keeping treat the weights as sphere weights."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        eps: float = DEFAULT_EPS,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features = _require_count("in_features", in_features, 1)
        self.num_classes = _require_count("num_classes", num_classes, 2)
        self.eps = require_positive("eps", eps)
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 2/in_features), directions uniform on the sphere (SPEC 3); bias 0."""
        nn.init.normal_(self.weight, std=(2 / self.in_features) ** 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> AngularOutput:
        """Return cosines, norms and bias for features [*, in_features]."""
        dtype = self._check(features)
        with without_autocast(features):
            length = norm(features, -1, self.eps)
            overflowed = length.isinf()
            length = length.masked_fill(overflowed, self.eps**0.5)
            unit_features = (features.to(dtype).masked_fill(overflowed, 0) / length).reshape(-1, self.in_features)
            weight = self.weight.to(dtype)
            elements = max(unit_features.shape[0] * self.num_classes, weight.numel())
            compute = angular_cosine if blockwise(elements, unit_features, weight) else plain_angular_cosine
            cosine, weight_norm = compute(unit_features, weight, self.eps)
            return AngularOutput(
                cosine.reshape(*features.shape[:-1], self.num_classes),
                length.squeeze(-1),
                weight_norm.masked_fill(weight_norm.isinf(), self.eps**0.5),
                None if self.bias is None else self.bias.to(dtype),
            )

    def extra_repr(self) -> str:
        """Name the sizes."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, "
            f"bias={self.bias is not None}, eps={self.eps:g}"
        )

    def _check(self, features: Tensor) -> torch.dtype:
        """Refuse what cannot be a feature; return the dtype to compute in."""
        require_floating("features", features)
        if features.dim() < 1 or features.shape[-1] != self.in_features:
            raise ValueError(
                f"features must have {self.in_features} features in their last dimension, "
                f"got shape {list(features.shape)}."
            )
        dtype = working_dtype(features.dtype)
        if dtype != working_dtype(self.weight.dtype):
            raise TypeError(f"features must have the dtype of the weights, {self.weight.dtype}, got {features.dtype}.")
        return dtype


def _require_count(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}.")
    return value
