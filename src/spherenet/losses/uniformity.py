"""Alignment and uniformity (Wang and Isola, ICML 2020): what contrastive losses optimize, as two separate terms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet._util.validation import require_number, require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.contrastive import PairOptions
from spherenet.losses.pairs import (
    PAIR_EPS,
    PairLoss,
    checked_features,
    gather,
    in_blocks,
    process_count,
    unit,
    unit_views,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AlignmentUniformityLoss", "alignment_loss", "uniformity_loss"]

SOFTENING = 1e-12
"""Added to squared distances, so that equal features have a finite gradient for powers below 2."""


def alignment_loss(first: Tensor, second: Tensor, power: float = 2.0, *, eps: float = PAIR_EPS) -> Tensor:
    """Return the mean over pairs of ‖x̂ − ŷ‖^power: how close the two features of a sample are.

    Args:
        first: Features [N, D].
        second: Features of the same samples [N, D].
        power: Exponent > 0.
        eps: Number > 0 under the square root of the norms.

    Returns:
        A scalar, 0 for an empty batch.
    """
    rows = _alignment_rows(*unit_views(first, second, require_positive("eps", eps)), power)
    return rows.sum() / max(1, len(rows))


def uniformity_loss(
    features: Tensor, t: float = 2.0, *, eps: float = PAIR_EPS, block_size: int | None = None
) -> Tensor:
    """Return log mean over i ≠ j of exp(−t·‖x̂_i − x̂_j‖²): how far features are from an even distribution.

    It is 0 if all features are equal and at least −4t. It is computed by logsumexp in blocks of rows.

    Args:
        features: Features [N, D].
        t: Sharpness > 0 of the kernel.
        eps: Number > 0 under the square root of the norms.
        block_size: Number of rows whose similarities are computed at a time.

    Returns:
        A scalar, 0 for fewer than two features.
    """
    x = unit(checked_features("features", features), require_positive("eps", eps))
    return _uniformity(x, x, 0, require_positive("t", t), block_size)


class AlignmentUniformityLoss(PairLoss):
    """Weighted sum of alignment and uniformity: alignment_weight·A(x, y) + uniformity_weight·½·(U(x) + U(y)).

    A is `alignment_loss` of the two views of each sample, U is `uniformity_loss` of one view.

    Args:
        alignment_weight: Weight of the alignment, at least 0.
        uniformity_weight: Weight of the uniformity, at least 0.
        power: Exponent > 0 of the distances.
        t: Sharpness > 0 of the kernel.
        **options: `eps`, `block_size` and `gather`, see `PairOptions`.

    Shape:
        first [N, D], second [N, D] → scalar.
    """

    def __init__(
        self,
        alignment_weight: float = 1.0,
        uniformity_weight: float = 1.0,
        power: float = 2.0,
        t: float = 2.0,
        **options: Unpack[PairOptions],
    ) -> None:
        super().__init__(**options)
        self.alignment_weight = require_number("alignment_weight", alignment_weight)
        self.uniformity_weight = require_number("uniformity_weight", uniformity_weight)
        for name in ("alignment_weight", "uniformity_weight"):
            if getattr(self, name) < 0:
                raise InvalidArgument(name, f"must be at least 0, got {getattr(self, name)!r}.")
        self.power = require_positive("power", power)
        self.t = require_positive("t", t)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of a batch of pairs."""
        x, y = unit_views(first, second, self.eps)
        distances = _alignment_rows(x, y, self.power)
        alignment = self._mean(distances, torch.ones_like(distances))
        everywhere, start = self._gathered(torch.stack([x, y], 1))
        views = ((x, everywhere[:, 0]), (y, everywhere[:, 1]))
        shared = self.gather and process_count() > 1
        spread = [_uniformity(own, columns, start, self.t, self.block_size, shared) for own, columns in views]
        return self.alignment_weight * alignment + self.uniformity_weight * (spread[0] + spread[1]) / 2

    def extra_repr(self) -> str:
        """Return the options."""
        names = ("alignment_weight", "uniformity_weight", "power", "t")
        return ", ".join(filter(None, (*(f"{name}={getattr(self, name):g}" for name in names), super().extra_repr())))


def _alignment_rows(x: Tensor, y: Tensor, power: float) -> Tensor:
    """Return ‖x − y‖^power for each row."""
    power = require_positive("power", power)
    squared = (x - y).square().sum(1)
    return squared if power == 2 else (squared + SOFTENING).pow(power / 2)


def _uniformity(
    rows: Tensor, columns: Tensor, start: int, t: float, block_size: int | None, shared: bool = False
) -> Tensor:
    """Return the uniformity of all columns; the rows are the columns from `start`, those of this process."""
    count = len(columns)
    if count < 2:
        return 0 * columns.sum()
    positions = torch.arange(start, start + len(rows), device=rows.device)

    def log_sums(own: Tensor, at: Tensor, others: Tensor) -> tuple[Tensor]:
        exponents = -t * (2 - 2 * own @ others.T)
        itself = at.unsqueeze(1) == torch.arange(len(others), device=others.device)
        return (exponents.masked_fill(itself, -math.inf).logsumexp(1),)

    (values,) = in_blocks(log_sums, (rows, positions), (columns,), block_size)
    values = values + 0 * columns.sum()
    # Every process computes the loss of all rows from these values.
    values = gather(values)[0] if shared else values
    return values.logsumexp(0) - math.log(count * (count - 1))
