"""Table 3: cnn-18 without ReLU, BatchNorm kept, CIFAR-10; losses as in table 2.

Shows that the operators are nonlinear enough to do without ReLU, where a plain network loses ten per cent. cpu:
three rows, 2,000 iterations.

One seed of the cpu preset took 7 minutes of one core (AMD EPYC).

    spherenet reproduce table3 --preset cpu --seeds 3
"""

from __future__ import annotations

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar, operator_options

PAPER = {
    "sigmoid-0.1": 86.29,
    "sigmoid-0.3": 85.67,
    "sigmoid-0.7": 85.51,
    "linear": 85.34,
    "cosine": 85.25,
    "none": 80.73,
}


def cells(preset: str) -> list[Cell]:
    """One column; on two cores with three of the rows."""
    rows = {"paper": tuple(PAPER), "cpu": ("sigmoid-0.3", "cosine", "none"), "smoke": ("cosine", "none")}
    return [
        Cell(
            row,
            row,
            "cnn-18 without ReLU",
            cifar(
                preset,
                model="cnn-18",
                relu=False,
                **operator_options(row),
                loss="softmax" if row == "none" else "w-cosine",
                iterations_cpu=2000,
            ),
            PAPER[row],
        )
        for row in rows[preset]
    ]


EXPERIMENT = Experiment(
    "table3",
    "Without ReLU, CIFAR-10, cnn-18",
    "accuracy of networks whose only nonlinearity is the operator",
    cells,
    (
        Claim(
            "SphereNets work without ReLU better than a plain network",
            "Table 3",
            tuple((row, "none") for row in PAPER if row != "none"),
        ),
    ),
)
