"""`freeze`: copy a model for inference, with constants folded into sphere layers and the head."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from spherenet._util.text import first_line
from spherenet._util.validation import require_module
from spherenet.convert.layers import ancestor_names, called_children, is_sequential
from spherenet.errors import ModelError
from spherenet.export.frozen_layers import (
    BatchNorm,
    FrozenAngle,
    FrozenSphereConv,
    FrozenSphereLinear,
    constants_of,
    restore_constants,
)
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

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FrozenClassifier", "FrozenScores", "freeze"]

FOLDABLE_LOSSES = (SoftmaxLoss, WSoftmaxLoss, GASoftmaxLoss, ASoftmaxLoss, SSoftmaxLoss, CosFaceLoss, ArcFaceLoss)
"""Losses that `FrozenScores` supports, by exact type, since a subclass may compute its logits differently."""

_CONVOLUTIONS = (SphereConv1d, SphereConv2d, SphereConv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def freeze(model: nn.Module) -> nn.Module:
    """Return a copy of a model for inference, with normalized weights and folded constants.

    Sphere layers get unit weights, with k, β, γ and bias as constants. A BatchNorm directly after a SphereConv in an
    `nn.Sequential` is folded into the convolution and replaced by an identity, if the sequence is called as a whole. A
    `Classifier` becomes a module images → scores; its class weights are normalized if the loss ignores their norm.

    The copy is in evaluation mode, has no trainable parameters and consists of plain torch operations, which
    torch.export and ONNX support. Subclasses of sphere layers that override `forward` stay as they are.
    Hooks of frozen layers are dropped. Outputs differ from those of the model by rounding only, about 1e-6 in float32
    and 1e-12 in float64.

    Args:
        model: Any module.

    Returns:
        The frozen copy.

    Raises:
        ModelError: If a lazy layer has not seen an input yet, a hook computes the weight of a sphere layer (pruning),
            or the model cannot be copied.
        TypeError: If model is not a module.
    """
    require_module("model", model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(f"{name} has no values yet: run the model once before freezing it.")
    for name, layer in model.named_modules():
        is_computed = isinstance(layer, SphereLayer) and "weight" not in layer._parameters
        if is_computed and not is_parametrized(layer, "weight"):
            raise ModelError(
                f"the weight of {name or 'the model'} is computed by a hook: make it permanent before freezing, e.g. "
                "with torch.nn.utils.prune.remove."
            )
    try:
        duplicate = copy.deepcopy(model).eval().requires_grad_(False)
    except RuntimeError as error:  # tensors with a gradient history
        raise ModelError(f"the model cannot be copied: {first_line(error)}.") from error
    uses = Counter(child for module in duplicate.modules() for child in module._modules.values() if child is not None)
    with torch.no_grad():
        return _frozen(duplicate, _State({}, uses, _called_as_a_whole(duplicate)))


class _State(NamedTuple):
    """What is known about the modules of a model.

    Attributes:
        cache: Frozen form of each module that has one.
        uses: Number of places in which each module is registered.
        whole: Sequences that are called as a whole.
    """

    cache: dict[nn.Module, nn.Module]
    uses: Counter[nn.Module]
    whole: set[nn.Module]


def _frozen(module: nn.Module, state: _State) -> nn.Module:
    """Return the frozen form of a module. A module that is used several times is frozen once."""
    if module in state.cache:
        return state.cache[module]
    result = module
    if isinstance(module, SphereLayer):
        result = _frozen_layer(module)
    elif isinstance(module, Classifier) and type(module).forward is Classifier.forward:
        features = _frozen(module.features, state)
        one_direction = type(module.head) is AngularHead and module.head.directions == 1
        foldable = one_direction and type(module.criterion) in FOLDABLE_LOSSES
        scores = FrozenScores(module.head, module.criterion) if foldable else _Scores(module.head, module.criterion)
        result = FrozenClassifier(features, scores).eval()
    else:
        if module in state.whole:
            _fold_batch_norms(module, state)  # type: ignore[arg-type]
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _frozen(child, state)
    state.cache[module] = result
    return result


def _frozen_layer(layer: SphereLayer, batch_norm: BatchNorm | None = None) -> nn.Module:
    """Return the frozen form of a sphere layer, or the layer itself if a subclass overrides its forward."""
    if isinstance(layer, _CONVOLUTIONS) and type(layer).forward is SphereConv2d.forward:
        return FrozenSphereConv(layer, batch_norm).eval()
    if isinstance(layer, SphereLinear) and type(layer).forward is SphereLinear.forward:
        return FrozenSphereLinear(layer).eval()
    return layer


def _called_as_a_whole(model: nn.Module) -> set[nn.Module]:
    """Return the sequences with a BatchNorm after a SphereConv of which no module is called by itself.

    A sequence belongs to the module whose `forward` calls it, or one of the sequences around it. If that `forward`
    cannot be traced, it may call anything, and the sequence is not returned.
    """
    names = {module: name for name, module in model.named_modules()}
    modules = {name: module for module, name in names.items()}
    calls: dict[nn.Module, dict[nn.Module, list[nn.Module]] | None] = {}
    found: set[nn.Module] = set()
    for sequence, name in names.items():
        if type(sequence) is not nn.Sequential or next(_foldable_pairs(sequence), None) is None:
            continue
        around = [modules[ancestor] for ancestor in ancestor_names(name)]
        transparent = (nn.ModuleList, nn.ModuleDict)
        owner = next((a for a in reversed(around) if not is_sequential(a) and not isinstance(a, transparent)), None)
        if owner is None or (isinstance(owner, Classifier) and type(owner).forward is Classifier.forward):
            found.add(sequence)
            continue
        if owner not in calls:
            calls[owner] = called_children(owner)
        called = calls[owner]
        if called is not None and not any(module in called for module in sequence.modules() if module is not sequence):
            found.add(sequence)
    return found


def _foldable_pairs(sequence: nn.Sequential) -> Iterator[int]:
    """Yield the index of each SphereConv of a sequence that a BatchNorm follows, which is a scale and a shift."""
    for index in range(len(sequence) - 1):
        layer, after = sequence[index], sequence[index + 1]
        foldable = isinstance(layer, _CONVOLUTIONS) and type(after) in _BATCH_NORMS and after.running_mean is not None
        if foldable and after.num_features == layer.out_channels:
            yield index


def _fold_batch_norms(sequence: nn.Sequential, state: _State) -> None:
    """Freeze each SphereConv of a sequence together with the BatchNorm after it."""
    for index in _foldable_pairs(sequence):
        layer, after = sequence[index], sequence[index + 1]
        if state.uses[layer] == state.uses[after] == 1 and not _has_hooks(layer) and not _has_hooks(after):
            frozen = _frozen_layer(layer, after)  # type: ignore[arg-type]
            if frozen is not layer:
                state.cache[layer] = frozen
                sequence[index + 1] = nn.Identity().eval()


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class FrozenClassifier(nn.Module):
    """Classifier for inference, images [N, C, H, W] → scores [N, classes]."""

    def __init__(self, features: nn.Module, scores: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.scores = scores

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of a batch of images."""
        scores: Tensor = self.scores(self.features(images))
        return scores


class FrozenScores(nn.Module):
    """An `AngularHead` and the logits of its loss in one module, features [*, in] → scores [*, classes].

        softmax                    w_jᵀx + b_j, the plain product
        scale ‖x‖, g the cosine    u_jᵀx + b_j, with u_j = w_j/‖w_j‖
        scale ‖x‖, other g         ‖x‖·g(θ_j) + b_j
        fixed scale s              s·g(θ_j) + b_j

    A feature whose squares overflow counts as zero.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, head: AngularHead, criterion: AngularLoss) -> None:
        super().__init__()
        self.eps = head.eps
        self.dtype = working_dtype(head.weight.dtype)
        weight = head.weight.to(self.dtype)
        weight_norm = norm(weight, 1, head.eps)
        angle = criterion.angle
        fixed_scale = criterion.scale_for(head.num_classes)
        self.scale_by_norm = fixed_scale is None
        self.angle: FrozenAngle | None = None
        unit = weight / weight_norm
        if angle is None:
            unit = unit * weight_norm.masked_fill(weight_norm.isinf(), 0)
        elif not (self.scale_by_norm and angle.is_identity):
            scale = weight.new_full((head.num_classes,), fixed_scale or 1.0, dtype=torch.float64)
            self.angle = FrozenAngle(angle, scale, torch.zeros_like(scale), self.dtype)
        self.register_buffer("weight", unit)
        self.register_buffer("bias", None if head.bias is None else head.bias.to(self.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the scores to another device or dtype; in half precision they are still computed in float32."""
        before = constants_of(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != self.dtype:
            self.dtype = working_dtype(self.weight.dtype)
            restore_constants(before, self.dtype)
        return self

    def forward(self, features: Tensor) -> Tensor:
        """Return the scores."""
        with without_autocast(features):
            x = features.to(self.dtype) if features.dtype != self.dtype else features
            x_norm = norm(x, -1, self.eps)
            overflowed = x_norm.isinf()
            x = torch.where(overflowed, 0.0, x)
            if self.angle is None:
                return F.linear(x, self.weight, self.bias)
            x_norm = torch.where(overflowed, self.eps**0.5, x_norm)
            scores: Tensor = self.angle(F.linear(x, self.weight) / x_norm)
            scores = scores * x_norm if self.scale_by_norm else scores
            return scores if self.bias is None else scores + self.bias


class _Scores(nn.Module):
    """A head and a loss of user-defined classes, unchanged."""

    def __init__(self, head: nn.Module, criterion: AngularLoss) -> None:
        super().__init__()
        self.head = head
        self.criterion = criterion

    def forward(self, features: Tensor) -> Tensor:
        return self.criterion.logits(self.head(features))
