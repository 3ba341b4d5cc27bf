"""Figure: accuracy over iterations of cnn-9 on CIFAR-10, each operator with and without orthogonality, softmax.

Shows that SphereNets converge faster, and that the orthogonality term helps. cpu: 2,000 iterations; those
of 500 are too short for the curves to part (docs/findings.md).

One seed of the cpu preset took 14 minutes of one core (AMD EPYC).

    spherenet reproduce fig-convergence-plain --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar, operator_options

ROWS = ("cosine", "linear", "sigmoid-0.3")
AGAINST_PLAIN = tuple((f"{row}_orth", "none") for row in ROWS)


def cells(preset: str) -> list[Cell]:
    """Three operators with and without the term, and the plain network."""
    size: dict[str, Any] = {"iterations_cpu": 2000, "eval_every": 100} if preset == "cpu" else {}
    found = [Cell("none", "none", "plain", cifar(preset, model="cnn-9", operator=None, **size))]
    for row in ROWS:
        for column, weight in (("with orthogonality", 1e-4), ("without", 0.0)):
            config = cifar(preset, model="cnn-9", orthogonality=weight, **operator_options(row), **size)
            found.append(Cell(f"{row}_{'orth' if weight else 'free'}", row, column, config))
    return found


EXPERIMENT = Experiment(
    "fig-convergence-plain",
    "Convergence of cnn-9, with and without orthogonality",
    "test accuracy over iterations",
    cells,
    (
        Claim(
            "SphereNets converge faster than the plain network (cnn-9)",
            "Figure: convergence",
            AGAINST_PLAIN,
            "early",
        ),
        Claim("SphereNets end above the plain network (cnn-9)", "Figure: convergence", AGAINST_PLAIN),
        Claim(
            "The accuracy of SphereNets fluctuates less than the plain network's (cnn-9)",
            "Figure: convergence",
            AGAINST_PLAIN,
            "steadiness",
        ),
        Claim(
            "The orthogonality term improves accuracy",
            "Figure: convergence",
            tuple((f"{row}_orth", f"{row}_free") for row in ROWS),
        ),
    ),
)
