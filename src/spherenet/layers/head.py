"""Heads: class weights of a classifier, trained or fixed, and the angles between them and the features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spherenet._util.validation import OptionCheck, require_floating, require_integer, require_positive
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.classes import blockwise
from spherenet.kernels.dispatch import blockwise as use_blocks
from spherenet.layers.base import Proxy, record_as_leaf
from spherenet.ops import angular
from spherenet.ops.angular import AngularOutput
from spherenet.ops.norms import DEFAULT_EPS, without_autocast, working_dtype

__all__ = ["AngularHead", "FixedHead", "etf_directions"]


class AngularHead(OptionCheck, nn.Module):
    """Class weights w_j of a classifier; for a feature x it returns cos θ_j = w_jᵀx / (‖w_j‖‖x‖), ‖x‖, ‖w_j‖ and b_j.

    Every loss of `spherenet.losses` computes its logits from this output. The weights belong to the model: they are
    saved, moved and trained with it, and the loss can be exchanged.

    Norms and cosines of half-precision features or weights are computed in float32, under autocast too, because a
    cosine in bfloat16 leaves angles near 0 uncertain by 5 degrees, more than a margin. Features may be half precision
    if the weights are not, and vice versa. A zero feature has the cosine 0 with every class and finite gradients. A
    feature or weight whose squares overflow (norm > 1e21 in float32) is treated as zero, with gradient 0.

    Args:
        in_features: Number of features, at least 1.
        num_classes: Number of classes, at least 2.
        bias: Whether to add a bias per class, for imbalanced data.
        directions: Number of directions per class, at least 1. With several, cos θ_j is the largest cosine of the
            directions of class j (sub-center ArcFace), and the norm of each class is 1.
        eps: Number added under both square roots of the norms.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If an argument has the wrong type; in forward for a wrong dtype.
        ValueError: If an argument is out of range; in forward for a wrong number of features.

    Shape:
        [*, in_features] → `AngularOutput` of [*, num_classes], [*], [num_classes], [num_classes] or None; `weight`
        [num_classes, in_features], or [num_classes, directions, in_features] with several directions.
    """

    bias: nn.Parameter | None
    scale_invariant: bool | None = None
    """Whether the loss ignores ‖w‖, so that weight decay and `keep_norms` treat the weights as sphere weights.

    None, the default, means that they depend on the losses in the same model.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        directions: int = 1,
        eps: float = DEFAULT_EPS,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features = require_integer("in_features", in_features, minimum=1)
        self.num_classes = require_integer("num_classes", num_classes, minimum=2)
        self.directions = require_integer("directions", directions, minimum=1)
        self.eps = require_positive("eps", eps)
        rows = (num_classes,) if directions == 1 else (num_classes, directions)
        self.weight = nn.Parameter(torch.empty(*rows, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 2/in_features), uniform in direction, and set the bias to 0."""
        nn.init.normal_(self.weight, std=(2 / self.in_features) ** 0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, features: Tensor) -> AngularOutput:
        """Return cosines, norms and bias for features [*, in_features]."""
        if isinstance(features, Proxy):
            return record_as_leaf(self, features)  # type: ignore[return-value]
        dtype = self._checked_dtype(features)
        with without_autocast(features):
            unit, length = angular.unit_features(features, self.eps)
            unit = unit.reshape(-1, self.in_features)
            weight = self.weight.to(dtype).flatten(0, -2)
            in_blocks = use_blocks(max(unit.shape[0] * len(weight), weight.numel()), unit, weight)
            compute = blockwise.angular_cosine if in_blocks else angular.angular_cosine
            cosine, weight_norm = compute(unit, weight, self.eps)
            if self.directions > 1:
                cosine, weight_norm = angular.nearest_direction(cosine, self.directions)
            return AngularOutput(
                cosine.reshape(*features.shape[:-1], self.num_classes),
                length.squeeze(-1),
                angular.finite(weight_norm, self.eps),
                None if self.bias is None else self.bias.to(dtype),
            )

    def _checked_dtype(self, features: Tensor) -> torch.dtype:
        """Return the dtype in which angles are computed; raise an error for features that do not fit the weights."""
        require_floating("features", features)
        if features.dim() < 1 or features.shape[-1] != self.in_features:
            raise InvalidArgument(
                "features",
                f"must have {self.in_features} features in their last dimension, got shape {list(features.shape)}.",
            )
        dtype = working_dtype(features.dtype)
        if dtype != working_dtype(self.weight.dtype):
            raise InvalidArgumentType(
                "features", f"must have the dtype of the weights, {self.weight.dtype}, got {features.dtype}."
            )
        return dtype

    def extra_repr(self) -> str:
        """Return the sizes and options."""
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, "
            f"bias={self.bias is not None}, eps={self.eps:g}"
            + (f", directions={self.directions}" if self.directions > 1 else "")
        )


def etf_directions(
    num_classes: int,
    dim: int,
    *,
    generator: torch.Generator | None = None,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return unit vectors with equal and largest possible angles: cos θ_ij = −1/(C − 1), a simplex ETF.

    They are the vertices of a regular simplex around the origin, in a random rotation. Features and class weights
    approach this arrangement at the end of training (neural collapse; Papyan et al., PNAS 2020).

    Args:
        num_classes: Number of vectors C, at least 2.
        dim: Number of dimensions, at least C − 1.
        generator: Generator of the rotation, on the CPU.
        device: Device of the result.
        dtype: Dtype of the result.

    Returns:
        Directions [C, dim].

    Raises:
        ValueError: If an argument is out of range.
    """
    num_classes = require_integer("num_classes", num_classes, minimum=2)
    dim = require_integer("dim", dim, minimum=1)
    if dim < num_classes - 1:
        raise InvalidArgument("dim", f"must be at least num_classes - 1 = {num_classes - 1}, got {dim}.")
    # Row r of Helmert's matrix: r entries 1, then −r. Rows are orthogonal to each other and to the vector of ones.
    ranks = torch.arange(1, num_classes, dtype=torch.float64)
    helmert = torch.tril(torch.ones(num_classes - 1, num_classes, dtype=torch.float64))
    helmert.diagonal(1).copy_(-ranks)
    vertices = (helmert / (ranks * (ranks + 1)).sqrt().unsqueeze(1)).T * (num_classes / (num_classes - 1)) ** 0.5
    rotation = torch.linalg.qr(torch.randn(dim, num_classes - 1, generator=generator, dtype=torch.float64)).Q
    directions: Tensor = vertices @ rotation.T
    return directions.to(device, dtype or torch.get_default_dtype())


class FixedHead(AngularHead):
    """An `AngularHead` whose class directions are not trained; every loss of `spherenet.losses` takes its output.

    The directions are in `weight`, which requires no gradient and is saved with the model.

    Args:
        prototypes: Direction of each class, floating point [C, in_features]. They are copied.
        bias: Whether to add a bias per class, which is trained.
        eps: As in `AngularHead`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If prototypes is not a floating point tensor.
        ValueError: If prototypes has another shape, or a row that is zero or not finite.
    """

    def __init__(
        self, prototypes: Tensor, bias: bool = False, *, eps: float = DEFAULT_EPS, device: Any = None, dtype: Any = None
    ) -> None:
        require_floating("prototypes", prototypes)
        if prototypes.dim() != 2:
            raise InvalidArgument(
                "prototypes", f"must have the shape [classes, features], got {list(prototypes.shape)}."
            )
        without_direction = ~(prototypes.isfinite().all(1) & prototypes.any(1))
        if bool(without_direction.any()):
            row = int(without_direction.nonzero()[0])
            raise InvalidArgument(
                "prototypes", f"must be finite and not zero, got {prototypes[row].tolist()} in row {row}."
            )
        num_classes, in_features = prototypes.shape
        super().__init__(in_features, num_classes, bias, eps=eps, device=device, dtype=dtype or prototypes.dtype)
        self.weight.requires_grad_(False)
        with torch.no_grad():
            self.weight.copy_(prototypes)

    def reset_parameters(self) -> None:
        """Set the bias to 0; the directions are fixed."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def etf(
        cls, in_features: int, num_classes: int, *, generator: torch.Generator | None = None, **options: Any
    ) -> FixedHead:
        """Return a head with the directions of `etf_directions`.

        Args:
            in_features: Number of features, at least num_classes − 1.
            num_classes: Number of classes, at least 2.
            generator: Generator of the rotation, on the CPU.
            **options: Options of the head: bias, eps, device, dtype.
        """
        dtype = options.get("dtype")
        return cls(etf_directions(num_classes, in_features, generator=generator, dtype=dtype), **options)
