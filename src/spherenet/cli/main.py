"""Find the verb, run it, and turn what goes wrong into one sentence and an exit code."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from spherenet import __version__
from spherenet.cli.options import suggestion
from spherenet.cli.output import drop_closed, say
from spherenet.errors import SphereNetError, TrainingError

__all__ = ["VERBS", "main"]

VERBS = {
    "train": "train a SphereNet or its CNN twin",
    "evaluate": "accuracy, per-class table and confusion matrix of a run",
    "predict": "classes of pictures",
    "export": "a run as ONNX, torch program, TorchScript or model folder",
    "reproduce": "the paper's tables and figures, beside one's own numbers",
    "tune": "operator, k, loss and s by cross-validation",
    "report": "runs side by side, as a table and a page with curves",
    "data": "data sets: what is there, download, check",
    "theory": "numerical labs: conditioning, phase, operators, features, colour",
    "doctor": "what is whole in a run and what is not",
    "bench": "time and memory of a SphereNet beside its CNN twin",
}
"""Each verb is the module of its name in this folder, with `parser()` and `run(arguments)`, which may return a code."""

FAILED, WRONG_INPUT, INTERNAL, INTERRUPTED, CLOSED = 1, 2, 70, 130, 141


def _help() -> str:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items())
    return (
        "usage: spherenet VERB [OPTIONS]\n\nDeep hyperspherical learning from the command line.\n\n"
        f"verbs:\n{lines}\n\nspherenet VERB --help shows the options of a verb, with examples; "
        "with --debug, an error shows where it was raised."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 only on success."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0
    if given[0] == "--version":
        print(f"spherenet {__version__}")
        return 0
    verb, *rest = given
    if verb not in VERBS:
        print(f"spherenet: unknown verb {verb!r}{suggestion(verb, VERBS)}; see spherenet --help.", file=sys.stderr)
        return WRONG_INPUT
    debug = "--debug" in rest
    module = importlib.import_module(f"spherenet.cli.{verb}")
    try:
        code: int | None = module.run(module.parser().parse_args([word for word in rest if word != "--debug"]))
    except BrokenPipeError:
        drop_closed()
        return CLOSED
    except KeyboardInterrupt:
        say("spherenet: interrupted.")
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        sentence, code = _told(error)
        say(f"spherenet {verb}: {sentence}")
        return code
    return CLOSED if drop_closed() and not code and verb != "train" else code or 0


def _told(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code for what went wrong."""
    if isinstance(error, SphereNetError):
        return str(error), FAILED if isinstance(error, TrainingError) else WRONG_INPUT
    if _is_out_of_memory(error):
        first = str(error).splitlines()[0].rstrip(".")[:200] if str(error) else "no more to be had"
        return f"there is not enough memory ({first}): smaller batches, images or networks take less.", FAILED
    # What the library raises for bad input is one sentence already; what Python or torch raise in it is our mistake.
    if isinstance(error, OSError) or (isinstance(error, (ValueError, TypeError)) and _was_raised_on_purpose(error)):
        return str(error), WRONG_INPUT
    gist = (str(error).splitlines() or [""])[0][:200].rstrip(".")
    return f"internal error ({type(error).__name__}: {gist}); please report it with what --debug shows.", INTERNAL


def _is_out_of_memory(error: Exception) -> bool:
    words = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def _was_raised_on_purpose(error: Exception) -> bool:
    """Whether a raise statement of this package raised an error, and not Python itself or another library."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    ours = Path(code.co_filename).is_relative_to(Path(__file__).parents[1])
    return ours and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
