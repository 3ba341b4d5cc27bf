"""Checks of arguments; each error states the argument, what is allowed and the value."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from spherenet._util.text import first_line, short

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "OptionCheck",
    "reject_unknown_options",
    "require_device",
    "require_floating",
    "require_integer",
    "require_module",
    "require_number",
    "require_one_of",
    "require_positive",
    "show_constructor",
    "shown",
    "suggest_options",
]

P = ParamSpec("P")
T = TypeVar("T")


def shown(value: object) -> str:
    """Return a value for an error message: in one short line, also if it is a tensor or an array."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return short(" ".join(repr(value).split()), 100)


def require_module(name: str, value: object) -> None:
    """Raise TypeError unless the argument is a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a module, got {shown(value)} of type {type(value).__name__}.")


def require_number(name: str, value: object) -> float:
    """Return a finite number as a float; raise TypeError or ValueError for bools, strings, NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {shown(value)} of type {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    return float(value)


def require_positive(name: str, value: object) -> float:
    """Return a finite number > 0 as a float."""
    number = require_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value!r}.")
    return number


def require_integer(name: str, value: object, *, minimum: int) -> int:
    """Return an integer of at least `minimum`; NumPy's are accepted."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {shown(value)} of type {type(value).__name__}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value!r}.")
    return int(value)


def require_one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """Return a value that is allowed; otherwise raise ValueError with the allowed values and the most similar one."""
    choices = list(allowed)
    if value in choices:
        return value
    similar = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}.{hint}")


def require_device(name: str, device: str | torch.device) -> torch.device:
    """Return a device that can hold values; raise ValueError with torch's reason otherwise."""
    try:
        available = torch.device(device)
        torch.zeros(1, device=available).item()  # fails on the meta device, whose tensors have no values
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(f"{name} {str(device)!r} is not available here ({first_line(error)}).") from None
    return available


def require_floating(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the argument is a floating point tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if not torch.is_floating_point(tensor):
        raise TypeError(f"{name} must be a floating point tensor, got {tensor.dtype}.")


class OptionCheck:
    """Mixin whose subclasses reject unknown constructor options by the name of the class that the caller used."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        show_constructor(cls)

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Check the names of the options before the constructor runs."""
        allowed = _constructor_options(cls) if options else None
        if allowed is not None:
            reject_unknown_options(cls.__name__, options, allowed)
        return super().__new__(cls)


def show_constructor(cls: type) -> None:
    """Let `help` show the arguments of `__init__`: Python 3.10 shows those of `__new__` if a class has one."""
    if sys.version_info < (3, 11):
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]


def _constructor_options(cls: type) -> list[str] | None:
    """Return the names of the constructor arguments, or None if a class outside of spherenet takes any options."""
    names: list[str] = []
    for base in cls.__mro__:
        # Lazy layers skip the constructors of torch's lazy layers.
        if "__init__" not in vars(base) or base.__module__.startswith("torch."):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
        if not base.__module__.startswith("spherenet."):
            return None
    return list(dict.fromkeys(names))


def suggest_options(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that the error for an unknown keyword argument suggests the most similar one."""
    allowed = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        reject_unknown_options(function.__name__, kwargs, allowed)
        return function(*args, **kwargs)

    return checked


def reject_unknown_options(
    owner: str, options: Iterable[str], allowed: Iterable[str], synonyms: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Raise TypeError for an option that is not allowed, with the most similar allowed name.

    Args:
        owner: Name of the class or function.
        options: Names of the options.
        allowed: Names that are allowed.
        synonyms: Allowed names to suggest for names that do not look similar.
    """
    choices = list(allowed)
    for name in options:
        if name not in choices:
            similar = [choice for choice in choices if choice in (synonyms or {}).get(name, ())]
            similar = similar or get_close_matches(name, choices, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else "."
            raise TypeError(f"{owner} has no option {name!r}{hint} Allowed: {', '.join(choices)}.")
