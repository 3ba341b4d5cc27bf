"""Files as no writer makes them, and readers that must answer with the data or with one sentence."""

import copy
import time

LONGEST_ANSWER = 20
"""Seconds after which a reader counts as hanging; it takes milliseconds, unless the machine is busy."""

ODD = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 10**400, -0.5, 1.5, 1e308, float("inf"), float("nan")),
    *("", "x", "none", "\0", "\ud800", "../../x", "x" * 1_000),
    *([], [[]], {}, [1, 2], ["a"], {"a": 1}, {"": None}, [None] * 50),
]
"""What may stand in the place of any value of a JSON or YAML file."""


def mutated_bytes(data, chance):
    """Return the bytes with some flipped, cut, repeated, moved or overwritten."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, length = chance.randrange(len(changed) + 1), chance.choice((1, 2, 8, 64, 512))
        kind = chance.randrange(7)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = chance.randbytes(length)
        elif kind == 4:
            changed[at : at + length] = chance.choice((b"\0", b"\xff", b"\x7f", b"9", b"[", b'"', b"\n")) * length
        elif kind == 5:
            changed[at:at] = changed[at : at + length]
        else:
            changed[at : at + length] = chance.randbytes(length)
    return bytes(changed)


def mutated_value(value, chance):
    """Return a copy of nested lists and dicts in which some values are odd, missing, added or renamed."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = list(_places(changed))
        container, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[chance.choice(["", "x", "step", "../x", "\0", "\ud800", "__class__"])] = odd(chance)
        elif kind == 2 and isinstance(container, list):
            container.insert(key, odd(chance))
        else:
            container[key] = odd(chance)
        if not changed:
            break
    return changed


def odd(chance):
    """One of the odd values, for whoever asks to keep and change."""
    return copy.deepcopy(chance.choice(ODD))


def _places(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(pairs):
        yield value, key
        if isinstance(part, (dict, list)) and part:
            yield from _places(part)


def answer(read, given, allowed):
    """Call a reader: what it read and None, or None and the sentence of an allowed error; all else is a failure."""
    began = time.monotonic()
    try:
        found, sentence = read(given), None
    except allowed as error:
        found, sentence = None, str(error)
    assert time.monotonic() - began < LONGEST_ANSWER, given
    if sentence is not None:
        assert sentence
        assert len(sentence.splitlines()) == 1, sentence
        assert len(sentence) < 3_000, sentence[:300]
    return found, sentence
