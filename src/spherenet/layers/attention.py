"""SphereMultiheadAttention: attention whose scores are scaled cosines between queries and keys.

Head h of torch's layer computes softmax(q·k/√d)·v. Its scores grow with the norms of q and k without a bound, which can
make training unstable. Here the scores are cosines times a learned scale that is bounded (Liu et al. 2022, Swin V2):

    score = s_h·cos(q, k),    s_h = max_scale·σ(−t_h)

t_h is the learned temperature of the head: the higher, the flatter the attention. Far below its bound, s_h is about
max_scale·exp(−t_h); near the bound its gradient decreases, but is not cut off. A zero query or key has the score 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import (
    OptionCheck,
    require_floating,
    require_integer,
    require_number,
    require_positive,
)
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.layers.base import Proxy
from spherenet.ops.norms import DEFAULT_EPS, autocast_is_on, direction, working_dtype

__all__ = ["SphereMultiheadAttention"]


class SphereMultiheadAttention(OptionCheck, nn.Module):
    """Attend by cosines, as a replacement for `torch.nn.MultiheadAttention`.

    Parameters have the names and shapes of torch's layer, whose state dict loads with `strict=False`; `temperature`
    [num_heads] is added.

    Args:
        embed_dim: As in `torch.nn.MultiheadAttention`.
        num_heads: As in `torch.nn.MultiheadAttention`.
        dropout: As in `torch.nn.MultiheadAttention`.
        bias: As in `torch.nn.MultiheadAttention`.
        add_bias_kv: Must be False: a learned key is not supported.
        add_zero_attn: Must be False: a zero key would have the score 0, which is an average match of cosines.
        kdim: As in `torch.nn.MultiheadAttention`.
        vdim: As in `torch.nn.MultiheadAttention`.
        batch_first: As in `torch.nn.MultiheadAttention`.
        scale: Initial scale s of each head.
        max_scale: Bound of the scales.
        eps: Number added under the square roots of the norms of queries and keys.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If an argument has the wrong type; in forward for a wrong dtype.
        ValueError: If an argument is not allowed; in forward for wrong shapes.

    Shape:
        query [L, N, embed_dim], key [S, N, kdim], value [S, N, vdim]; [N, L, …] if batch_first, [L, …] if unbatched.
        Output as query; weights [N, L, S], or [N, num_heads, L, S] if they are not averaged.
    """

    # nn.TransformerEncoderLayer reads this. If it were True, its fast path would compute plain attention instead.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        scale: float = 10.0,
        max_scale: float = 100.0,
        eps: float = DEFAULT_EPS,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if add_bias_kv:
            raise InvalidArgument("add_bias_kv", f"must be False: a learned key is not supported, got {add_bias_kv!r}.")
        if add_zero_attn:
            raise InvalidArgument(
                "add_zero_attn", f"must be False: a zero key has no direction, got {add_zero_attn!r}."
            )
        self.embed_dim = require_integer("embed_dim", embed_dim, minimum=1)
        self.num_heads = require_integer("num_heads", num_heads, minimum=1)
        if embed_dim % num_heads:
            raise InvalidArgument("num_heads", f"must be a divisor of embed_dim={embed_dim}, got {num_heads}.")
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else require_integer("kdim", kdim, minimum=1)
        self.vdim = embed_dim if vdim is None else require_integer("vdim", vdim, minimum=1)
        self.dropout = require_number("dropout", dropout)
        if not 0 <= self.dropout <= 1:
            raise InvalidArgument("dropout", f"must be from 0 to 1, got {dropout!r}.")
        self.batch_first = batch_first
        self.max_scale, self.eps = require_positive("max_scale", max_scale), require_positive("eps", eps)
        self.scale = require_positive("scale", scale)
        if self.scale >= self.max_scale:
            raise InvalidArgument("scale", f"must be less than max_scale={max_scale}, got {scale!r}.")

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        packed = self.kdim == self.vdim == embed_dim
        self.register_parameter("in_proj_weight", parameter(3 * embed_dim, embed_dim) if packed else None)
        self.register_parameter("q_proj_weight", None if packed else parameter(embed_dim, embed_dim))
        self.register_parameter("k_proj_weight", None if packed else parameter(embed_dim, self.kdim))
        self.register_parameter("v_proj_weight", None if packed else parameter(embed_dim, self.vdim))
        self.register_parameter("in_proj_bias", parameter(3 * embed_dim) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device=device, dtype=dtype)
        self.temperature = parameter(num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the projections as torch does, and all heads with the initial scale."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self.reset_temperature()

    def reset_temperature(self) -> None:
        """Set the scale of all heads to the initial scale."""
        nn.init.constant_(self.temperature, math.log(self.max_scale / self.scale - 1))

    def scales(self) -> Tensor:
        """Return the scale s of each head, [num_heads], between 0 and `max_scale`."""
        return self.max_scale * torch.sigmoid(-self.temperature.to(working_dtype(self.temperature.dtype)))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and the attention weights, or None instead of the weights.

        A query that may attend to no key gets the attention output 0, and thus the bias of `out_proj`, with gradient 0.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            key_padding_mask: [N, S] or [S]; True, or −inf, for keys to ignore. Other numbers are added to the scores.
            need_weights: Whether to return the weights. Without them, torch's fused kernels compute the output.
            attn_mask: [L, S] or [N·num_heads, L, S]; as `key_padding_mask`.
            average_attn_weights: Whether to average the weights over heads.
            is_causal: Whether query i attends to keys 0 … i only. As in torch, an `attn_mask` that is passed too must
                be this mask; unlike in torch, it can be left out.
        """
        if isinstance(query, Proxy):
            flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
            options = flags | {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            return query.tracer.create_proxy(  # type: ignore[no-any-return]
                "call_module", query.tracer.path_of_module(self), (query, key, value), options
            )
        self._check(query, key, value)
        is_batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        if not is_batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        q, k, v = (torch.unflatten(x, -1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        # The scale is part of the query, since the fused kernels have one scale for all heads.
        q = (direction(q, -1, self.eps) * self.scales()[:, None, None]).to(v.dtype)
        k = direction(k, -1, self.eps).to(v.dtype)
        if is_causal and (need_weights or key_padding_mask is not None) and attn_mask is None:
            ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            attn_mask = ones.triu(1)
        elif is_causal and not need_weights and key_padding_mask is None:
            attn_mask = None  # the kernels know the causal mask
        mask, is_dead = self._merge(key_padding_mask, attn_mask, q, k.shape[2])
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1)
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
            weights = scores.softmax(-1)
            weights = weights if is_dead is None else weights.masked_fill(is_dead, 0)
            weights = F.dropout(weights.to(v.dtype), dropout)
            output = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            is_causal = is_causal and mask is None
            output = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale=1.0)
            output = output if is_dead is None else output.masked_fill(is_dead, 0)
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def extra_repr(self) -> str:
        """Return the options that the parameters do not show."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout:g}, "
            f"batch_first={self.batch_first}, max_scale={self.max_scale:g}"
        )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return the projections of the inputs, from one product if the inputs are the same tensor."""
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise TypeError or ValueError for inputs that do not fit together."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        assert weight is not None
        dtype = weight.dtype
        for name, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            require_floating(name, tensor)
            if tensor.is_nested:
                raise InvalidArgument(name, "must not be nested: pad it and use key_padding_mask, got a nested tensor.")
            if tensor.dtype != dtype and not autocast_is_on(tensor):
                raise InvalidArgumentType(name, f"must have the dtype of the weights, {dtype}, got {tensor.dtype}.")
            if tensor.dim() not in (2, 3) or tensor.shape[-1] != size:
                raise InvalidArgument(name, f"must have shape [*, *, {size}] or [*, {size}], got {list(tensor.shape)}.")
        if query.dim() != key.dim() or key.shape[:-1] != value.shape[:-1]:
            raise InvalidArgument(
                "key",
                "and value must have the batch and the steps in common, and the dimensions of the query "
                f"{list(query.shape)}, got {list(key.shape)} and {list(value.shape)}.",
            )
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise InvalidArgument(
                "key", f"must have the batch size of the query, {query.shape[batch]}, got {key.shape[batch]}."
            )

    def _merge(
        self, padding: Tensor | None, attention: Tensor | None, q: Tensor, num_keys: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return one mask for the scores [N, heads, L, S], and which rows it masks fully, [N or 1, heads or 1, L, 1].

        The mask is boolean (True: attend) or a number that is added. Rows that are masked fully attend to all keys
        instead, so that neither softmax nor a kernel divides 0 by 0; the caller sets their output to 0.
        """
        batch, heads, num_queries, _ = q.shape
        masks = []
        if padding is not None:
            _check_mask("key_padding_mask", padding, [(batch, num_keys)])
            masks.append(padding[:, None, None, :])
        if attention is not None:
            shape = (num_queries, num_keys)
            _check_mask("attn_mask", attention, [shape, (batch * heads, *shape)])
            masks.append(
                attention[None, None] if attention.dim() == 2 else torch.unflatten(attention, 0, (batch, heads))
            )
        if not masks:
            return None, None
        if all(mask.dtype is torch.bool for mask in masks):
            ignored = masks[0] if len(masks) == 1 else masks[0] | masks[1]
            is_dead = ignored.all(-1, keepdim=True)
            return ~ignored | is_dead, is_dead
        added = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
            if mask.dtype is torch.bool
            else mask.to(q.dtype)
            for mask in masks
        ]
        total = added[0] if len(added) == 1 else added[0] + added[1]
        is_dead = total.isneginf().all(-1, keepdim=True)
        return total.masked_fill(is_dead, 0), is_dead


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """Raise TypeError or ValueError unless a mask is boolean or floating point and has one of the shapes."""
    if not isinstance(mask, Tensor) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidArgumentType(name, f"must be a boolean or floating point tensor, got {got}.")
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidArgument(name, f"must have shape {allowed}, got {list(mask.shape)}.")
