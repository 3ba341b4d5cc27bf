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
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spherenet._util.validation import OptionCheck, require_integer, require_module, require_positive
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.ops.norms import direction

__all__ = [
    "Architecture",
    "Block",
    "EmbeddingMatrix",
    "LearnedScale",
    "Transformer",
    "has_normalized_weights",
    "keep_normalized",
    "normalize_weights",
    "unit",
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


class Architecture(TypedDict, total=False):
    """Options of all transformers; `SphereGPT` documents them."""

    dim: int
    depth: int
    num_heads: int
    mlp_dim: int | None
    sphere: bool
    alpha: float | None


class Transformer(OptionCheck, nn.Module):
    """Positions, blocks and output matrix of all networks; features have no output matrix.

    Args:
        num_outputs: Number of logits; None for no output matrix.
        num_steps: Largest number of steps.
        architecture: Options whose values differ from `option_defaults`.
        causal: Whether step i attends to steps 0 … i only.
    """

    dim: int
    sphere: bool

    def __init__(self, num_outputs: int | None, num_steps: int, architecture: Architecture, *, causal: bool) -> None:
        super().__init__()
        chosen: dict[str, Any] = {**self.option_defaults, **architecture}
        dim, depth, num_heads, mlp_dim, sphere, alpha = (chosen[name] for name in Architecture.__annotations__)
        for name, size in (("dim", dim), ("depth", depth), ("num_heads", num_heads)):
            require_integer(name, size, minimum=1)
        if dim % num_heads:
            raise InvalidArgument("num_heads", f"must be a divisor of dim={dim}, got {num_heads}.")
        mlp_dim = 8 * dim // 3 if mlp_dim is None else require_integer("mlp_dim", mlp_dim, minimum=1)
        alpha = 1 / depth if alpha is None else require_positive("alpha", alpha)
        self.dim, self.sphere, self.num_steps = dim, sphere, num_steps
        self.positions = EmbeddingMatrix(dim, num_steps, 1, sphere)
        self.blocks = nn.ModuleList(Block(dim, num_heads, mlp_dim, causal, sphere, alpha) for _ in range(depth))
        self.norm = nn.Identity() if sphere else nn.RMSNorm(dim)
        if num_outputs is not None:
            self.out = EmbeddingMatrix(dim, num_outputs, 1, sphere)
            self.s_z = LearnedScale(num_outputs, 1, 1 / math.sqrt(dim)) if sphere else None

    def hidden_states(self, inputs: Tensor) -> list[Tensor]:
        """Return the hidden states [N, steps, dim] before the first block and after each block."""
        raise NotImplementedError

    def through_blocks(self, h: Tensor) -> list[Tensor]:
        """Return the hidden states for embeddings [N, steps, dim], to which the positions are added."""
        h = h + self.positions.weight[: h.shape[1]]
        states = [unit(h) if self.sphere else h]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states

    def logits(self, h: Tensor) -> Tensor:
        """Return the logits for hidden states [..., dim]."""
        logits: Tensor = self.out(self.norm(h))
        return logits if self.s_z is None else logits * self.s_z()
