"""Read the pickled files of CIFAR's Python layout without importing or executing anything."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from spherenet.errors import DataError

__all__ = ["Array", "read_pickled_dict"]

Array = np.ndarray[Any, np.dtype[Any]]

MAX_TUPLES = 1000  # bounds the nesting of tuples, whose hash is computed recursively in C
STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
           "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}  # fmt: skip
NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "NONE", "NEWTRUE", "NEWFALSE"}
TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
# Opcodes whose result may be used again. Not tuples: the hash of tuples that share tuples takes exponential time.
SHAREABLE = STRINGS | {"EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "GLOBAL", "STACK_GLOBAL", "REDUCE"}
ALLOWED = SHAREABLE | NUMBERS | TUPLES | PUTS | GETS | {
    "PROTO", "FRAME", "STOP", "MARK", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"
}  # fmt: skip
ITEM_TYPES = {f"{sign}{size}" for sign in "iu" for size in (1, 2, 4, 8)}


def read_pickled_dict(data: bytes, name: str, *, max_opcodes: int) -> dict[str, Any]:
    """Return the pickled dict of arrays, strings, lists and integers, with text keys and read-only arrays.

    Nothing is imported or executed: `find_class` returns stand-ins for the functions of numpy that such pickles call
    and refuses every other name. The opcodes are checked first, so that memory and time are bounded by the file's size.

    Raises:
        DataError: The pickle is corrupt, has more than `max_opcodes` opcodes or holds anything else.
    """
    try:
        _check_opcodes(data, max_opcodes)
        batch = _BatchUnpickler(data).load()
        if not isinstance(batch, dict):
            raise ValueError("it does not hold a dict")
        if any(isinstance(value, _Function) for value in batch.values()):
            raise ValueError("it holds a function")
        return {_text(key): value.value if isinstance(value, _Stub) else value for key, value in batch.items()}
    except Exception as error:  # a corrupt pickle may fail in many ways
        reason = str(error) if isinstance(error, (ValueError, pickle.UnpicklingError)) else type(error).__name__
        raise DataError(f"{name!r} is not a pickled CIFAR file, or is corrupt: {ascii(reason)[1:-1][:200]}.") from None


def _check_opcodes(data: bytes, max_opcodes: int) -> None:
    """Raise ValueError for opcodes that CIFAR files do not need or that multiply memory or time."""
    creators: dict[int, str] = {}  # memo index to the opcode that made the object
    creator, tuples = "", 0
    opcode: pickletools.OpcodeInfo
    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        code = opcode.name
        if count > max_opcodes:
            raise ValueError(f"it has more than {max_opcodes} opcodes")
        if code not in ALLOWED:
            raise ValueError(f"the opcode {code} is not allowed")
        if code in PUTS:
            index = len(creators) if code == "MEMOIZE" else argument
            if index > max_opcodes:  # the unpickler would allocate a memo of this size
                raise ValueError(f"the memo index {index} is too large")
            creators[index] = creator
        elif code in GETS:
            creator = creators.get(argument, "missing")
            if creator not in SHAREABLE:
                raise ValueError("it refers to an object that may not be shared")
        elif code not in ("PROTO", "FRAME"):
            creator = code
            tuples += code in TUPLES
            if tuples > MAX_TUPLES:
                raise ValueError(f"it has more than {MAX_TUPLES} tuples")


class _Function:
    """Stand-in for a function or class named in a pickle: it can be called but not changed."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise ValueError("it changes a function")


class _Stub:
    """Stand-in for an array or a dtype, filled by the BUILD opcode."""

    __slots__ = ("value",)

    def __init__(self, value: Array | np.dtype[Any] | None) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        if isinstance(self.value, np.dtype):  # (version, byte order, fields of structured types)
            self.value = _item_type(self.value.str[1:], _text(state[1]))
        elif self.value is None:  # (version, shape, dtype, whether in Fortran order, bytes)
            _, shape, item_type, fortran, content = state
            self.value = _array(content, item_type, shape, "F" if fortran else "C").value
        else:
            raise ValueError("it fills an array twice")


class _BatchUnpickler(pickle.Unpickler):
    """Unpickler that knows the few names in a pickled array, by their spelling, and imports nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._encodable = 2 * len(data)

    def find_class(self, module: str, name: str) -> _Function:
        functions: dict[str, Callable[..., Any]] = {
            "numpy.core.multiarray._reconstruct": lambda *_: _Stub(None),
            "numpy._core.multiarray._reconstruct": lambda *_: _Stub(None),
            "numpy.core.numeric._frombuffer": _array,
            "numpy._core.numeric._frombuffer": _array,
            "numpy.ndarray": _refuse_call,
            "numpy.dtype": lambda code, *_: _Stub(_item_type(code, "=")),
            "_codecs.encode": self._encode,
            "__builtin__.bytes": lambda: b"",
            "builtins.bytes": lambda: b"",
        }
        if "." in name or f"{module}.{name}" not in functions:
            raise ValueError(f"it uses {module}.{name}, but only arrays, strings, lists and dicts are allowed")
        return _Function(functions[f"{module}.{name}"])

    def _encode(self, text: str, codec: object) -> bytes:
        """Encode the bytes of Python 3 in a protocol for Python 2; bounded, as the same text may be encoded again."""
        self._encodable -= len(text)
        if self._encodable < 0 or _text(codec) not in ("latin1", "latin-1"):
            raise ValueError("it encodes text that is too long or not latin-1")
        return text.encode("latin-1")


def _refuse_call(*arguments: object) -> None:
    raise ValueError("it calls ndarray")


def _text(value: object) -> str:
    if isinstance(value, (bytes, str)):
        return value.decode("latin-1") if isinstance(value, bytes) else value
    raise ValueError(f"it has {type(value).__name__} in place of text")


def _item_type(code: object, byte_order: str) -> np.dtype[Any]:
    if _text(code) not in ITEM_TYPES or byte_order not in ("|", "<", ">", "="):
        raise ValueError("it has an array of a type other than integers")
    return np.dtype(byte_order.replace("|", "=") + _text(code))


def _array(content: Any, item_type: Any, shape: Any, order: Any) -> _Stub:
    if not (isinstance(content, (bytes, bytearray)) and isinstance(item_type, _Stub) and isinstance(shape, tuple)):
        raise ValueError("it has an array without bytes, type or shape")
    if not isinstance(item_type.value, np.dtype) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError("it has an array of a wrong type or shape")
    flat = np.frombuffer(content, dtype=item_type.value)
    return _Stub(flat.reshape(shape, order="F" if _text(order) == "F" else "C"))
