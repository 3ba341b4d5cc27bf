"""ElasticFace: a random margin for each sample."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spherenet._util.validation import require_number, require_one_of
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.losses.additive_margins import FaceLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, additive_angle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["ElasticFaceLoss"]

FORMS = {"arc": 0.5, "cos": 0.35}
"""Published margin of each form."""


class ElasticFaceLoss(FaceLoss):
    """ElasticFace (Eq. 24; Boutros et al., CVPR Workshops 2022): margins drawn from a normal distribution.

        M ~ N(m, std²) for each row
        z_y = s·cos(θ_y + M)    form "arc"
        z_y = s·(cos θ_y − M)   form "cos",   z_j = s·cos θ_j

    Classes need not be equally wide, so no single margin fits all. In evaluation mode M = m. Margins are drawn from
    torch's generator of the device. θ_y + M < 0 counts as 0; beyond π the cosine is continued as in `ArcFaceLoss`.

    Args:
        m: Mean of the margin, at least 0; None for the published 0.5 (form "arc") or 0.35 (form "cos").
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        std: Standard deviation of the margin, at least 0. Published: 0.05, and 0.0175 if sorted.
        form: "arc" or "cos".
        sort: Whether the rows farthest from their class get the largest margins (ElasticFace+). They are sorted among
            the rows of the batch of a process, or of all processes if the head is sharded.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float | None = None,
        s: float | Literal["auto"] | None = "auto",
        std: float = 0.05,
        *,
        form: str = "arc",
        sort: bool = False,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        self_form = require_one_of("form", form, FORMS)
        super().__init__(FORMS[self_form] if m is None else m, s, "full", **cross_entropy)
        self.form, self.sort = self_form, sort
        limit, shown = (math.pi, "π") if form == "arc" else (2.0, "2")
        if not 0 <= self.m < limit:
            raise InvalidArgument("m", f"must be at least 0 and less than {shown}, got {m!r}.")
        self.std = require_number("std", std)
        if self.std < 0:
            raise InvalidArgument("std", f"must be at least 0, got {std!r}.")
        if not isinstance(sort, bool):
            raise InvalidArgumentType("sort", f"must be True or False, got {sort!r}.")

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with a margin per row, drawn in training mode."""
        if self.sort and torch.is_floating_point(labels):
            raise InvalidArgumentType("labels", f"must be class indices (int64) if sort is True, got {labels.dtype}.")
        margin = torch.full_like(batch.feature_norm, self.m, requires_grad=False)
        if self.training and self.std > 0:
            margin = margin + self.std * torch.randn_like(margin)
            if self.sort:
                rank = batch.label_cosine(labels).argsort(descending=True).argsort()
                margin = margin.sort().values[rank]
        margin = margin.unsqueeze(1)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            return additive_angle(cosine, margin) if self.form == "arc" else cosine.clamp(-1, 1) - margin

        return logits._replace(target=target)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{super().extra_repr()}, std={self.std:g}, form={self.form!r}, sort={self.sort}"
