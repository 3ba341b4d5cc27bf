"""The verbs of the command line: those of this package, and those of others, which they register as entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

__all__ = ["ELSEWHERE", "GROUP", "VERBS", "Verb", "all_verbs", "find_verb"]

GROUP = "spherenet.verbs"
"""Entry point group: the name is that of the verb, the object a `Verb`."""


class Verb(NamedTuple):
    """A verb of the command line. Parser and function are imported only when it is called.

    Attributes:
        summary: What it does, for `spherenet --help`.
        parser: Function without arguments that returns its parser, as "module:function".
        run: Function that takes the parsed options and returns the exit code or None, as "module:function".
    """

    summary: str
    parser: str
    run: str

    def create_parser(self) -> Any:
        """Return the parser."""
        return _imported(self.parser)()

    def load(self) -> Callable[[Any], int | None]:
        """Return the function that runs the verb."""
        function: Callable[[Any], int | None] = _imported(self.run)
        return function


def _imported(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(import_module(module), name)


def _own(module: str, verb: str, summary: str) -> Verb:
    return Verb(summary, f"spherenet.cli.{module}:{verb}_parser", f"spherenet.cli.{module}:run_{verb}")


VERBS = {
    verb: _own(module, verb, summary)
    for verb, module, summary in (
        ("train", "train", "train a network on a data set"),
        ("evaluate", "evaluate", "compute accuracy, per-class table and confusion matrix of a trained network"),
        ("predict", "predict", "classify image files"),
        ("demo", "demo", "show classes, angles and patches of images on a local web page"),
        ("export", "evaluate", "write a trained network as ONNX, PyTorch program or model folder"),
        ("embed", "embed", "write the embeddings of images, and measure retrieval"),
        ("verify", "embed", "measure the verification of pairs of images: ROC, TPR@FPR, EER, accuracy"),
        ("report", "report", "compare runs in a table and in an HTML page with curves"),
        ("doctor", "report", "check all files of a run for corruption"),
        ("data", "data", "list, download and check data sets"),
        ("bench", "bench", "measure time and memory of SphereNets relative to plain CNNs"),
        ("completion", "completion", "print a shell completion script for bash, zsh or fish"),
    )
}
"""The verbs of this package. The module in this folder defines `VERB_parser()` and `run_VERB(arguments)`."""

ELSEWHERE = dict.fromkeys(
    ("reproduce", "tune", "theory"),
    "spherenet-paper, which is not installed: pip install -e paper in a clone of the repository of spherenet.",
)
"""Verbs of other packages of this repository, with the package and the command that installs it."""


def all_verbs() -> dict[str, Verb]:
    """Return the verbs of this package and those of installed packages, which cannot replace one of this package."""
    others = {point.name: point for point in entry_points(group=GROUP) if point.name not in VERBS}
    return {**VERBS, **{name: point.load() for name, point in others.items()}}


def find_verb(name: str) -> Verb | None:
    """Return a verb, or None if no installed package has it. Other packages are not imported."""
    if name in VERBS:
        return VERBS[name]
    return next((point.load() for point in entry_points(group=GROUP, name=name)), None)
