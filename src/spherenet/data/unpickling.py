"""Read the pickled batches of CIFAR's `-py` layout without running them.

A pickle is a program. This is a reader of the few instructions that a dict of arrays, bytes, text, lists and whole
numbers needs, as Python 2 and 3 write it in any protocol. It imports nothing: the five names that such pickles
mention are known by their spelling, and every other name is refused. Memory is bounded by the length of the file.
"""

from __future__ import annotations

import pickletools
from typing import Any

import numpy as np

from spherenet.errors import DataError

__all__ = ["Array", "read_pickled_dict"]

Array = np.ndarray[Any, np.dtype[Any]]

RECONSTRUCT, FROM_BUFFER, NDARRAY, DTYPE, ENCODE, BYTES = (
    "reconstruct",
    "from buffer",
    "ndarray",
    "dtype",
    "encode",
    "bytes",
)
KNOWN = {
    "numpy.core.multiarray _reconstruct": RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": RECONSTRUCT,
    "numpy.core.numeric _frombuffer": FROM_BUFFER,
    "numpy._core.numeric _frombuffer": FROM_BUFFER,
    "numpy ndarray": NDARRAY,
    "numpy dtype": DTYPE,
    "_codecs encode": ENCODE,
    "__builtin__ bytes": BYTES,
    "builtins bytes": BYTES,
}
VALUES = {  # instructions that push what stands behind them
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NOTHING_TO_DO = {"PROTO", "FRAME"}
ITEM_TYPES = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}


class _Name:
    """One of `KNOWN` on the stack."""

    def __init__(self, meaning: str) -> None:
        self.meaning = meaning


class _Building:
    """An array or a dtype between its creation and its BUILD instruction."""

    def __init__(self, value: Any) -> None:
        self.value = value


def read_pickled_dict(data: bytes, name: str, *, most_instructions: int) -> dict[str, Any]:
    """Return the dict that `data` describes, its keys as text and its arrays as numpy's, read-only.

    `name` is for the message: a pickle that is damaged, has another shape, more than `most_instructions`, or asks for
    anything but arrays, bytes, text, lists, dicts and whole numbers raises DataError.
    """
    try:
        result = _Reader(name, len(data)).run(data, most_instructions)
        if not isinstance(result, dict):
            raise ValueError("it does not hold a dict")
        return {_text(key): value.value if isinstance(value, _Building) else value for key, value in result.items()}
    except DataError:
        raise
    except Exception as error:  # a damaged pickle fails anywhere: stack, memo, text, shapes
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise DataError(f"{name!r} is not a pickled batch, or damaged: {ascii(reason)[1:-1][:200]}.") from None


class _Reader:
    def __init__(self, name: str, length: int) -> None:
        self.name = name
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.may_encode = 2 * length  # bytes: text that is encoded again and again would multiply

    def run(self, data: bytes, most_instructions: int) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > most_instructions:
                raise ValueError(f"it has more than {most_instructions} instructions")
            if opcode.name == "STOP":
                return self.stack.pop()
            self.step(opcode.name, argument)
        raise ValueError("it does not end")

    def step(self, code: str, argument: Any) -> None:
        stack = self.stack
        if code in VALUES:
            stack.append(argument)
        elif code in ("SHORT_BINSTRING", "BINSTRING", "STRING"):  # Python 2's bytes, which pickletools shows as text
            stack.append(argument.encode("latin-1"))
        elif code in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif code == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif code in CONSTANTS:
            stack.append(CONSTANTS[code])
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code in TUPLES:
            items = tuple(stack[-TUPLES[code] :])
            if len(items) < TUPLES[code]:
                raise ValueError("its stack runs empty")
            stack[-TUPLES[code] :] = [items]
        elif code == "MARK":
            self.marked.append(stack)
            self.stack = []
        elif code in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"):
            self.since_mark(code)
        elif code == "APPEND":
            item = stack.pop()
            _of_type(stack[-1], list).append(item)
        elif code == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _put(stack[-1], [key, value])
        elif code in ("GLOBAL", "INST", "STACK_GLOBAL"):
            if code == "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                argument = f"{_of_type(module, str)} {_of_type(attribute, str)}"
            stack.append(self.known(argument))
        elif code == "REDUCE":
            arguments = _of_type(stack.pop(), tuple)
            stack.append(self.called(_of_type(stack.pop(), _Name).meaning, arguments))
        elif code == "BUILD":
            state = _of_type(stack.pop(), tuple)
            _build(_of_type(stack[-1], _Building), state)
        elif code not in NOTHING_TO_DO:
            raise DataError(
                f"{self.name!r} holds the pickle instruction {code}, which no array, bytes, list or dict needs."
            )

    def since_mark(self, code: str) -> None:
        items, self.stack = self.stack, self.marked.pop()
        if code == "TUPLE":
            self.stack.append(tuple(items))
        elif code == "LIST":
            self.stack.append(items)
        elif code == "DICT":
            self.stack.append(_put({}, items))
        elif code == "APPENDS":
            _of_type(self.stack[-1], list).extend(items)
        else:
            _put(self.stack[-1], items)

    def known(self, name: str) -> _Name:
        if name not in KNOWN:
            shown = ascii(name.replace(" ", "."))[1:-1][:100]
            raise DataError(
                f"{self.name!r} asks for {shown}: only arrays, bytes, lists and dicts are read from a pickle."
            )
        return _Name(KNOWN[name])

    def called(self, meaning: str, arguments: tuple[Any, ...]) -> Any:
        if meaning == RECONSTRUCT:  # the empty array that BUILD fills
            return _Building(None)
        if meaning == DTYPE:
            return _Building(_item_type(arguments[0], "|"))
        if meaning == FROM_BUFFER:
            buffer, item_type, shape, order = arguments
            return _Building(_array(buffer, item_type, shape, _text(order) == "F"))
        if meaning == ENCODE:  # Python 3's bytes in protocols made for Python 2
            text, codec = arguments
            self.may_encode -= len(_of_type(text, str))
            if self.may_encode < 0 or _text(codec) not in ("latin1", "latin-1"):
                raise ValueError("it encodes text that is not its own")
            return text.encode("latin-1")
        if meaning == BYTES and arguments == ():
            return b""
        raise ValueError(f"it calls {meaning} as no array does")


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} in the place of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return value.decode("latin-1") if type(value) is bytes else str(_of_type(value, str))


def _put(target: Any, items: list[Any]) -> dict[Any, Any]:
    """Add keys and values; keys are plain, since the hash of nested tuples can take for ever."""
    made: dict[Any, Any] = _of_type(target, dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (bytes, str, int):
            raise ValueError("it has a dict whose keys are not text")
        made[key] = value
    return made


def _item_type(code: Any, byte_order: str) -> np.dtype[Any]:
    if _text(code) not in ITEM_TYPES or byte_order not in ("|", "<", ">", "="):
        raise ValueError("it has an array of something else than whole numbers")
    return np.dtype(byte_order.replace("|", "=") + _text(code))


def _build(target: _Building, state: tuple[Any, ...]) -> None:
    if isinstance(target.value, np.dtype):  # (version, byte order, then what only structured types have)
        target.value = _item_type(target.value.str[1:], _text(state[1]))
    elif target.value is None:  # an array: (version, shape, dtype, is in Fortran's order, its bytes)
        _, shape, item_type, fortran, raw = state
        target.value = _array(raw, item_type, shape, fortran is True or fortran == 1)
    else:
        raise ValueError("it builds an array twice")


def _array(raw: Any, item_type: Any, shape: Any, fortran: bool) -> Array:
    if type(raw) not in (bytes, bytearray):
        raise ValueError("it has an array without bytes")
    item = _of_type(item_type, _Building).value
    flat = np.frombuffer(raw, dtype=item if isinstance(item, np.dtype) else _of_type(item, np.dtype))
    if any(type(length) is not int or length < 0 for length in _of_type(shape, tuple)):
        raise ValueError("it has an array of a strange shape")
    return flat.reshape(shape, order="F" if fortran else "C")
