"""The end of a classifier for inference: head and loss in one, from features to scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.export.frozen import FrozenAngle
from spherenet.layers import AngularHead
from spherenet.losses import (
    AngularLoss,
    ArcFaceLoss,
    ASoftmaxLoss,
    CosFaceLoss,
    GASoftmaxLoss,
    SoftmaxLoss,
    SSoftmaxLoss,
    WSoftmaxLoss,
)
from spherenet.ops.angle_functions import CosineAngle
from spherenet.ops.norms import norm, without_autocast, working_dtype

__all__ = ["FrozenClassifier", "FrozenScores", "frozen_scores"]

KNOWN_LOSSES = (SoftmaxLoss, WSoftmaxLoss, GASoftmaxLoss, ASoftmaxLoss, SSoftmaxLoss, CosFaceLoss, ArcFaceLoss)
"""The losses whose scores `FrozenScores` knows, by exact type: a subclass may make its logits in another way."""


def frozen_scores(head: AngularHead, criterion: AngularLoss) -> nn.Module:
    """The module from features to scores: constants folded where head and loss are ours, else both as they are."""
    known = type(head) is AngularHead and type(criterion) in KNOWN_LOSSES
    return FrozenScores(head, criterion) if known else _Scores(head, criterion)


class FrozenClassifier(nn.Module):
    """Images to scores, for inference. Shapes: [N, C, H, W] → [N, classes]."""

    def __init__(self, features: nn.Module, scores: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.scores = scores

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of a batch of images."""
        scores: Tensor = self.scores(self.features(images))
        return scores


class FrozenScores(nn.Module):
    """An `AngularHead` and the logits of its loss in one (SPEC 1 (4) to (6)); features [*, in] → scores [*, classes].

        softmax              w_jᵀx + b_j, the plain product
        W, GA, A: cosine     u_jᵀx + b_j, with u_j = w_j/‖w_j‖
        W, GA: other g       ‖x‖·g(θ_j) + b_j
        S, CosFace, ArcFace  s·g(θ_j) + b_j

    A feature whose squares overflow counts as a zero one.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, head: AngularHead, criterion: AngularLoss) -> None:
        super().__init__()
        self.eps = head.eps
        self.dtype = working_dtype(head.weight.dtype)
        weight = head.weight.to(self.dtype)
        length = norm(weight, 1, head.eps)
        angle = criterion.angle
        self.by_norm = not isinstance(criterion, SSoftmaxLoss)
        self.angle: FrozenAngle | None = None
        unit = weight / length
        if angle is None:
            unit = unit * length.masked_fill(length.isinf(), 0)
        elif not (self.by_norm and type(angle) is CosineAngle):
            s = criterion.scale_for(head.num_classes) if isinstance(criterion, SSoftmaxLoss) else 1.0
            scale = weight.new_full((head.num_classes,), s, dtype=torch.float64)
            self.angle = FrozenAngle(angle, scale, torch.zeros_like(scale), self.dtype)
        self.register_buffer("weight", unit)
        self.register_buffer("bias", None if head.bias is None else head.bias.to(self.dtype))

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores."""
        with without_autocast(features):
            x = features.to(self.dtype) if features.dtype != self.dtype else features
            length = norm(x, -1, self.eps)
            overflowed = length.isinf()
            x = torch.where(overflowed, 0.0, x)
            if self.angle is None:
                return F.linear(x, self.weight, self.bias)
            length = torch.where(overflowed, self.eps**0.5, length)
            scores: Tensor = self.angle(F.linear(x, self.weight) / length)
            scores = scores * length if self.by_norm else scores
            return scores if self.bias is None else scores + self.bias


class _Scores(nn.Module):
    """A head and a loss of somebody's own, as they are."""

    def __init__(self, head: nn.Module, criterion: AngularLoss) -> None:
        super().__init__()
        self.head = head
        self.criterion = criterion

    def forward(self, features: Tensor) -> Tensor:
        return self.criterion.logits(self.head(features))
