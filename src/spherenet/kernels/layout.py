"""Views of a batch of maps in which a pass needs to know only where the channels are.

A dense tensor [N, C, *spatial] is either *rows*, channels last in memory, seen as [pixels, channels] (channels at −1),
or *planes*, seen as [N, channels, pixels] (channels at −2). With groups, a dimension for them stands before the
channels. A map with one number a pixel and group is seen with channels of size 1, so that it broadcasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """How tensors [N, C, *spatial] of one shape lie in memory. `channels_at` is −1 for rows, −2 for planes."""

    channels_at: int
    groups: int

    @staticmethod
    def of(x: Tensor, groups: int = 1) -> tuple[Tensor, Layout]:
        """Return x, made dense if it is not, and its layout."""
        if x.movedim(1, -1).is_contiguous():
            return x, Layout(-1, groups)
        return x.contiguous(), Layout(-2, groups)

    def dense(self, x: Tensor) -> Tensor:
        """Return x with its memory in this layout; copied only if it lies otherwise."""
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if self.channels_at == -1 else x.contiguous()

    def view(self, x: Tensor) -> Tensor:
        """See x [N, C, *spatial] of this layout as [pixels, (groups,) C] or [N, (groups,) C, pixels]."""
        if self.channels_at == -1:
            shape = [x.numel() // max(x.shape[1], 1), x.shape[1]]
            seen = x.movedim(1, -1).reshape(shape)
        else:
            seen = x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))
        return seen if self.groups == 1 else seen.unflatten(1, (self.groups, -1))  # type: ignore[no-untyped-call]

    def images(self, x: Tensor) -> tuple[Tensor, int]:
        """See x as [N, pixels, (groups,) C] or [N, (groups,) C, pixels]; also return where the pixels are."""
        seen = self.view(x)
        return (seen, -1) if self.channels_at == -2 else (seen.reshape(x.shape[0], -1, *seen.shape[1:]), 1)

    def pixels(self, per_group: Tensor) -> Tensor:
        """See a map [N, groups, *spatial] so that it broadcasts against `view`: channels of size 1."""
        if self.channels_at == -1:
            flat = per_group.movedim(1, -1).reshape(-1, self.groups)
            return flat if self.groups == 1 else flat.unsqueeze(-1)
        flat = per_group.reshape(per_group.shape[0], self.groups, -1)
        return flat if self.groups == 1 else flat.unsqueeze(2)

    def map(self, seen: Tensor, size: tuple[int, ...]) -> Tensor:
        """Undo `pixels`: a tensor with one number a pixel and group, as a map of `size` [N, groups, *spatial]."""
        if self.channels_at == -1:
            return seen.reshape(size[0], *size[2:], size[1]).movedim(-1, 1)
        return seen.reshape(size)

    def filters(self, per_filter: Tensor) -> Tensor:
        """See a vector with one number a channel so that it broadcasts against `view`."""
        seen = per_filter if self.groups == 1 else per_filter.reshape(self.groups, -1)
        return seen if self.channels_at == -1 else seen.unsqueeze(-1)
