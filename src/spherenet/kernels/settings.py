"""The user's choices: the implementation of layers, heads and losses, and the algorithm of 3×3 convolutions on CPUs."""

from __future__ import annotations

from contextlib import ContextDecorator
from contextvars import ContextVar, Token

from spherenet._util.validation import require_one_of
from spherenet.errors import InvalidArgument
from spherenet.kernels import library
from spherenet.kernels.backends import has_triton

__all__ = ["BACKEND", "CONVOLUTION", "Choice", "Setting", "backend", "convolution", "set_backend", "set_convolution"]


class Setting:
    """A name that the user chooses for all threads, or for a block of code in one thread; "auto" by default.

    Whoever reads it on the way of a layer evaluates `here.get() or everywhere`, which is `current()` without a call.
    """

    def __init__(self, argument: str, names: tuple[str, ...]) -> None:
        self.argument, self.names, self.everywhere = argument, names, "auto"
        self.here: ContextVar[str | None] = ContextVar(f"spherenet_{argument}", default=None)

    def current(self) -> str:
        """Return the name in use."""
        return self.here.get() or self.everywhere

    def require(self, name: str) -> str:
        """Return the name if it can be chosen; otherwise raise ValueError."""
        require_one_of(self.argument, name, self.names)
        if name == "native" and not library.available():
            raise InvalidArgument("backend", "must not be 'native': the native kernels are not available.")
        if name == "triton" and not has_triton():
            raise InvalidArgument("backend", "must not be 'triton': Triton cannot be imported.")
        return name


class Choice(ContextDecorator):
    """A name of a setting inside `with` blocks of a thread, or inside calls of a decorated function."""

    def __init__(self, setting: Setting, name: str) -> None:
        self.setting, self.name = setting, setting.require(name)
        self._tokens: list[Token[str | None]] = []

    def _recreate_cm(self) -> Choice:
        return Choice(self.setting, self.name)  # each call of a decorated function has its own, also in other threads

    def __enter__(self) -> None:
        self._tokens.append(self.setting.here.set(self.name))

    def __exit__(self, *error: object) -> None:
        self.setting.here.reset(self._tokens.pop())


BACKEND = Setting("backend", ("auto", "native", "triton", "compiled", "reference"))
CONVOLUTION = Setting("convolution", ("auto", "direct", "winograd"))


def set_backend(name: str) -> None:
    """Choose the implementation of layers, heads and losses from now on, in all threads.

    Args:
        name: "auto" (the default), "reference" for the plain differentiable formulas, or one implementation: "native",
            "triton" or "compiled". Calls that a named implementation does not support (tracing, torch.func,
            forward-mode derivatives, custom g) use the plain formula.

    Raises:
        ValueError: If the name is unknown or the implementation is not available.
    """
    BACKEND.everywhere = BACKEND.require(name)


def backend(name: str) -> Choice:
    """Choose the implementation inside a `with` block, in this thread: `with sn.backend("reference"): …`.

    Args:
        name: As in `set_backend`.

    Raises:
        ValueError: As in `set_backend`.
    """
    return Choice(BACKEND, name)


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
    CONVOLUTION.everywhere = CONVOLUTION.require(name)


def convolution(name: str) -> Choice:
    """Choose the algorithm of 3×3 convolutions on CPUs inside a `with` block, in this thread.

        with sn.convolution("direct"):
            scores = model(images)

    A backward pass uses the algorithm of its forward pass. `set_convolution` chooses from now on, in all threads.

    Args:
        name: As in `set_convolution`.

    Raises:
        ValueError: If the name is unknown.
    """
    return Choice(CONVOLUTION, name)
