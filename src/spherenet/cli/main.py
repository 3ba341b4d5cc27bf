"""Find the verb, run it, and turn what goes wrong into one sentence and an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from spherenet import __version__
from spherenet.cli.parser import suggestion
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

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130


def _help() -> str:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items())
    return (
        "usage: spherenet VERB [OPTIONS]\n\nDeep hyperspherical learning from the command line.\n\n"
        f"verbs:\n{lines}\n\nspherenet VERB --help shows the options of a verb, with examples."
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
    module = importlib.import_module(f"spherenet.cli.{verb}")
    try:
        code: int | None = module.run(module.parser().parse_args(rest))
    except KeyboardInterrupt:
        print("spherenet: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except (SphereNetError, ValueError, TypeError, OSError) as error:
        # What the library raises for bad input is one sentence already.
        print(f"spherenet {verb}: {error}", file=sys.stderr)
        return FAILED if isinstance(error, TrainingError) else WRONG_INPUT
    return code or 0
