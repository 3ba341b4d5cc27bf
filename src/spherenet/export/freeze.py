"""The end of a classifier for inference: head and loss in one, from features to scores.

A model made ready for inference: every sphere layer and the head frozen, in a copy.
"""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from spherenet.angles import CosineAngle
from spherenet.errors import ModelError
from spherenet.export.frozen_layers import BatchNorm, FrozenAngle, FrozenSphereConv, FrozenSphereLinear
from spherenet.layers import AngularHead, SphereConv1d, SphereConv2d, SphereConv3d, SphereLayer, SphereLinear
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
from spherenet.models import Classifier
from spherenet.ops.norms import norm, without_autocast, working_dtype

__all__ = ["FrozenClassifier", "FrozenScores", "freeze", "frozen_scores"]

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


_CONVOLUTIONS = (SphereConv1d, SphereConv2d, SphereConv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def freeze(model: nn.Module) -> nn.Module:
    """Return a copy for inference in which sphere layers have unit weights and k, β, γ and bias as constants.

    Any module will do; a `Classifier` becomes images → scores, its class weights of unit length where the loss ignores
    their norm. A BatchNorm right after a SphereConv in an `nn.Sequential` is folded into it and leaves an identity. The
    copy is in evaluation mode, needs no gradients and consists of plain torch operations, which torch.export,
    TorchScript and ONNX take. Layers of a subclass with its own `forward` stay as they are; hooks of frozen layers are
    dropped. Equal to the model but for rounding: about 1e-6 in float32, 1e-12 in float64.
    Raises ModelError for a lazy layer that has seen no input yet.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"{name} has no values yet: run the model once before it is frozen.")
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    uses = Counter(child for module in twin.modules() for child in module._modules.values() if child is not None)
    with torch.no_grad():
        return _frozen(twin, {}, uses)


def _frozen(module: nn.Module, known: dict[nn.Module, nn.Module], uses: Counter[nn.Module]) -> nn.Module:
    """The frozen form of a module; one that stands in several places is frozen once."""
    if module not in known:
        known[module] = _make(module, known, uses)
    return known[module]


def _make(module: nn.Module, known: dict[nn.Module, nn.Module], uses: Counter[nn.Module]) -> nn.Module:
    if isinstance(module, SphereLayer):
        return _frozen_layer(module)
    if isinstance(module, Classifier) and type(module).forward is Classifier.forward:
        features = _frozen(module.features, known, uses)
        return FrozenClassifier(features, frozen_scores(module.head, module.criterion)).eval()
    if type(module) is nn.Sequential:
        _fold_batch_norms(module, known, uses)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _frozen(child, known, uses)
    return module


def _frozen_layer(layer: SphereLayer, batch_norm: BatchNorm | None = None) -> nn.Module:
    # A subclass that only adds to a layer is frozen with it; one with a forward of its own is another layer.
    if isinstance(layer, _CONVOLUTIONS) and type(layer).forward is SphereConv2d.forward:
        return FrozenSphereConv(layer, batch_norm).eval()
    if isinstance(layer, SphereLinear) and type(layer).forward is SphereLinear.forward:
        return FrozenSphereLinear(layer).eval()
    return layer


def _fold_batch_norms(sequence: nn.Sequential, known: dict[nn.Module, nn.Module], uses: Counter[nn.Module]) -> None:
    """Freeze each SphereConv of a sequence together with the BatchNorm after it: out·a + b is a scale and a shift."""
    for index in range(len(sequence) - 1):
        layer, after = sequence[index], sequence[index + 1]
        foldable = isinstance(layer, _CONVOLUTIONS) and type(after) in _BATCH_NORMS and after.running_mean is not None
        alone = uses[layer] == uses[after] == 1 and not _has_hooks(layer) and not _has_hooks(after)
        if foldable and alone and after.num_features == layer.out_channels:
            frozen = _frozen_layer(layer, after)  # type: ignore[arg-type]
            if frozen is not layer:
                known[layer] = frozen
                sequence[index + 1] = nn.Identity().eval()


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
