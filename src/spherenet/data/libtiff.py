"""Silence libtiff, with which Pillow decodes TIFF: it prints its own messages to stderr besides raising an error."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Lock
from typing import Any

from PIL import _imaging

__all__ = ["without_messages"]

_SETTERS = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")
_handlers = Lock()  # they are global variables of the library


@cache
def _setters() -> tuple[Any, ...]:
    """Return the functions that replace libtiff's handlers of messages, none if Pillow does not export them."""
    try:
        # The symbols of a library include those of the libraries that it is linked with.
        library = ctypes.CDLL(_imaging.__file__)
        setters = [getattr(library, name) for name in _SETTERS]
    except (OSError, AttributeError, TypeError):  # Windows, where libtiff is a part of Pillow; or built without it
        return ()
    for setter in setters:
        setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
    return tuple(setters)


@contextmanager
def without_messages() -> Iterator[None]:
    """Run a block in which libtiff prints nothing. Other users of libtiff in the process are as before afterwards."""
    with _handlers, ExitStack() as stack:
        for setter in _setters():
            stack.callback(setter, setter(None))
        yield
