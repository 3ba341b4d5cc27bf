"""What a conversion leaves on the modules it met: a reason to read, and attribute values to give back.

Both live on the module itself, not in a list at the root: they survive deep copies, pickling, and a converted network
that becomes a part of another. They are plain attributes, so no state_dict knows them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["give_back", "put_note", "read_note", "set_aside"]

_NOTE = "_spherenet_note"
_SET_ASIDE = "_spherenet_set_aside"


def put_note(module: nn.Module, text: str | None) -> None:
    """Say on a module what was done to it, or why nothing was; None takes the note away."""
    if text is None:
        module.__dict__.pop(_NOTE, None)
    else:
        module.__dict__[_NOTE] = text


def read_note(module: nn.Module) -> str | None:
    """Return the note of a module, None where no conversion met it."""
    note: str | None = module.__dict__.get(_NOTE)
    return note


def set_aside(module: nn.Module, attribute: str, value: Any) -> None:
    """Give an attribute a new value; the old one waits for `give_back`."""
    module.__dict__.setdefault(_SET_ASIDE, {})[attribute] = getattr(module, attribute)
    setattr(module, attribute, value)


def give_back(module: nn.Module) -> None:
    """Restore every attribute that was set aside; the note about it goes too."""
    waiting: dict[str, Any] = module.__dict__.pop(_SET_ASIDE, {})
    for attribute, value in waiting.items():
        setattr(module, attribute, value)
    if waiting:
        put_note(module, None)
