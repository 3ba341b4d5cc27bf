"""Losses that compare features with each other: features of the same class or image are similar, all others are not.

The features are normalized inside, so that a similarity is a cosine. Similarities are computed in float32 or float64,
under autocast too, and for blocks of rows, so that those of all pairs never exist at once (`losses/pairs.py`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_number, require_one_of, require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.pairs import PairLoss, checked_features, checked_labels, in_blocks, unit, unit_views

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["InfoNCELoss", "PairOptions", "PrototypicalLoss", "SigLIPLoss", "SupConLoss"]


class PairOptions(TypedDict, total=False):
    """Options of all losses on pairs.

    Attributes:
        eps: Number > 0 under the square root of the norms. A zero feature has the similarity 0 and finite gradients.
        block_size: Number of rows whose similarities are computed at a time; None for about 2 million similarities
            on a CPU. Backward computes the blocks again.
        gather: Compare with the features of all processes if torch.distributed is initialized. The loss is the mean
            over all samples, the same in each process. After DDP has averaged them, gradients equal those of one
            process with all samples. All processes must call the loss; their batches may differ in size. Parameters
            of the loss must be in a DDP model too.
    """

    eps: float
    block_size: int | None
    gather: bool


def contrast_rows(
    rows: Tensor, row_ids: Tensor, positions: Tensor, columns: Tensor, column_ids: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log Σ_a exp(s·cos θ_ia) − mean over positives p of s·cos θ_ip for each row, and whether it has positives.

    Args:
        rows: Unit features [B, D].
        row_ids: Their ids [B]; columns with the same id are positives.
        positions: Column of each row that is the row itself and does not count [B], −1 for none.
        columns: Unit features [M, D].
        column_ids: Their ids [M].
        scale: s, a scalar.

    Returns:
        Losses [B], 0 for rows without positives; and True or False for each row [B].
    """
    logits = scale * (rows @ columns.T)
    itself = positions.unsqueeze(1) == torch.arange(len(columns), device=columns.device)
    # The smallest number, not −inf: a row without any other column has a finite gradient.
    normalizer = logits.masked_fill(itself, torch.finfo(logits.dtype).min).logsumexp(1)
    positive = ((row_ids.unsqueeze(1) == column_ids) & ~itself).to(logits.dtype)
    count = positive.sum(1)
    loss = normalizer - (logits * positive).sum(1) / count.clamp_min(1)
    return loss.masked_fill(count == 0, 0), count > 0


class SupConLoss(PairLoss):
    """Supervised contrastive loss (Khosla et al., NeurIPS 2020): samples of a class attract, all others repel.

        L_i = −mean over p ∈ P(i) of log(exp(cos θ_ip / τ) / Σ_{a ≠ i} exp(cos θ_ia / τ))

    P(i) are the other samples with the label of sample i. The loss is the mean over samples that have such a partner,
    and 0 with zero gradients if there are none, e.g. for an empty batch.

    Args:
        temperature: τ > 0.
        **options: `eps`, `block_size` and `gather`, see `PairOptions`.

    Shape:
        features [N, D], or [N, V, D] for V views of each sample; labels [N] → scalar.
    """

    def __init__(self, temperature: float = 0.1, **options: Unpack[PairOptions]) -> None:
        super().__init__(**options)
        self.temperature = require_positive("temperature", temperature)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        if isinstance(features, Tensor) and features.dim() == 3:
            labels = checked_labels("labels", labels, features).repeat_interleave(features.shape[1])
            features = features.flatten(0, 1)
        features = checked_features("features", features)
        labels = checked_labels("labels", labels, features)
        rows = unit(features, self.eps)
        columns, first = self._gathered(rows)
        column_labels, _ = self._gathered(labels)
        positions = torch.arange(first, first + len(rows), device=rows.device)
        scale = rows.new_tensor(1 / self.temperature)
        losses, counted = in_blocks(
            contrast_rows, (rows, labels, positions), (columns, column_labels, scale), self.block_size
        )
        return self._mean(losses + 0 * columns.sum(), counted)

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join(filter(None, (f"temperature={self.temperature:g}", super().extra_repr())))


class InfoNCELoss(PairLoss):
    """InfoNCE of two views: the two features of a sample attract, those of different samples repel.

    With negatives="cross", each feature is compared with the other view only, and the loss is the mean of both
    directions (CLIP, Radford et al., ICML 2021):

        L = ½·(mean_i −log softmax_j(cos(x_i, y_j)/τ)_i + mean_i −log softmax_j(cos(y_i, x_j)/τ)_i)

    With negatives="all", it is compared with all other features of both views (NT-Xent; Chen et al., *SimCLR*, ICML
    2020). An empty batch has the loss 0.

    Args:
        temperature: τ > 0.
        negatives: "cross" or "all".
        learn_temperature: Whether log(1/τ) is a parameter, `log_scale`, with 1/τ limited to 100.
        **options: `eps`, `block_size` and `gather`, see `PairOptions`.

    Shape:
        first [N, D], second [N, D] → scalar.
    """

    def __init__(
        self,
        temperature: float = 0.07,
        negatives: str = "cross",
        learn_temperature: bool = False,
        **options: Unpack[PairOptions],
    ) -> None:
        super().__init__(**options)
        self.temperature = require_positive("temperature", temperature)
        self.negatives = require_one_of("negatives", negatives, ("cross", "all"))
        self.log_scale = nn.Parameter(torch.tensor(-math.log(self.temperature))) if learn_temperature else None

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of a batch of pairs."""
        x, y = unit_views(first, second, self.eps)
        (all_x, all_y), start = self._both(x, y)
        ids = torch.arange(start, start + len(x), device=x.device)
        all_ids = torch.arange(len(all_x), device=x.device)
        scale = self._scale(x)
        none = torch.full_like(ids, -1)
        if self.negatives == "all":
            both, both_ids = torch.cat([all_x, all_y]), all_ids.repeat(2)
            views = [((x, ids, ids), both, both_ids), ((y, ids, ids + len(all_x)), both, both_ids)]
        else:
            views = [((x, ids, none), all_y, all_ids), ((y, ids, none), all_x, all_ids)]
        compare = partial(in_blocks, contrast_rows, block_size=self.block_size)
        results = [compare(rows, (columns, column_ids, scale)) for rows, columns, column_ids in views]
        losses = torch.cat([loss for loss, _ in results]) + 0 * (all_x.sum() + all_y.sum())
        return self._mean(losses, torch.cat([counted for _, counted in results]))

    def _scale(self, like: Tensor) -> Tensor:
        if self.log_scale is None:
            return like.new_tensor(1 / self.temperature)
        return self.log_scale.to(like.dtype).exp().clamp_max(100)

    def _both(self, x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
        """Return both views of all processes, exchanged at once, and the position of the first own sample."""
        everywhere, start = self._gathered(torch.stack([x, y], 1))
        return (everywhere[:, 0], everywhere[:, 1]), start

    def extra_repr(self) -> str:
        """Return the options."""
        learned = "" if self.log_scale is None else "learn_temperature=True"
        named = (f"temperature={self.temperature:g}", f"negatives={self.negatives!r}", learned, super().extra_repr())
        return ", ".join(filter(None, named))


def sigmoid_rows(
    rows: Tensor, positions: Tensor, columns: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Σ_j −log σ(±(s·cos θ_ij + b)) for each row, with + for its partner, and ones that count the rows."""
    logits = scale * (rows @ columns.T) + bias
    partner = positions.unsqueeze(1) == torch.arange(len(columns), device=columns.device)
    return F.softplus(torch.where(partner, -logits, logits)).sum(1), torch.ones_like(positions, dtype=torch.bool)


class SigLIPLoss(PairLoss):
    """Sigmoid loss of pairs (Zhai et al., *SigLIP*, ICCV 2023): each pair is a binary decision, partner or not.

        L = mean_i Σ_j log(1 + exp(−z_ij·(s·cos(x_i, y_j) + b))),   z_ij = 1 if i = j, else −1

    s = exp(`log_scale`) and b = `bias` are parameters that are trained with the model: pass the loss to the optimizer.
    An empty batch has the loss 0.

    Args:
        scale: Initial s > 0. Published: 10.
        bias: Initial b. Published: −10, so that few pairs count at first.
        **options: `eps`, `block_size` and `gather`, see `PairOptions`.

    Shape:
        first [N, D], second [N, D] → scalar.
    """

    def __init__(self, scale: float = 10.0, bias: float = -10.0, **options: Unpack[PairOptions]) -> None:
        super().__init__(**options)
        self.log_scale = nn.Parameter(torch.tensor(math.log(require_positive("scale", scale))))
        self.bias = nn.Parameter(torch.tensor(require_number("bias", bias)))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss of a batch of pairs."""
        x, y = unit_views(first, second, self.eps)
        all_y, start = self._gathered(y)
        positions = torch.arange(start, start + len(x), device=x.device)
        columns = (all_y, self.log_scale.to(x.dtype).exp(), self.bias.to(x.dtype))
        losses, counted = in_blocks(sigmoid_rows, (x, positions), columns, self.block_size)
        return self._mean(losses + 0 * all_y.sum(), counted)

    def extra_repr(self) -> str:
        """Return the current values of the parameters, and the options."""
        values = f"scale={self.log_scale.detach().exp().item():g}, bias={self.bias.detach().item():g}"
        return ", ".join(filter(None, (values, super().extra_repr())))


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
