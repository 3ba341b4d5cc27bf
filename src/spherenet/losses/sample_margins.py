"""Losses with another margin for each sample: AdaFace, MagFace, CurricularFace and ElasticFace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spherenet._util.validation import require_number, require_one_of, require_positive
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.losses.additive_margins import FaceLoss
from spherenet.losses.batch import AnyBatch
from spherenet.ops.angular import AngularLogits, additive_angle

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from spherenet.losses.arguments import CrossEntropyOptions

__all__ = ["AdaFaceLoss", "CurricularFaceLoss", "ElasticFaceLoss", "MagFaceLoss"]


class AdaptiveLoss(FaceLoss):
    """A loss with running statistics, which are buffers: saved with the model, and the same in all processes.

    They change in training mode only, by the statistics of the batches of all processes together, so that all processes
    must call the loss. A batch with a statistic that is not finite leaves it as it was, so that an overflow, which a
    gradient scaler skips, does not spoil the steps after it. They stay in float32 if the model is converted to half
    precision, whose steps are too coarse for an average.
    """

    def reset_parameters(self) -> None:
        """Set the running statistics to their initial values."""
        raise NotImplementedError

    def _running(self, name: str) -> None:
        """Register a running statistic; `reset_parameters` sets its value."""
        self.register_buffer(name, torch.zeros(()))

    @torch.no_grad()
    def _update(self, name: str, value: Tensor, momentum: float, count: Tensor | int) -> None:
        """Move a running statistic to a value if it is finite and the batch has at least one row that counts."""
        state: Tensor = getattr(self, name)
        moved = state + momentum * (value.to(state.dtype) - state)
        is_used = (torch.as_tensor(count, device=state.device) > 0) & moved.isfinite()
        # In place, because DDP keeps a list of the buffers.
        state.copy_(torch.where(is_used, moved, state))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, state in before.items():
            after = self._buffers[name]
            if name != "class_weight" and after is not None and after.dtype != state.dtype and not state.is_meta:
                self._buffers[name] = state.to(after.device)
        return self


SMALLEST_NORM, LARGEST_NORM = 1e-3, 100.0
"""Range to which norms are limited, as in the released code."""

INITIAL_MEAN, INITIAL_STD = 20.0, 100.0
"""Statistics of the norms before the first batch, as in the released code."""


class AdaFaceLoss(AdaptiveLoss):
    """AdaFace (Eq. 21; Kim et al., CVPR 2022): an angular margin for poor samples, an additive one for good ones.

        q = clip(h·(‖x‖ − μ)/σ, −1, 1)          quality of the sample, without a gradient
        z_y = s·(cos(θ_y − m·q) − m·(1 + q)),   z_j = s·cos θ_j

    q = −1 is ArcFace with the margin m, q = 0 is CosFace, q = 1 is ArcFace with −m and CosFace with 2m. μ and σ are
    running averages of the mean and the standard deviation of ‖x‖ over the batches, with ‖x‖ limited to
    [0.001, 100]. They are buffers (`norm_mean`, `norm_std`) that change in training mode only; all processes use the
    statistics of their batches together and must call the loss. θ_y − m·q < 0 counts as 0; beyond π the cosine is
    continued as in `ArcFaceLoss`.

    Args:
        m: Margin, at least 0 and less than 1. Published: 0.4.
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        h: Concentration of the quality, > 0. Published: 0.333.
        momentum: Weight of a batch in μ and σ, greater than 0 and at most 1. Published: 0.01.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    norm_mean: Tensor
    norm_std: Tensor

    def __init__(
        self,
        m: float = 0.4,
        s: float | Literal["auto"] | None = "auto",
        h: float = 0.333,
        momentum: float = 0.01,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        if not 0 <= self.m < 1:
            raise InvalidArgument("m", f"must be at least 0 and less than 1, got {m!r}.")
        self.h = require_positive("h", h)
        self.momentum = require_number("momentum", momentum)
        if not 0 < self.momentum <= 1:
            raise InvalidArgument("momentum", f"must be greater than 0 and at most 1, got {momentum!r}.")
        self._running("norm_mean")
        self._running("norm_std")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the statistics of the norms to their initial values."""
        self.norm_mean.fill_(INITIAL_MEAN)
        self.norm_std.fill_(INITIAL_STD)

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margins of a batch; in training mode the statistics of the norms change first."""
        norm = batch.feature_norm.detach().clamp(SMALLEST_NORM, LARGEST_NORM)
        if self.training:
            count, total = batch.total(torch.stack([torch.ones_like(norm), norm]), labels)
            mean = total / count
            variance = batch.total((norm - mean).square(), labels) / (count - 1).clamp_min(1)
            self._update("norm_mean", mean, self.momentum, count)
            self._update("norm_std", variance.sqrt(), self.momentum, count - 1)
        mean, std = self.norm_mean.to(norm.dtype), self.norm_std.to(norm.dtype)
        quality = (self.h * (norm - mean) / (std + 1e-3)).clamp(-1, 1).unsqueeze(1)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            return additive_angle(cosine, -self.m * quality) - self.m * (1 + quality)

        return logits._replace(target=target)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{super().extra_repr()}, h={self.h:g}, momentum={self.momentum:g}"


class CurricularFaceLoss(AdaptiveLoss):
    """CurricularFace (Eq. 23; Huang et al., CVPR 2020): easy samples first, hard ones later.

        z_y = s·cos(θ_y + m)
        z_j = s·cos θ_j                  if cos θ_j ≤ cos(θ_y + m)
        z_j = s·cos θ_j·(t + cos θ_j)    otherwise: class j is hard for this sample

    t is the running average of cos θ_y over the batches: about 0 at the start, when hard classes count less, and near 1
    at the end, when they count more. It is a buffer (`progress`) that changes in training mode only; all
    processes use the average of their batches together and must call the loss. Beyond θ_y + m = π the cosine is
    continued as in `ArcFaceLoss`. Labels must be class indices: which classes are hard depends on the label.

    Args:
        m: Margin in radians, at least 0 and less than π. Published: 0.5.
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        momentum: Weight of a batch in t, greater than 0 and at most 1. Published: 0.01.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    progress: Tensor

    def __init__(
        self,
        m: float = 0.5,
        s: float | Literal["auto"] | None = "auto",
        momentum: float = 0.01,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        if not 0 <= self.m < math.pi:
            raise InvalidArgument("m", f"must be at least 0 and less than π, got {m!r}.")
        self.momentum = require_number("momentum", momentum)
        if not 0 < self.momentum <= 1:
            raise InvalidArgument("momentum", f"must be greater than 0 and at most 1, got {momentum!r}.")
        self._running("progress")

    def reset_parameters(self) -> None:
        """Set t to 0."""
        self.progress.zero_()

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margins of a batch; in training mode t changes first."""
        if torch.is_floating_point(labels):
            raise InvalidArgumentType(
                "labels", f"must be class indices (int64) for CurricularFaceLoss, got {labels.dtype}."
            )
        label_cosine = batch.label_cosine(labels).clamp(-1, 1)
        if self.training:
            count, total = batch.total(torch.stack([torch.ones_like(label_cosine), label_cosine]), labels)
            self._update("progress", total / count, self.momentum, count)
        progress = self.progress.to(label_cosine.dtype).clone()  # backward of a sharded head reads it again
        threshold = additive_angle(label_cosine, self.m).unsqueeze(1)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            return additive_angle(cosine, self.m)

        def others(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            similarity = self.similarity(cosine)
            return torch.where(similarity > threshold, similarity * (progress + similarity), similarity)

        return logits._replace(target=target, others=others)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{super().extra_repr()}, momentum={self.momentum:g}"


class MagFaceLoss(FaceLoss):
    """MagFace (Eq. 22; Meng et al., CVPR 2021): the norm of a feature becomes a measure of the sample's quality.

        a = ‖x‖ limited to [smallest_norm, largest_norm]
        m(a) = m + (largest_m − m)·(a − smallest_norm)/(largest_norm − smallest_norm)
        z_y = s·cos(θ_y + m(a)),   z_j = s·cos θ_j
        L = cross entropy + norm_weight·(1/a + a/largest_norm²)

    A sample near its class can afford a large norm, and the last term rewards it. Both depend on ‖x‖ with a gradient.
    Beyond θ_y + m(a) = π the cosine is continued as in `ArcFaceLoss`.

    Args:
        m: Margin at the smallest norm, at least 0. Published: 0.45.
        s: Scale > 0, or "auto" (the same as None) as in `ArcFaceLoss`. Published: 64.
        largest_m: Margin at the largest norm, at least m and less than π. Published: 0.8.
        smallest_norm: Smallest norm, > 0. Published: 10.
        largest_norm: Largest norm, greater than `smallest_norm`. Published: 110.
        norm_weight: Weight λ of the last term, at least 0. Published: 35.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 0.45,
        s: float | Literal["auto"] | None = "auto",
        largest_m: float = 0.8,
        smallest_norm: float = 10.0,
        largest_norm: float = 110.0,
        norm_weight: float = 35.0,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(m, s, "full", **cross_entropy)
        self.largest_m = require_number("largest_m", largest_m)
        if self.m < 0:
            raise InvalidArgument("m", f"must be at least 0, got {m!r}.")
        if not self.m <= self.largest_m < math.pi:
            raise InvalidArgument("largest_m", f"must be at least m ({self.m:g}) and less than π, got {largest_m!r}.")
        self.smallest_norm = require_positive("smallest_norm", smallest_norm)
        self.largest_norm = require_positive("largest_norm", largest_norm)
        if self.largest_norm <= self.smallest_norm:
            raise InvalidArgument(
                "largest_norm", f"must be greater than smallest_norm ({self.smallest_norm:g}), got {largest_norm!r}."
            )
        self.norm_weight = require_number("norm_weight", norm_weight)
        if self.norm_weight < 0:
            raise InvalidArgument("norm_weight", f"must be at least 0, got {norm_weight!r}.")

    def with_margin(self, logits: AngularLogits, batch: AnyBatch, labels: Tensor) -> AngularLogits:
        """Return logits with the margin m(a) of each row."""
        slope = (self.largest_m - self.m) / (self.largest_norm - self.smallest_norm)

        def target(cosine: Tensor, feature_norm: Tensor) -> Tensor:
            norm = feature_norm.clamp(self.smallest_norm, self.largest_norm)
            return additive_angle(cosine, self.m + slope * (norm - self.smallest_norm))

        return logits._replace(target=target)

    def row_penalty(self, feature_norm: Tensor, num_classes: int) -> Tensor | None:
        """Return norm_weight·(1/a + a/largest_norm²) of each row, None if the weight is 0."""
        if self.norm_weight == 0:
            return None
        norm = feature_norm.clamp(self.smallest_norm, self.largest_norm)
        return self.norm_weight * (1 / norm + norm / self.largest_norm**2)

    def extra_repr(self) -> str:
        """Return the options."""
        norms = f"smallest_norm={self.smallest_norm:g}, largest_norm={self.largest_norm:g}"
        return f"{super().extra_repr()}, largest_m={self.largest_m:g}, {norms}, norm_weight={self.norm_weight:g}"


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
