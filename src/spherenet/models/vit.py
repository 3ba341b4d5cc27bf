"""SphereViT: a normalized transformer over the patches of images, and its form in `create_model`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet._util.validation import require_integer
from spherenet.errors import InvalidArgument
from spherenet.layers import SphereOptions
from spherenet.models.networks import LayerFactory
from spherenet.models.transformer import Architecture, EmbeddingMatrix, Transformer, unit

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SphereViT", "ViTFeatures"]


class _PatchTransformer(Transformer):
    """Transformer over the patches of images, of which each side is a multiple of that of a patch."""

    option_defaults = {"dim": 192, "depth": 6, "num_heads": 3, "mlp_dim": None, "sphere": True, "alpha": None}  # noqa: RUF012

    def __init__(
        self,
        num_outputs: int | None,
        in_channels: int,
        input_size: tuple[int, int],
        patch_size: int,
        architecture: Architecture,
    ) -> None:
        rows, columns = (side // patch_size for side in input_size)
        super().__init__(num_outputs, rows * columns, architecture, causal=False)
        self.image_shape, self.patch_size = (in_channels, *input_size), patch_size
        self.patches = EmbeddingMatrix(in_channels * patch_size**2, self.dim, 0, self.sphere)

    def hidden_states(self, inputs: Tensor) -> list[Tensor]:
        """Return the hidden states [N, patches, dim] before the first block and after each block."""
        # Sizes are tensors in torch.jit.trace, which warns if they are compared.
        is_checked = not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if is_checked and (inputs.dim() != 4 or tuple(inputs.shape[1:]) != self.image_shape):
            raise InvalidArgument(
                "images", f"must have shape [N, {str(list(self.image_shape))[1:]}, got {list(inputs.shape)}."
            )
        # [N, C, rows, p, columns, p] → [N, rows·columns, C·p·p]; not `unfold`, which exporters know less well.
        side = self.patch_size
        grid = torch.unflatten(torch.unflatten(inputs, 3, (-1, side)), 2, (-1, side)).permute(0, 2, 4, 1, 3, 5)
        h = self.patches(grid.flatten(3).flatten(1, 2))
        return self.through_blocks(unit(h) if self.sphere else h)

    def pooled(self, images: Tensor) -> Tensor:
        """Return the mean of the last hidden states over patches, [N, dim], on the sphere with norm 1."""
        h = self.hidden_states(images)[-1].mean(1)
        return unit(h) if self.sphere else h


class SphereViT(_PatchTransformer):
    """Classify images with a normalized transformer over patches; the defaults are "sphere-vit-tiny" for 32×32 images.

    Hidden states of the last block are averaged over patches, and normalized again on the sphere.

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images.
        patch_size: Height and width of a patch, a divisor of `image_size`.
        in_channels: Channels of the images.
        dim: Size of the hidden states.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        mlp_dim: Size of the hidden layers of the MLPs; 8/3·dim by default.
        sphere: False for the plain counterpart.
        alpha: Initial eigen learning rate; 1/depth by default.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If an argument is not allowed; in forward for images of another shape.

    Shape:
        images [N, in_channels, image_size, image_size] → logits [N, num_classes].
    """

    def __init__(
        self,
        num_classes: int = 10,
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        **architecture: Unpack[Architecture],
    ) -> None:
        num_classes = require_integer("num_classes", num_classes, minimum=1)
        image_size = require_integer("image_size", image_size, minimum=1)
        patch_size = require_integer("patch_size", patch_size, minimum=1)
        in_channels = require_integer("in_channels", in_channels, minimum=1)
        if image_size % patch_size:
            raise InvalidArgument("patch_size", f"must be a divisor of image_size={image_size}, got {patch_size}.")
        super().__init__(num_classes, in_channels, (image_size, image_size), patch_size, architecture)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        return self.logits(self.pooled(images))


class ViTFeatures(_PatchTransformer):
    """Features of "sphere-vit-tiny" in `create_model`: the network of `SphereViT` without its output matrix.

    The features of a normalized transformer have norm √dim, as those of its plain counterpart have at the start: the
    head and the loss, which bring their own scale, are the same for both.

    Args:
        layers: Factory that chooses between the normalized transformer, for the operator cosine, and the plain one.
        widths: Size of the hidden states; there is a head per 64 of it.
        in_channels: Channels of the images.
        input_size: Height and width of the images, multiples of `patch_size`.
        depth: Number of blocks.
        patch_size: Height and width of a patch.

    Shape:
        images [N, C, H, W] → features [N, widths[0]].

    Raises:
        ValueError: If the image does not consist of whole patches, or an option belongs to sphere layers.
    """

    def __init__(
        self,
        layers: LayerFactory,
        widths: Sequence[int],
        in_channels: int,
        input_size: tuple[int, int],
        *,
        depth: int,
        patch_size: int = 4,
    ) -> None:
        if any(side % patch_size for side in input_size):
            raise InvalidArgument(
                "input_size",
                f"must be multiples of {patch_size}, the size of a patch, got {input_size[0]}×{input_size[1]}.",
            )
        if layers.options is not None:
            _require_cosine(layers.options)
        (dim,) = widths
        num_heads = next(heads for heads in range(max(1, dim // 64), 0, -1) if dim % heads == 0)
        architecture = Architecture(dim=dim, depth=depth, num_heads=num_heads, sphere=layers.options is not None)
        super().__init__(None, in_channels, input_size, patch_size, architecture)
        self.out_features = dim

    @property
    def head_std(self) -> float:
        """Standard deviation of the initial class weights: logits start at about 1."""
        return 1 / math.sqrt(self.out_features)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        h = self.pooled(images)
        features: Tensor = h * math.sqrt(self.out_features) if self.sphere else self.norm(h)
        return features


def _require_cosine(options: SphereOptions) -> None:
    """Raise ValueError for options of sphere layers that a normalized transformer does not have."""
    operator = getattr(options.operator, "name", options.operator)
    if operator != "cosine":
        raise InvalidArgument("operator", f"must be cosine or none for a transformer, got {operator}.")
    for name in ("k", "rescale", "center", "magnitude", "radius"):
        value = getattr(options, name)
        if value is not None:
            raise InvalidArgument(name, f"must be none for a transformer, which has no sphere layers, got {value!r}.")
