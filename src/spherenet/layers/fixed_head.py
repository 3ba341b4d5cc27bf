"""Heads with fixed class directions: a simplex, or directions of the caller. Only the features are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spherenet._util.validation import require_floating, require_integer
from spherenet.layers.head import AngularHead
from spherenet.ops.norms import DEFAULT_EPS

__all__ = ["FixedHead", "etf_directions"]


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
        raise ValueError(f"dim must be at least num_classes - 1 = {num_classes - 1}, got {dim}.")
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
            raise ValueError(f"prototypes must have the shape [classes, features], got {list(prototypes.shape)}.")
        without_direction = ~(prototypes.isfinite().all(1) & prototypes.any(1))
        if bool(without_direction.any()):
            row = int(without_direction.nonzero()[0])
            raise ValueError(f"prototypes must be finite and not zero, got {prototypes[row].tolist()} in row {row}.")
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
