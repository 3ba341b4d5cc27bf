"""Normalized transformers: hidden states and weights live on the unit sphere (Loshchilov et al. 2024, nGPT).

A block moves the hidden state h, ‖h‖ = 1, along the sphere toward what attention and MLP suggest:

    h ← Norm(h + α_A·(Norm(attention(h)) − h)),    h ← Norm(h + α_M·(Norm(mlp(h)) − h)),    Norm(x) = x/‖x‖

α ≥ 0 are learned vectors, the eigen learning rates. With unit vectors everywhere, products are cosines, and learned
scales restore the range that softmax and SiLU need:

    attention: softmax(√d_head · (s_qk·Norm(q))·(s_qk·Norm(k)))·v
    MLP:       W_o (s_u·u · silu(s_v·√d·v)),  u = W_u h,  v = W_v h
    logits:    s_z·(W h)

Each weight matrix has vectors of norm 1 along its embedding dimension: rows (axis 1) of matrices that read h, such as
W_q, W_u and the embedding table, and columns (axis 0) of those that write to it, the two W_o. `keep_normalized`
restores this after each step of an optimizer. The paper trains without warmup and weight decay.

`sphere=False` builds the plain counterpart from the same definition: h + f(RMSNorm(h)) and softmax(q·k/√d_head).

Unlike the paper, which rotates q and k, positions are learned vectors that are added to the first hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spherenet._util.validation import require_integer, require_module, require_positive
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.layers import SphereOptions
from spherenet.models.networks import LayerFactory
from spherenet.ops.norms import direction

__all__ = [
    "Block",
    "EmbeddingMatrix",
    "LearnedScale",
    "SphereGPT",
    "SphereViT",
    "ViTFeatures",
    "has_normalized_weights",
    "keep_normalized",
    "normalize_weights",
    "sphere_gpt_tiny",
]


def unit(x: Tensor, axis: int = -1) -> Tensor:
    """Return x/‖x‖ along an axis. eps = 1e-12 changes a norm of 1 by less than rounding; a zero vector stays zero."""
    return direction(x, axis, 1e-12)


class EmbeddingMatrix(nn.Module):
    """A matrix without bias whose vectors along the embedding dimension have norm 1 if `sphere`.

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        axis: The embedding dimension of `weight` [out_features, in_features]: 1 if the input is a hidden state, 0 if
            the output is.
        sphere: Whether the vectors have norm 1.
    """

    def __init__(self, in_features: int, out_features: int, axis: int, sphere: bool) -> None:
        super().__init__()
        self.axis, self.sphere = axis, sphere
        self.no_weight_decay = sphere  # `param_groups` reads this
        dim = (out_features, in_features)[axis]
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / math.sqrt(dim))
        self.normalize_()

    @torch.no_grad()
    def normalize_(self) -> None:
        """Scale the vectors along the embedding dimension to norm 1; those of a plain counterpart stay as they are."""
        if self.sphere:
            self.weight.copy_(unit(self.weight, self.axis))

    def forward(self, input: Tensor) -> Tensor:
        """Return W·input, for an input [*, in_features]."""
        return F.linear(input, self.weight)


class LearnedScale(nn.Module):
    """A learned vector s that starts at `init` and is stored as s·scale/init.

    An optimizer such as Adam changes every stored number by about its learning rate per step. `scale` therefore chooses
    how fast s changes relative to the weights, whose entries are about 1/√d.

    Args:
        size: Number of entries.
        init: Initial value of s.
        scale: Initial value of the stored vector.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        self.stored = nn.Parameter(torch.full((size,), float(scale)))
        self.ratio = require_positive("init", init) / require_positive("scale", scale)

    def forward(self) -> Tensor:
        """Return s."""
        return self.stored * self.ratio


class Block(nn.Module):
    """Move the hidden state along the sphere by attention and a SwiGLU MLP; the plain counterpart adds them to it.

    Args:
        dim: Size of the hidden state.
        num_heads: Number of attention heads.
        mlp_dim: Size of u and v.
        causal: Whether step i attends to steps 0 … i only.
        sphere: Whether to build the normalized block.
        alpha: Initial eigen learning rate.
    """

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, causal: bool, sphere: bool, alpha: float) -> None:
        super().__init__()
        self.dim, self.num_heads, self.causal, self.sphere = dim, num_heads, causal, sphere
        self.qkv = EmbeddingMatrix(dim, 3 * dim, 1, sphere)
        self.attention_out = EmbeddingMatrix(dim, dim, 0, sphere)
        self.uv = EmbeddingMatrix(dim, 2 * mlp_dim, 1, sphere)
        self.mlp_out = EmbeddingMatrix(mlp_dim, dim, 0, sphere)
        if sphere:
            slow = 1 / math.sqrt(dim)
            self.alpha_attention, self.alpha_mlp = LearnedScale(dim, alpha, slow), LearnedScale(dim, alpha, slow)
            self.s_qk, self.s_uv = LearnedScale(dim, 1, slow), LearnedScale(2 * mlp_dim, 1, 1)
        else:
            self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, h: Tensor) -> Tensor:
        """Return the next hidden states for hidden states [N, steps, dim]."""
        if not self.sphere:
            h = h + self.attention(self.attention_norm(h))
            return h + self.mlp(self.mlp_norm(h))
        h = unit(h + self.alpha_attention().abs() * (unit(self.attention(h)) - h))
        return unit(h + self.alpha_mlp().abs() * (unit(self.mlp(h)) - h))

    def attention(self, h: Tensor) -> Tensor:
        """Return the output of self-attention."""
        heads = (torch.unflatten(x, -1, (self.num_heads, -1)) for x in self.qkv(h).chunk(3, -1))
        q, k, v = (x.transpose(1, 2) for x in heads)  # [N, heads, steps, d_head]
        scale = 1 / math.sqrt(self.dim // self.num_heads)
        if self.sphere:
            s_qk = self.s_qk().view(self.num_heads, 1, -1)
            q, k, scale = (unit(q) * s_qk).to(v.dtype), (unit(k) * s_qk).to(v.dtype), 1 / scale
        output = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        attended: Tensor = self.attention_out(output.transpose(1, 2).flatten(2))
        return attended

    def mlp(self, h: Tensor) -> Tensor:
        """Return the output of the MLP."""
        uv = self.uv(h)
        if self.sphere:
            uv = uv * self.s_uv()
        u, v = uv.chunk(2, -1)
        gate = F.silu(v * math.sqrt(self.dim) if self.sphere else v)
        output: Tensor = self.mlp_out(u * gate)
        return output


class _Transformer(nn.Module):
    """Positions, blocks and output matrix of all networks; features have no output matrix."""

    def __init__(
        self,
        num_outputs: int | None,
        num_steps: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_dim: int | None,
        causal: bool,
        sphere: bool,
        alpha: float | None,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "depth": depth, "num_heads": num_heads}
        for name, size in sizes.items():
            require_integer(name, size, minimum=1)
        if dim % num_heads:
            raise InvalidArgument("num_heads", f"must be a divisor of dim={dim}, got {num_heads}.")
        mlp_dim = 8 * dim // 3 if mlp_dim is None else require_integer("mlp_dim", mlp_dim, minimum=1)
        alpha = 1 / depth if alpha is None else require_positive("alpha", alpha)
        self.sphere, self.num_steps = sphere, num_steps
        self.positions = EmbeddingMatrix(dim, num_steps, 1, sphere)
        self.blocks = nn.ModuleList(Block(dim, num_heads, mlp_dim, causal, sphere, alpha) for _ in range(depth))
        self.norm = nn.Identity() if sphere else nn.RMSNorm(dim)
        if num_outputs is not None:
            self.out = EmbeddingMatrix(dim, num_outputs, 1, sphere)
            self.s_z = LearnedScale(num_outputs, 1, 1 / math.sqrt(dim)) if sphere else None

    def hidden_states(self, inputs: Tensor) -> list[Tensor]:
        """Return the hidden states [N, steps, dim] before the first block and after each block."""
        raise NotImplementedError

    def _through_blocks(self, h: Tensor) -> list[Tensor]:
        h = h + self.positions.weight[: h.shape[1]]
        states = [unit(h) if self.sphere else h]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def _logits(self, h: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(h))
        return logits if self.s_z is None else logits * self.s_z()


class SphereGPT(_Transformer):
    """Predict the next token with a causal normalized transformer; the defaults are "sphere-gpt-tiny" for characters.

    Args:
        num_tokens: Size of the vocabulary.
        context: Largest number of steps.
        dim: Size of the hidden states.
        depth: Number of blocks.
        num_heads: Number of attention heads.
        mlp_dim: Size of the hidden layers of the MLPs; 8/3·dim by default.
        sphere: False for the plain counterpart.
        alpha: Initial eigen learning rate; 1/depth by default.

    Raises:
        TypeError: If an argument has the wrong type; in forward for tokens that are not integers.
        ValueError: If an argument is not allowed; in forward for wrong shapes.

    Shape:
        tokens [N, steps] → logits [N, steps, num_tokens].

    Example:
        >>> model = sn.SphereGPT(num_tokens=128)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        >>> handle = sn.keep_normalized(optimizer, model)
    """

    def __init__(
        self,
        num_tokens: int,
        context: int = 128,
        dim: int = 96,
        depth: int = 4,
        num_heads: int = 4,
        mlp_dim: int | None = None,
        *,
        sphere: bool = True,
        alpha: float | None = None,
    ) -> None:
        num_tokens = require_integer("num_tokens", num_tokens, minimum=1)
        context = require_integer("context", context, minimum=1)
        super().__init__(num_tokens, context, dim, depth, num_heads, mlp_dim, True, sphere, alpha)
        self.tokens = EmbeddingMatrix(dim, num_tokens, 1, sphere)

    def hidden_states(self, inputs: Tensor) -> list[Tensor]:
        """Return the hidden states [N, steps, dim] before the first block and after each block."""
        if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.int32, torch.int64):
            got = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
            raise InvalidArgumentType("tokens", f"must be a tensor of integers, got {got}.")
        if inputs.dim() != 2 or inputs.shape[1] > self.num_steps:
            raise InvalidArgument("tokens", f"must have shape [N, at most {self.num_steps}], got {list(inputs.shape)}.")
        return self._through_blocks(F.embedding(inputs, self.tokens.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token after each step."""
        return self._logits(self.hidden_states(tokens)[-1])


class _PatchTransformer(_Transformer):
    """Transformer over the patches of images, of which each side is a multiple of that of a patch."""

    def __init__(
        self,
        num_outputs: int | None,
        in_channels: int,
        input_size: tuple[int, int],
        patch_size: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_dim: int | None,
        sphere: bool,
        alpha: float | None,
    ) -> None:
        rows, columns = (side // patch_size for side in input_size)
        super().__init__(num_outputs, rows * columns, dim, depth, num_heads, mlp_dim, False, sphere, alpha)
        self.image_shape, self.patch_size = (in_channels, *input_size), patch_size
        self.patches = EmbeddingMatrix(in_channels * patch_size**2, dim, 0, sphere)

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
        return self._through_blocks(unit(h) if self.sphere else h)

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
        TypeError: If an argument has the wrong type.
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
        dim: int = 192,
        depth: int = 6,
        num_heads: int = 3,
        mlp_dim: int | None = None,
        *,
        sphere: bool = True,
        alpha: float | None = None,
    ) -> None:
        num_classes = require_integer("num_classes", num_classes, minimum=1)
        image_size = require_integer("image_size", image_size, minimum=1)
        patch_size = require_integer("patch_size", patch_size, minimum=1)
        in_channels = require_integer("in_channels", in_channels, minimum=1)
        if image_size % patch_size:
            raise InvalidArgument("patch_size", f"must be a divisor of image_size={image_size}, got {patch_size}.")
        size, architecture = (image_size, image_size), (dim, depth, num_heads, mlp_dim, sphere, alpha)
        super().__init__(num_classes, in_channels, size, patch_size, *architecture)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the classes."""
        return self._logits(self.pooled(images))


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
        architecture = (dim, depth, num_heads, None, layers.options is not None, None)
        super().__init__(None, in_channels, input_size, patch_size, *architecture)
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
    for name in ("rescale", "center", "magnitude"):
        value = getattr(options, name)
        if value is not None:
            raise InvalidArgument(name, f"must be none for a transformer, which has no sphere layers, got {value!r}.")


def sphere_gpt_tiny(num_tokens: int, *, sphere: bool = True) -> SphereGPT:
    """Return "sphere-gpt-tiny": a `SphereGPT` of 4 blocks with 96 dimensions and 4 heads for 128 characters.

    Args:
        num_tokens: Size of the vocabulary.
        sphere: False for the plain counterpart.

    Raises:
        TypeError: If `num_tokens` is not an integer.
        ValueError: If `num_tokens` is less than 1.

    Example:
        >>> model = sn.models.sphere_gpt_tiny(num_tokens=128)
    """
    return SphereGPT(num_tokens, context=128, dim=96, depth=4, num_heads=4, sphere=sphere)


def has_normalized_weights(model: nn.Module) -> bool:
    """Return whether a model contains a normalized transformer."""
    return any(isinstance(module, EmbeddingMatrix) and module.sphere for module in model.modules())


def normalize_weights(model: nn.Module) -> None:
    """Scale the vectors of all matrices of normalized transformers in a model to norm 1, along the embedding dimension.

    Plain counterparts are left alone.

    Raises:
        TypeError: If the model is no module.
    """
    require_module("model", model)
    for module in model.modules():
        if isinstance(module, EmbeddingMatrix):
            module.normalize_()


def keep_normalized(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Normalize the weights of a model now and after each step of the optimizer; see `normalize_weights`.

    The hook has no state: a run that loads weights after this call continues as if it had not been interrupted. Weights
    of FSDP2 are normalized in place, along sharded dimensions too. `spherenet train` does this by itself.

    Returns:
        A handle; its `remove()` ends it.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgumentType("optimizer", f"must be a torch optimizer, got {type(optimizer).__name__}.")
    normalize_weights(model)

    def after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        normalize_weights(model)

    return optimizer.register_step_post_hook(after_step)
