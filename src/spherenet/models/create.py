"""`create_model`, which creates the networks of the paper by name, and `Classifier`."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast, overload

from torch import Tensor, nn

from spherenet._util.validation import require_integer, require_one_of, suggest_options
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.layers import AngularHead, SphereOptions
from spherenet.layers.base import Proxy
from spherenet.layers.options import NetworkKeywords
from spherenet.losses import AngularLoss, make_loss
from spherenet.models.air import AirFeatures
from spherenet.models.networks import LayerFactory, PlainFeatures, ResidualFeatures
from spherenet.models.vit import ViTFeatures

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Classifier", "create_model", "list_models"]


class Classifier(nn.Module):
    """Network that consists of a feature extractor, a head with the class weights, and a loss without weights.

    With labels, one call computes everything for a training step, so that DDP and torch.compile see the whole model.

    Args:
        features: Module images → features [N, F].
        head: Module features → `AngularOutput`.
        criterion: Loss of an `AngularOutput` and labels.
        config: Arguments of `create_model` that reproduce this model.
    """

    def __init__(self, features: nn.Module, head: AngularHead, criterion: AngularLoss, config: dict[str, Any]) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.criterion = criterion
        self.config = config

    @overload
    def forward(self, images: Tensor) -> Tensor: ...
    @overload
    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(self, images: Tensor, labels: Tensor, *, return_scores: Literal[False]) -> Tensor: ...
    def forward(
        self, images: Tensor, labels: Tensor | None = None, *, return_scores: bool = True
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return scores, or the loss and scores if labels are given.

        Args:
            images: Batch of images [N, C, H, W].
            labels: Class indices [N], or probabilities [N, classes].
            return_scores: With labels, whether to return the scores too. They are a by-product of the loss; only heads
                with very many classes, whose loss never stores all logits, save time and memory without them.

        Returns:
            Scores [N, classes] without labels, (loss, scores) with labels, or the loss alone.
        """
        output = self.head(self.features(images))
        if isinstance(output, Proxy):
            return apply_criterion(self.criterion, output, labels, return_scores)
        if labels is None:
            return self.criterion.logits(output)
        result: Tensor | tuple[Tensor, Tensor] = self.criterion(output, labels, return_scores=return_scores)
        return result

    def push_to_hub(self, repository: str, **options: Any) -> str:
        """Upload the model to the Hugging Face Hub; see `spherenet.export.push_to_hub`."""
        # By name, since export is a layer above: models do not depend on how they are stored.
        export = importlib.import_module("spherenet.export")
        return cast(str, export.push_to_hub(self, repository, **options))


def apply_criterion(
    criterion: AngularLoss, output: Any, labels: Tensor | None, return_scores: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what `Classifier` returns for the output of its head, as one node if `torch.fx` traces the call."""
    if isinstance(output, Proxy):
        tracer = output.tracer
        module = tracer.create_proxy("get_attr", tracer.path_of_module(criterion), (), {})
        arguments = (module, output, labels, return_scores)
        node: Tensor = tracer.create_proxy("call_function", apply_criterion, arguments, {})
        return node
    if labels is None:
        return criterion.logits(output)
    result: Tensor | tuple[Tensor, Tensor] = criterion(output, labels, return_scores=return_scores)
    return result


@dataclass(frozen=True)
class _Network:
    """Registry entry of a network: its feature class with its arguments, and the defaults of `create_model`."""

    features: Callable[..., nn.Module]
    widths: tuple[int, ...]
    input_size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    has_convolutions: bool = True


_NETWORKS = {f"cnn-{n}": _Network(PlainFeatures, (64, 96, 128), 32, {"depth": n}) for n in (3, 9, 18, 45, 60, 69)} | {
    "resnet-32": _Network(ResidualFeatures, (64, 96, 128), 32, {"units_per_stage": 5}),
    "resnet-32-wide": _Network(ResidualFeatures, (96, 192, 384), 32, {"units_per_stage": 5}),
    "air": _Network(AirFeatures, (64, 256, 256), 32),
    "air-unwhitened": _Network(AirFeatures, (64, 256, 256), 32, {"whitening": False}),
    "resnet-18": _Network(ResidualFeatures, (256, 512, 768, 1024), 224, {"units_per_stage": 2, "large_images": True}),
    "sphere-vit-tiny": _Network(ViTFeatures, (192,), 32, {"depth": 6}, has_convolutions=False),
}


def list_models() -> list[str]:
    """Return the names of the networks that `create_model` knows."""
    return list(_NETWORKS)


@suggest_options
def create_model(
    name: str,
    num_classes: int = 10,
    operator: str | AngleFunction | SphereOptions | None = "cosine",
    k: float | None = None,
    loss: str | AngularLoss = "softmax",
    *,
    loss_options: Mapping[str, Any] | None = None,
    batch_norm: bool = True,
    relu: bool = True,
    widths: Sequence[int] | None = None,
    in_channels: int = 3,
    input_size: int | tuple[int, int] | None = None,
    shortcut: str = "plain",
    head_bias: bool = False,
    feature_batch_norm: bool = False,
    center: str | None = "auto",
    group_norm: int = 0,
    engine: str = "torch",
    **options: Unpack[NetworkKeywords],
) -> Classifier:
    """Return a network of the paper, as a SphereNet or as its CNN twin, or a transformer.

    "sphere-vit-tiny" is a normalized transformer (`SphereViT`) for the operator cosine, and its plain counterpart for
    None. It has neither convolutions, BatchNorm nor ReLU, so that their options have no effect. Its optimizer needs
    `keep_normalized`, which `spherenet train` calls.

    A SphereNet without BatchNorm is centered by default. After a ReLU all patches lie in one orthant and share a large
    common component, so that cosines with all of them are alike. BatchNorm removes this component; without BatchNorm,
    centering does (Eq. 14).

    Args:
        name: Name of the network, e.g. "cnn-9" or "resnet-32"; see `list_models`.
        num_classes: Number of classes.
        operator: Operator as in `SphereConv2d`, or all options of the sphere layers as a `SphereOptions` object; None
            or "none" for the CNN twin.
        k: Parameter of the sigmoid, as in `SphereConv2d`.
        loss: Name of a loss, e.g. "softmax", "w-cosine", "ga-linear", "a" or "s-cosine", or a loss object.
        loss_options: Keyword arguments of the loss, if it is given by name.
        batch_norm: Whether convolutions are followed by BatchNorm.
        relu: Whether convolutions are followed by ReLU.
        widths: Number of filters of each stage; None for those of the paper.
        in_channels: Channels of the images.
        input_size: Size of the images. cnn-N and sphere-vit-tiny take images of this size only, residual networks of
            any size.
        shortcut: 1×1 shortcut convolutions of residual networks: "plain" (v2), or with the "operator" (v1).
        head_bias: Whether the head has a bias for each class, for imbalanced data.
        feature_batch_norm: Whether the features are followed by BatchNorm, so that their norm cannot collapse.
        center: None or "none", "weight" or "patch" as in `SphereConv2d`. "auto" is "patch" for a SphereNet without
            BatchNorm and GroupNorm, otherwise None, since centering slows the start of deep networks with BatchNorm.
            "first-patch" is "patch" in the first sphere layer alone; in "air" that is the one after the whitening.
        group_norm: Number of groups of a GroupNorm after each convolution, which requires `batch_norm=False`; 0 for
            none.
        engine: Engine of plain convolutions: "torch", or "winograd" for that of sphere layers on CPUs (`FastConv2d`),
            so that a CNN twin is compared on equal terms.
        k_sharing: "filter" or "layer" as in `SphereConv2d`, or "network" for one learned k in all layers.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        magnitude: As in `SphereConv2d`.
        radius: As in `SphereConv2d`.

    Raises:
        TypeError: If an option, or an option of the loss, is unknown.
        ValueError: If a name is unknown, the number of widths is wrong, or the image is too small for the poolings.

    Example:
        >>> model = sn.create_model("cnn-9", operator="sigmoid", k=0.3, loss="w-cosine")
    """
    network = _NETWORKS[require_one_of("name", name, _NETWORKS)]
    is_plain = operator is None or operator == "none"
    chosen = SphereOptions.collect("cosine" if is_plain else operator, k, center, options)
    is_centered = not is_plain and network.has_convolutions and not batch_norm and not group_norm
    chosen = chosen.for_network("patch" if is_centered else None, has_first=True)
    if is_plain:
        chosen.require_unused()
    layers = LayerFactory(None if is_plain else chosen, batch_norm, relu, shortcut, group_norm, engine)
    count = len(network.widths)
    stage_widths = network.widths if widths is None else _positive_integers("widths", widths, count, f" for {name}")
    size: Any = network.input_size if input_size is None else input_size
    size = (size, size) if isinstance(size, SupportsIndex) else size
    height_width = cast(tuple[int, int], _positive_integers("input_size", size, 2))
    in_channels = require_integer("in_channels", in_channels, minimum=1)
    if loss_options is not None and not isinstance(loss_options, Mapping):
        raise InvalidArgumentType("loss_options", f"must be a mapping, got {type(loss_options).__name__}.")
    criterion = make_loss(loss, **(loss_options or {}))
    features = network.features(layers, stage_widths, in_channels, height_width, **network.arguments)
    out_features = cast(int, features.out_features)
    head_std: float | None = getattr(features, "head_std", None)
    if feature_batch_norm:
        features = nn.Sequential(OrderedDict(network=features, batch_norm=nn.BatchNorm1d(out_features)))
    head = AngularHead(out_features, num_classes, head_bias, directions=criterion.directions, eps=chosen.eps)
    if head_std is not None:
        nn.init.normal_(head.weight, std=head_std)
    config = {
        "name": name,
        "num_classes": head.num_classes,
        "loss": loss,
        "loss_options": dict(loss_options or {}),
        **chosen.keywords(),
        "operator": None if is_plain else chosen.operator,
        "batch_norm": batch_norm,
        "relu": relu,
        "widths": list(stage_widths),
        "in_channels": in_channels,
        "input_size": list(height_width),
        "shortcut": shortcut,
        "head_bias": head_bias,
        "feature_batch_norm": feature_batch_norm,
        "group_norm": group_norm,
        "engine": engine,
    }
    return Classifier(features, head, criterion, config)


def _positive_integers(name: str, values: Any, count: int, purpose: str = "") -> tuple[int, ...]:
    """Return values as integers, of which there must be `count`, each at least 1."""
    try:
        numbers = tuple(index(value) for value in values)
    except TypeError:
        raise InvalidArgumentType(name, f"must be {count} positive integers{purpose}, got {values!r}.") from None
    if len(numbers) != count or min(numbers) < 1:
        raise InvalidArgument(name, f"must be {count} positive integers{purpose}, got {numbers}.")
    return numbers
