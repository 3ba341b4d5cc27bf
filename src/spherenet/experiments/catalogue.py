"""The experiments by the names that `spherenet reproduce` takes."""

from __future__ import annotations

from importlib import import_module

from spherenet.experiments.cells import Experiment
from spherenet.ops.arguments import require_one_of

__all__ = ["IDS", "find_experiment"]

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
    require_one_of("id", id, IDS)
    module = import_module(f"spherenet.experiments.{id.replace('-', '_')}")
    experiment: Experiment = module.EXPERIMENT
    return experiment
