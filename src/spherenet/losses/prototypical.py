"""Prototypical loss: samples are classified by the mean directions of classes, without class weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet._util.validation import require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.contrastive import PairOptions
from spherenet.losses.pairs import PairLoss, checked_features, checked_labels, in_blocks, unit

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PrototypicalLoss"]


class PrototypicalLoss(PairLoss):
    """Cross entropy over prototypes, the mean directions of classes (Snell et al., NeurIPS 2017, on the sphere).

        p_c = Σ over support samples of class c of x̂,    L_i = −log softmax_c(cos(x_i, p_c) / τ) at the label

    Without queries, every sample is a query, and its class has a prototype without it. Queries whose
    class has no (other) support sample do not count; if none counts, the loss is 0 with zero gradients.

    Args:
        temperature: τ > 0.
        **options: `eps`, `block_size` and `gather`, see `PairOptions`. With gather, prototypes are those of the support
            samples of all processes; each process classifies its own queries.

    Shape:
        features [N, D], labels [N], queries [Q, D], query_labels [Q] → scalar.
    """

    def __init__(self, temperature: float = 0.1, **options: Unpack[PairOptions]) -> None:
        super().__init__(**options)
        self.temperature = require_positive("temperature", temperature)

    def forward(
        self, features: Tensor, labels: Tensor, queries: Tensor | None = None, query_labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch."""
        features = checked_features("features", features)
        labels = checked_labels("labels", labels, features)
        own = unit(features, self.eps)
        support, _ = self._gathered(own)
        support_labels, _ = self._gathered(labels)
        classes, indices = torch.unique(support_labels, return_inverse=True)
        sums = support.new_zeros(len(classes), support.shape[1]).index_add(0, indices, support)
        if queries is None:
            if query_labels is not None:
                raise InvalidArgument("query_labels", "must be left out without queries.")
            rows, row_labels, itself = own, labels, own
        elif query_labels is None:
            raise InvalidArgument("query_labels", "must be given with queries.")
        else:
            rows = unit(checked_features("queries", queries, features), self.eps)
            row_labels = checked_labels("query_labels", query_labels, queries)
            itself = torch.zeros_like(rows)
        sizes = torch.zeros_like(classes).index_add(0, indices, torch.ones_like(indices))
        least = 1 + int(queries is None)
        losses, counted = in_blocks(
            self._rows, (rows, itself, row_labels), (sums, classes, sizes >= least), self.block_size
        )
        return self._mean(losses + 0 * support.sum(), counted)

    def _rows(
        self, rows: Tensor, itself: Tensor, row_labels: Tensor, sums: Tensor, classes: Tensor, usable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the cross entropy of each row, 0 for rows that do not count, and whether it counts."""
        own_class = row_labels.unsqueeze(1) == classes
        counted = (own_class & usable).any(1)
        if len(classes) == 0:
            return 0 * rows.sum(1), counted
        cosine = rows @ unit(sums, self.eps).T
        own_prototype = unit(sums[own_class.int().argmax(1)] - itself, self.eps)
        own_cosine = (rows * own_prototype).sum(1)
        logits = torch.where(own_class, own_cosine.unsqueeze(1), cosine) / self.temperature
        losses = logits.logsumexp(1) - own_cosine / self.temperature
        return losses.masked_fill(~counted, 0), counted

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join(filter(None, (f"temperature={self.temperature:g}", super().extra_repr())))
