"""Positive parameters of functions: name, start and range, stated once, and how a learned one stays positive."""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, log

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spherenet._util.validation import require_integer, require_memory, require_positive
from spherenet.errors import InvalidArgument

__all__ = ["PositiveParameter"]


@dataclass(frozen=True)
class PositiveParameter:
    """A positive parameter, fixed or learned. A learned value is smallest + softplus(raw).

    Args:
        name: Name of the argument.
        start: Default, or default initial value of a learned one.
        smallest: Lower bound. A learned value starts above it.
        reason: What happens below the bound, for error messages.
    """

    name: str
    start: float
    smallest: float
    reason: str = ""

    def require(self, value: object) -> float:
        """Return a fixed value, or raise an error."""
        number = require_positive(self.name, value)
        if number < self.smallest:
            why = f": {self.reason}" if self.reason else ""
            raise InvalidArgument(self.name, f"must be at least {self.smallest:g}, got {value!r}{why}.")
        return number

    def require_initial(self, value: object) -> float:
        """Return the initial value of a learned parameter, or raise an error."""
        number = require_positive(self.name, value)
        if number <= self.smallest:
            raise InvalidArgument(self.name, f"must be greater than {self.smallest:g} if it is learned, got {value!r}.")
        return number

    def create(
        self, count: int | None, initial: float, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Parameter:
        """Return the raw parameter of `count` learned values [count], or of a single one [] if it is None."""
        shape = () if count is None else (require_integer("num_filters", count, minimum=0),)
        raw = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset(raw, initial)
        return raw

    def reset(self, raw: Tensor, initial: float) -> None:
        """Set every learned value to its initial value."""
        excess = initial - self.smallest
        # The inverse of softplus in a form that neither overflows nor cancels.
        nn.init.constant_(raw, excess + log(-expm1(-excess)))

    def value(self, raw: Tensor) -> Tensor:
        """Return the learned values in float32 or float64."""
        require_memory(raw)
        raw = raw.float() if raw.dtype in (torch.bfloat16, torch.float16) else raw
        return self.smallest + F.softplus(raw)
