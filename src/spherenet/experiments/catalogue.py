"""The experiments by the names that `spherenet reproduce` takes."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from spherenet.experiments.cells import Experiment
from spherenet.ops.arguments import require_one_of

__all__ = ["IDS", "find_experiment", "words_of"]

IDS = (
    "table1",
    "table2",
    "table3",
    "table4",
    "fig-convergence-resnet",
    "fig-convergence-plain",
    "fig-width",
    "fig-ultradeep",
    "learnable",
    "fig-spherenorm",
    "s-softmax",
    "weight-decay",
    "imagenet",
    "margin-schedule",
)


def find_experiment(id: str) -> Experiment:
    """Return an experiment; its module is that of its name in this folder. ValueError lists the near names."""
    experiment: Experiment = _module(id).EXPERIMENT
    return experiment


def words_of(id: str) -> str:
    """What an experiment shows, what it costs and how to run it: the docstring of its module."""
    return _module(id).__doc__ or ""


def _module(id: str) -> ModuleType:
    require_one_of("id", id, IDS)
    return import_module(f"spherenet.experiments.{id.replace('-', '_')}")
