"""Table 1: every operator with every loss on CIFAR-10, cnn-9.

Shows that angular losses and margins add to what the operators bring. Paper: 48 cells of 64,000 iterations, half a
second or more each on two cores (docs/performance.md). cpu: four operators and four losses, a quarter of the width,
500 iterations.

One seed of the cpu preset took 12 minutes of one core (Intel Xeon at 2.80 GHz).

    spherenet reproduce table1 --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import OPERATORS, Cell, Claim, Experiment, cifar, operator_options

LOSSES: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "w-sigmoid-0.1": {"loss": "w-sigmoid", "loss_k": 0.1},
    "w-sigmoid-0.3": {"loss": "w-sigmoid", "loss_k": 0.3},
    "w-sigmoid-0.7": {"loss": "w-sigmoid", "loss_k": 0.7},
    "w-linear": {"loss": "w-linear"},
    "w-cosine": {"loss": "w-cosine"},
    "a": {"loss": "a", "m": 4.0},
    "ga-linear": {"loss": "ga-linear", "m": 4.0},
}

PAPER = {
    "sigmoid-0.1": (90.97, 90.91, 90.89, 90.88, 91.07, 91.13, 91.87, 91.99),
    "sigmoid-0.3": (91.08, 91.44, 91.37, 91.21, 91.34, 91.28, 92.13, 92.38),
    "sigmoid-0.7": (91.05, 91.16, 91.47, 91.07, 90.99, 91.18, 92.22, 92.36),
    "linear": (91.10, 90.93, 91.42, 90.96, 90.95, 91.24, 92.21, 92.32),
    "cosine": (90.89, 90.88, 91.08, 91.22, 91.17, 90.99, 91.94, 92.19),
    "none": (90.58, 90.58, 90.73, 90.78, 91.08, 90.68, 91.78, 91.80),
}

MARGIN_LOSSES = ("a", "ga-linear")
CPU_OPERATORS = ("sigmoid-0.3", "linear", "cosine", "none")
CPU_LOSSES = ("softmax", "w-cosine", *MARGIN_LOSSES)


def cells(preset: str) -> list[Cell]:
    """The grid; on two cores a part of it."""
    rows = {"paper": tuple(OPERATORS), "cpu": CPU_OPERATORS, "smoke": ("sigmoid-0.3", "none")}[preset]
    columns = {"paper": tuple(LOSSES), "cpu": CPU_LOSSES, "smoke": ("softmax", "ga-linear")}[preset]
    return [
        Cell(
            f"{row}_{column}",
            row,
            column,
            cifar(preset, model="cnn-9", **operator_options(row), **LOSSES[column]),
            PAPER[row][list(LOSSES).index(column)],
        )
        for row in rows
        for column in columns
    ]


EXPERIMENT = Experiment(
    "table1",
    "Operators and losses, CIFAR-10, cnn-9",
    "accuracy of each operator with each loss",
    cells,
    (
        Claim(
            "SphereConv operators beat the plain convolution",
            "Table 1, rows",
            tuple((f"{row}_softmax", "none_softmax") for row in OPERATORS if row != "none"),
        ),
        Claim(
            "SphereConv operators beat the plain convolution under margin losses",
            "Table 1, rows",
            tuple((f"{row}_{loss}", f"none_{loss}") for row in OPERATORS if row != "none" for loss in MARGIN_LOSSES),
        ),
        Claim(
            "Margin losses (A-Softmax, GA-Softmax) beat softmax",
            "Table 1, columns",
            tuple((f"{row}_{loss}", f"{row}_softmax") for row in OPERATORS for loss in MARGIN_LOSSES),
        ),
        Claim(
            "Linear GA-Softmax beats A-Softmax",
            "Table 1, last two columns",
            tuple((f"{row}_ga-linear", f"{row}_a") for row in OPERATORS),
        ),
    ),
)
