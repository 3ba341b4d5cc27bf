"""The experiments of the paper, and the tools that run grids of training runs.

`EXPERIMENTS` lists what `spherenet reproduce` can run. To add an experiment, write a function that returns its cells in
`tables.py`, `figures.py`, `studies.py`, `margins.py` or
`evidence.py`, wrap it in an `Experiment`, and add it to the list below.
"""

from __future__ import annotations

from spherenet.cli.plugin import require_one_of
from spherenet_paper.experiments import evidence, figures, margins, studies, tables
from spherenet_paper.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS", "find_experiment"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for experiment in (
        tables.TABLE1,
        tables.TABLE2,
        tables.TABLE3,
        tables.TABLE4,
        figures.CONVERGENCE_RESNET,
        figures.CONVERGENCE_PLAIN,
        figures.WIDTH,
        figures.ULTRADEEP,
        studies.LEARNABLE,
        figures.SPHERENORM,
        studies.S_SOFTMAX,
        studies.WEIGHT_DECAY,
        studies.IMAGENET,
        studies.MAGNITUDES,
        margins.MARGIN_SCHEDULE,
        margins.MARGIN_FORMS,
        evidence.HEADLINE,
        evidence.PROTOCOL,
    )
}
"""The experiments by id, in the order of `spherenet reproduce --list`."""


def find_experiment(id: str) -> Experiment:
    """Return the experiment with this id.

    Raises:
        ValueError: No experiment has this id. The message suggests the closest one.
    """
    return EXPERIMENTS[require_one_of("id", id, EXPERIMENTS)]
