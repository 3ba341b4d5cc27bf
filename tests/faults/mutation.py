"""Mutation of files and values, and a check that readers return a value or raise an error of one sentence."""

import copy
import time

TIMEOUT = 20
"""Seconds after which a reader counts as hanging. It takes milliseconds, unless the machine is busy."""

UNEXPECTED = [
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**30, 10**400, -0.5, 1.5, 1e308, float("inf"), float("nan")),
    *("", "x", "none", "\0", "\ud800", "../../x", "x" * 1_000),
    *([], [[]], {}, [1, 2], ["a"], {"a": 1}, {"": None}, [None] * 50),
]
"""Values that replace values of a JSON or YAML file."""


def mutated_bytes(data, chance):
    """Return bytes of which some are flipped, cut, repeated, moved or overwritten."""
    mutated = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at, length = chance.randrange(len(mutated) + 1), chance.choice((1, 2, 8, 64, 512))
        operation = chance.randrange(7)
        if operation == 0 and mutated:
            mutated[at % len(mutated)] ^= 1 << chance.randrange(8)
        elif operation == 1:
            del mutated[at:]
        elif operation == 2:
            del mutated[at : at + length]
        elif operation == 3:
            mutated[at:at] = chance.randbytes(length)
        elif operation == 4:
            mutated[at : at + length] = chance.choice((b"\0", b"\xff", b"\x7f", b"9", b"[", b'"', b"\n")) * length
        elif operation == 5:
            mutated[at:at] = mutated[at : at + length]
        else:
            mutated[at : at + length] = chance.randbytes(length)
    return bytes(mutated)


def mutated_value(value, chance):
    """Return a copy of nested lists and dicts in which some values are unexpected, missing, added or renamed."""
    mutated = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = list(_places(mutated))
        container, key = chance.choice(places)
        operation = chance.randrange(6)
        if operation == 0:
            del container[key]
        elif operation == 1 and isinstance(container, dict):
            container[chance.choice(["", "x", "step", "../x", "\0", "\ud800", "__class__"])] = unexpected(chance)
        elif operation == 2 and isinstance(container, list):
            container.insert(key, unexpected(chance))
        else:
            container[key] = unexpected(chance)
        if not mutated:
            break
    return mutated


def unexpected(chance):
    """Return a copy of an unexpected value."""
    return copy.deepcopy(chance.choice(UNEXPECTED))


def _places(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in list(pairs):
        yield value, key
        if isinstance(entry, (dict, list)) and entry:
            yield from _places(entry)


def call_reader(read, argument, allowed):
    """Call a reader and return (value, None), or (None, message) if it raises an allowed error of one sentence."""
    start = time.process_time()  # of this process: other processes on the machine do not count
    try:
        value, message = read(argument), None
    except allowed as error:
        value, message = None, str(error)
    assert time.process_time() - start < TIMEOUT, argument
    if message is not None:
        assert message
        assert len(message.splitlines()) == 1, message
        assert len(message) < 3_000, message[:300]
    return value, message
