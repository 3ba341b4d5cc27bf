"""SphereGPT: a causal normalized transformer over tokens, such as characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from spherenet._util.validation import require_integer
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.kernels.dispatch import can_read_values
from spherenet.models.transformer import Architecture, EmbeddingMatrix, Transformer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SphereGPT", "sphere_gpt_tiny"]


class SphereGPT(Transformer):
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
        TypeError: If an argument is unknown or has the wrong type; in forward for tokens that are not integers.
        ValueError: If an argument is not allowed; in forward for wrong shapes and, on a
            CPU, tokens beyond the vocabulary.

    Shape:
        tokens [N, steps] → logits [N, steps, num_tokens].

    Example:
        >>> model = sn.SphereGPT(num_tokens=128)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        >>> handle = sn.keep_normalized(optimizer, model)
    """

    option_defaults = {"dim": 96, "depth": 4, "num_heads": 4, "mlp_dim": None, "sphere": True, "alpha": None}  # noqa: RUF012

    def __init__(
        self,
        num_tokens: int,
        context: int = 128,
        **architecture: Unpack[Architecture],
    ) -> None:
        num_tokens = require_integer("num_tokens", num_tokens, minimum=1)
        context = require_integer("context", context, minimum=1)
        super().__init__(num_tokens, context, architecture, causal=True)
        self.num_tokens = num_tokens
        self.tokens = EmbeddingMatrix(self.dim, num_tokens, 1, self.sphere)

    def hidden_states(self, inputs: Tensor) -> list[Tensor]:
        """Return the hidden states [N, steps, dim] before the first block and after each block."""
        if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.int32, torch.int64):
            got = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
            raise InvalidArgumentType("tokens", f"must be a tensor of integers, got {got}.")
        if inputs.dim() != 2 or inputs.shape[1] > self.num_steps:
            raise InvalidArgument("tokens", f"must have shape [N, at most {self.num_steps}], got {list(inputs.shape)}.")
        if can_read_values(inputs) and inputs.numel():
            low, high = inputs.aminmax()
            if low < 0 or high >= self.num_tokens:
                wrong = int(low if low < 0 else high)
                raise InvalidArgument("tokens", f"must be from 0 to {self.num_tokens - 1}, got {wrong}.")
        return self.through_blocks(F.embedding(inputs, self.tokens.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token after each step."""
        return self.logits(self.hidden_states(tokens)[-1])


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
    return SphereGPT(num_tokens, sphere=sphere)
