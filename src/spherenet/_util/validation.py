"""Checks of arguments; each error states the argument, what is allowed and the value."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from spherenet._util.text import first_line, short
from spherenet.errors import InvalidArgument, InvalidArgumentType

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "OPTION_DEFAULTS",
    "NotScriptable",
    "OptionCheck",
    "reject_unknown_options",
    "require_device",
    "require_floating",
    "require_integer",
    "require_memory",
    "require_module",
    "require_number",
    "require_one_of",
    "require_positive",
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
        raise InvalidArgumentType(name, f"must be a module, got {shown(value)} of type {type(value).__name__}.")


def require_number(name: str, value: object) -> float:
    """Return a finite number as a float; raise TypeError or ValueError for bools, strings, NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgumentType(name, f"must be a number, got {shown(value)} of type {type(value).__name__}.")
    if not math.isfinite(value):
        raise InvalidArgument(name, f"must be finite, got {value!r}.")
    return float(value)


def require_positive(name: str, value: object) -> float:
    """Return a finite number > 0 as a float."""
    number = require_number(name, value)
    if number <= 0:
        raise InvalidArgument(name, f"must be greater than 0, got {value!r}.")
    return number


def require_integer(name: str, value: object, *, minimum: int) -> int:
    """Return an integer of at least `minimum`; NumPy's are accepted."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidArgumentType(name, f"must be an integer, got {shown(value)} of type {type(value).__name__}.")
    if value < minimum:
        raise InvalidArgument(name, f"must be at least {minimum}, got {value!r}.")
    return int(value)


def require_one_of(name: str, value: T, allowed: Iterable[T]) -> T:
    """Return a value that is allowed; otherwise raise ValueError with the allowed values and the most similar one."""
    choices = list(allowed)
    if value in choices:
        return value
    named = {str(choice): choice for choice in choices}
    similar = get_close_matches(str(value), named, n=1)
    hint = f" Did you mean {named[similar[0]]!r}?" if similar else ""
    raise InvalidArgument(name, f"must be one of {', '.join(map(repr, choices))}, got {shown(value)}.{hint}")


def require_device(name: str, device: str | torch.device) -> torch.device:
    """Return a device that can hold values; raise ValueError with torch's reason otherwise."""
    try:
        available = torch.device(device)
        torch.zeros(1, device=available).item()  # fails on the meta device, whose tensors have no values
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InvalidArgument(name, f"{str(device)!r} is not available here ({first_line(error)}).") from None
    return available


def require_memory(*tensors: Tensor) -> None:
    """Raise RuntimeError for tensors whose memory was freed; torch's elementwise operations would end the process."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            continue
        try:
            is_freed = tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0
        except NotImplementedError:  # sparse, or a transform of torch.func
            continue
        if is_freed:
            raise RuntimeError(
                f"tensor must have allocated memory, got shape {list(tensor.shape)} in a storage of 0 bytes."
            )


def require_floating(name: str, tensor: Tensor) -> None:
    """Raise TypeError unless the argument is a floating point tensor, RuntimeError if its memory was freed."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgumentType(name, f"must be a tensor, got {type(tensor).__name__}.")
    if not torch.is_floating_point(tensor):
        raise InvalidArgumentType(name, f"must be a floating point tensor, got {tensor.dtype}.")
    require_memory(tensor)


class NotScriptable:
    """Mixin of modules that can be traced and exported, but not scripted."""

    def __prepare_scriptable__(self) -> Any:
        """Raise an error with what works instead of `torch.jit.script`, whose own message is long and does not help."""
        raise InvalidArgumentType(
            "module",
            "must be traced or exported, not scripted: use torch.jit.trace or torch.export.export, "
            f"got torch.jit.script of {type(self).__name__}.",
        )


class OptionCheck(NotScriptable):
    """Mixin whose subclasses reject unknown constructor options by the name of the class that the caller used."""

    option_defaults: ClassVar[Mapping[str, object]] = {}
    """Defaults of options in `**keywords` that differ from `OPTION_DEFAULTS`."""

    subclasses_pass_options_on: ClassVar[bool] = False
    """Whether classes of users pass their `**options` on; otherwise these may have any names."""

    option_synonyms: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Options to suggest for names that do not look similar."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = _constructor_signature(cls)  # type: ignore[attr-defined]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Check the names of the options before the constructor runs."""
        if options:
            _reject_by_signature(cls.__name__, options, inspect.signature(cls), cls.option_synonyms)
        return super().__new__(cls)


OPTION_DEFAULTS: dict[object, Mapping[str, object]] = {}
"""Defaults of the options of typed dictionaries that functions take as `**keywords: Unpack[...]`."""


def _constructor_signature(cls: type[OptionCheck]) -> inspect.Signature:
    """Return all arguments of a constructor, those that it passes on to a base class included."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        # Lazy layers skip the constructors of torch's lazy layers.
        if "__init__" not in vars(base) or base.__module__.startswith("torch."):
            continue
        own = _expanded(vars(base)["__init__"])[1:]
        named = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        if parameters:  # a base class gets these by name
            named = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in named]
        parameters |= {parameter.name: parameter for parameter in named if parameter.name not in parameters}
        rest = next((parameter for parameter in own if parameter.kind is parameter.VAR_KEYWORD), None)
        if rest is None:
            break
        if not base.__module__.startswith("spherenet.") and not cls.subclasses_pass_options_on:
            parameters[rest.name] = rest
            break
    # A typed dictionary has no defaults; the constructor that gets its options may have them.
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("spherenet.")]
    constructors = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    defaults = {p.name: p.default for function in constructors for p in inspect.signature(function).parameters.values()}
    defaults |= {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    defaults |= cls.option_defaults
    return inspect.Signature(
        [p.replace(default=defaults.get(p.name, p.default)) for p in parameters.values()],
        __validate_parameters__=False,
    )


def _expanded(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function, with `**keywords: Unpack[SomeDict]` replaced by the keys of SomeDict."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        name = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        keywords = function.__globals__.get(name[1]) if name else None
        if parameter.kind is not parameter.VAR_KEYWORD or keywords is None:
            parameters.append(parameter)
            continue
        defaults = OPTION_DEFAULTS.get(keywords, {})
        hints = {key: getattr(hint, "__forward_arg__", hint) for key, hint in keywords.__annotations__.items()}
        options = [
            inspect.Parameter(key, parameter.KEYWORD_ONLY, default=defaults.get(key, parameter.empty), annotation=hint)
            for key, hint in {**{key: hints[key] for key in defaults if key in hints}, **hints}.items()
        ]
        names = [parameter.name for parameter in parameters]
        end = names.index("device") if "device" in names else len(names)  # torch's last two arguments
        parameters[end:end] = options
    return parameters


def suggest_options(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that the error for an unknown keyword argument suggests the most similar one."""
    signature = inspect.signature(function).replace(parameters=_expanded(function))

    names = frozenset(signature.parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in names:
                _reject_by_signature(function.__name__, kwargs, signature)
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _reject_by_signature(
    owner: str,
    options: Iterable[str],
    signature: inspect.Signature,
    synonyms: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Raise TypeError for an option that a signature does not list, unless it takes any options."""
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        reject_unknown_options(owner, options, signature.parameters, synonyms)


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
