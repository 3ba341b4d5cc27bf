"""The paper's networks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spherenet.layers import AngularHead
from spherenet.losses import AngularLoss, make_loss
from spherenet.models.classifier import Classifier
from spherenet.models.convolutions import Convolutions
from spherenet.models.plain import PlainFeatures
from spherenet.models.resnet import ResidualFeatures
from spherenet.ops.angle_functions import AngleFunction
from spherenet.ops.arguments import require_one_of
from spherenet.ops.norms import DEFAULT_EPS

__all__ = ["create_model", "list_models"]


@dataclass(frozen=True)
class _Network:
    """What tells one network of the paper from another."""

    widths: tuple[int, ...]
    input_size: int
    depth: int = 0  # of plain networks
    units_a_stage: int = 0  # of residual networks
    large_images: bool = False


_NETWORKS = {f"cnn-{depth}": _Network((64, 96, 128), 32, depth=depth) for depth in (3, 9, 18, 45, 60, 69)} | {
    "resnet-32": _Network((64, 96, 128), 32, units_a_stage=5),
    "resnet-32-wide": _Network((96, 192, 384), 32, units_a_stage=5),
    "resnet-18": _Network((256, 512, 768, 1024), 224, units_a_stage=2, large_images=True),
}


def list_models() -> list[str]:
    """The names that `create_model` takes."""
    return list(_NETWORKS)


def create_model(
    name: str,
    num_classes: int = 10,
    operator: str | AngleFunction | None = None,
    k: float | None = None,
    loss: str | AngularLoss = "softmax",
    *,
    loss_options: Mapping[str, Any] | None = None,
    k_sharing: str = "filter",
    rescale: str | tuple[float, float] | None = None,
    eps: float = DEFAULT_EPS,
    batch_norm: bool = True,
    relu: bool = True,
    widths: Sequence[int] | None = None,
    in_channels: int = 3,
    input_size: int | tuple[int, int] | None = None,
    shortcut: str = "plain",
    head_bias: bool = False,
) -> Classifier:
    """Return a network of the paper, as a SphereNet or, with operator None, as its CNN twin (SPEC 3).

    operator, k, k_sharing, rescale, eps: as in `SphereConv2d`; k_sharing may also be "network".
    loss: a name ("softmax", "w-cosine", "ga-linear", "a", "s-cosine", …) with `loss_options`, or a loss object.
    batch_norm, relu: False leaves them out everywhere. widths: filters of each stage.
    in_channels, input_size: of the images; networks with a global mean take any size, cnn-N this one.
    shortcut: of residual networks, 1×1 convolutions "plain" (v2) or of the "operator" (v1).
    head_bias: a bias for each class, for imbalanced data.

        sn.create_model("cnn-9", operator="sigmoid", k=0.3, loss="w-cosine")

    Raises ValueError or TypeError for an unknown name (with the near ones), a wrong number of widths, or an image
    too small for the network's poolings (with the smallest that works).
    """
    require_one_of("name", name, _NETWORKS)
    require_one_of("shortcut", shortcut, ("plain", "operator"))
    config = {key: value for key, value in locals().items() if key != "loss_options"}
    network = _NETWORKS[name]
    criterion = make_loss(loss, **(loss_options or {}))
    chosen = network.widths if widths is None else tuple(widths)
    if len(chosen) != len(network.widths) or min(chosen) < 1:
        raise ValueError(f"widths must be {len(network.widths)} positive numbers for {name}, got {chosen}.")
    size = network.input_size if input_size is None else input_size
    height_width = (size, size) if isinstance(size, int) else (size[0], size[1])
    convolutions = Convolutions(operator, k, k_sharing, rescale, eps, batch_norm, relu)
    features: nn.Module
    if network.depth:
        features = PlainFeatures(convolutions, network.depth, chosen, in_channels, height_width)
    else:
        plain = replace(convolutions, operator=None, k=None, rescale=None)
        features = ResidualFeatures(
            convolutions,
            convolutions if shortcut == "operator" else plain,
            network.units_a_stage,
            chosen,
            in_channels,
            network.large_images,
        )
    head = AngularHead(features.out_features, num_classes, head_bias, eps=eps)
    config |= {"widths": list(chosen), "input_size": list(height_width), "loss_options": dict(loss_options or {})}
    return Classifier(features, head, criterion, config)
