"""Entry point of the command line: select the verb, run it, turn errors into exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from spherenet import __version__
from spherenet._util.text import first_line
from spherenet.cli.options import suggestion
from spherenet.cli.output import discard_closed_streams, open_closed_streams, print_message, use_available_characters
from spherenet.cli.verbs import ELSEWHERE, all_verbs, find_verb
from spherenet.errors import InvalidArgument, InvalidArgumentType, SphereNetError, TrainingError

__all__ = ["main", "verb_parser"]

FAILED, WRONG_INPUT, INTERNAL, INTERRUPTED, CLOSED_PIPE = 1, 2, 70, 130, 141
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def _help() -> str:
    verbs = all_verbs()
    width = max(map(len, verbs))
    lines = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in verbs.items())
    return (
        "usage: spherenet VERB [OPTIONS]\n\n"
        "Train, evaluate and study hyperspherical networks (SphereNets).\n\n"
        f"verbs:\n{lines}\n\n"
        "options:\n"
        "  --help     show this text, or after a verb its options and examples\n"
        "  --version  show the version\n"
        "  --debug    after a verb: show the traceback of an error\n\n"
        "examples:\n"
        "  spherenet train --iterations 200 --output runs/first   # a small SphereNet on embedded digits\n"
        "  spherenet evaluate runs/first\n"
        "  spherenet train --help"
    )


def verb_parser(verb: str) -> Any:
    """Return the parser of a verb."""
    return all_verbs()[verb].create_parser()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: What follows `spherenet` on the command line; `sys.argv` by default.

    Returns:
        0 on success, 1 for a failed run, 2 for wrong input, 70 for an internal error, 128 + number for a signal.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    use_available_characters()
    if not words or words[0] in ("-h", "--help", "--version"):
        try:
            print(f"spherenet {__version__}" if words[:1] == ["--version"] else _help(), flush=True)
        except BrokenPipeError:
            discard_closed_streams()
            return CLOSED_PIPE
        except OSError as error:
            print_message(f"spherenet: {_describe_error(error)[0]}")
            return WRONG_INPUT
        return 0
    name, *rest = words
    verb = find_verb(name)
    if verb is None:
        if name in ELSEWHERE:
            print_message(f"spherenet {name}: this verb is part of {ELSEWHERE[name]}")
        else:
            hint = suggestion(name, all_verbs()) or ";"
            print_message(f"spherenet: unknown verb {name!r}{hint} see spherenet --help.")
        return WRONG_INPUT
    open_closed_streams()
    debug = "--debug" in rest
    parser = None
    interrupts: list[int] = []
    try:
        with _interrupts_recorded(interrupts):
            parser = verb.create_parser()
            options = parser.parse_args([word for word in rest if word != "--debug"])
            code: int | None = verb.load()(options)
    except BrokenPipeError:
        discard_closed_streams()
        return CLOSED_PIPE
    except SystemExit as request:  # of the parser, after help or wrong input
        if discard_closed_streams() and not request.code:
            return CLOSED_PIPE
        raise
    except KeyboardInterrupt:
        print_message("spherenet: interrupted.")
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        if interrupts:  # an interrupted import of torch fails with other errors later
            print_message("spherenet: interrupted.")
            return INTERRUPTED
        sentence, code = _describe_error(error, str if parser is None else parser.option_of)
        print_message(f"spherenet {name}: {sentence}")
        return code
    return CLOSED_PIPE if discard_closed_streams() and not code and name != "train" else code or 0


@contextmanager
def _interrupts_recorded(interrupts: list[int]) -> Iterator[None]:
    """Add every SIGINT that raises KeyboardInterrupt in the block to a list."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not in_main_thread:
        yield  # the program that calls `main` handles it
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _describe_error(error: Exception, option_of: Callable[[str], str] = str) -> tuple[str, int]:
    """Return the message and the exit code for an exception: its class decides, and names an argument by its option."""
    if isinstance(error, (InvalidArgument, InvalidArgumentType)):
        return f"{option_of(error.argument)} {error.problem}", WRONG_INPUT
    if isinstance(error, SphereNetError):
        return str(error), FAILED if isinstance(error, TrainingError) else WRONG_INPUT
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY)
    ):
        detail = first_line(error)
        return f"not enough memory ({detail}); use smaller batches, images or networks.", FAILED
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, bytes)):
        return f"{os.fsdecode(error.filename)}: {error.strerror}.", WRONG_INPUT
    if isinstance(error, OSError):  # of the output, which has no name, or of a library without a number
        return f"{error.strerror}." if error.strerror else str(error), WRONG_INPUT
    detail = first_line(error)
    return f"internal error ({type(error).__name__}: {detail}); please report it with the output of --debug.", INTERNAL
