"""The user's choice of the algorithm of 3×3 convolutions on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from spherenet._util.validation import require_one_of

__all__ = ["CONVOLUTIONS", "convolution", "current_algorithm", "current_convolution", "set_convolution"]

CONVOLUTIONS = ("auto", "direct", "winograd")
_global_convolution = "auto"
_local_convolution: ContextVar[str | None] = ContextVar("spherenet_convolution", default=None)


def set_convolution(name: str) -> None:
    """Choose the algorithm of 3×3 convolutions on CPUs from now on, in all threads.

    Args:
        name: "auto" (the default) takes Winograd's algorithm if it is faster: float32, stride 1, dilation 1, one
            group, at least 8 channels and filters. Its errors are at most 5·10⁻⁶ of the largest output, 10⁻⁵ of the
            largest gradient. "direct" is torch's convolution: 5·10⁻⁷. "winograd" takes Winograd's algorithm wherever
            it can.

    Raises:
        ValueError: If the name is unknown.
    """
    global _global_convolution
    _global_convolution = require_one_of("convolution", name, CONVOLUTIONS)


@contextmanager
def convolution(name: str) -> Iterator[None]:
    """Choose the algorithm of 3×3 convolutions on CPUs inside a `with` block, in this thread.

        with sn.convolution("direct"):
            scores = model(images)

    A backward pass uses the algorithm of its forward pass. `set_convolution` chooses from now on, in all threads.

    Args:
        name: As in `set_convolution`.

    Raises:
        ValueError: If the name is unknown.
    """
    token = _local_convolution.set(require_one_of("convolution", name, CONVOLUTIONS))
    try:
        yield
    finally:
        _local_convolution.reset(token)


def current_convolution() -> str:
    """Return the choice in use, "auto" by default."""
    return _local_convolution.get() or _global_convolution


def current_algorithm() -> str:
    """Return the algorithm of 3×3 convolutions for display: "direct", or "winograd" if the engine may be used."""
    return "direct" if current_convolution() == "direct" else "winograd"
