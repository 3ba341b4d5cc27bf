"""Commands with mutated files or options, which must end with a result or one sentence in bounded time."""

import json
import signal
import time
from contextlib import contextmanager

from command_line import spherenet
from faults.mutation import TIMEOUT, mutated_bytes, mutated_value
from faults.scale import PATIENCE
from spherenet.training.config import TrainConfig

CODES = {0, 1, 2}
"""Allowed exit codes; 70 is an internal error."""

TINY = TrainConfig(widths=[4, 4, 4], milestones=[3], iterations=1, batch_size=32)


class Timeout(BaseException):
    """Not an Exception, so that error handlers do not catch it."""


@contextmanager
def no_hang(arguments):
    """Fail after 20 s of computing, or 240 s in which other processes may have the processors."""

    def fail(*_):
        raise Timeout(arguments)

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE)
    start = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - start < TIMEOUT, arguments


def mutated_file(content, name, chance):
    """Return the content of a file with some bytes or, in JSON files, some values changed."""
    if chance.random() < 0.5:
        return mutated_bytes(content, chance)
    if name.endswith(".json"):
        return json.dumps(mutated_value(json.loads(content), chance)).encode() + b"\n"
    if name.endswith(".jsonl"):
        rows = mutated_value([json.loads(line) for line in content.splitlines()], chance)
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return mutated_bytes(content, chance)


def run_command(arguments, capsys):
    """Run a command and return its exit code, which must be allowed. An error is one sentence of bounded length."""
    with no_hang(arguments):
        code = spherenet(*arguments)
    errors = capsys.readouterr().err
    assert code in CODES, (code, errors, arguments)
    assert "Traceback" not in errors
    assert "internal error" not in errors, (arguments, errors)
    assert len(errors) < 20_000
    assert not any(ord(character) < 32 and character != "\n" for character in errors)
    return code


TEXTS = ("", " ", "x", "-1", "0", "1", "2", "0.5", "-0.0", "1e-400", "1e400", "nan", "-inf", "9" * 30, "1_0", "0x1",
         "²", "none", "null", "true", "[]", "{}", "[/x]", "\x1b[2J", "\u202e", "\udcff", "../x", "~no-such-user/x",
         "x.png", "x/y.png", "x" * 300, "cosine", "softmax", "train", "cpu", "meta", "cuda:99", "=", "--")  # fmt: skip
"""Unexpected values of options. Numbers that would only take long, such as a million rounds, are not among them."""

NOT_TRIED = {"--help", "-h", "--print-config", "--download", "--suite", "--ray", "--config"}
"""Options that print and exit, use the network, start a cluster or take minutes. Option files have a separate test."""


def options_of(parser):
    """Return the tried options of a parser, by their longest names, with the number of values."""
    actions = [action for action in parser._actions if action.option_strings]
    named = {max(action.option_strings, key=len): action for action in actions}
    return {
        name: (0, 0) if action.nargs == 0 else (1, 3) if action.nargs == "+" else (1, 1)
        for name, action in named.items()
        if name not in NOT_TRIED
    }


def mutated_options(options, chance):
    """Return one to three options with unexpected values."""
    words = []
    for name in chance.sample(sorted(options), chance.choice((1, 1, 2, 3))):
        least, most = options[name]
        words += [name, *(chance.choice(TEXTS) for _ in range(chance.randint(least, most)))]
    return words
