"""Table 2: the operators in networks of 3 to 60 layers and in a residual one, CIFAR-10.

Operators with cosine W-Softmax, the plain network with softmax. cpu: two rows, 3 and 18 layers
(9 are in table1, resnet-32 is in fig-convergence-resnet), 2,000 iterations.

One seed of the cpu preset took 10 minutes of one core (AMD EPYC).

    spherenet reproduce table2 --preset cpu --seeds 3
"""

from __future__ import annotations

from spherenet.experiments.experiment import OPERATORS, Cell, Claim, Experiment, cifar, operator_options

NETWORKS = ("cnn-3", "cnn-9", "cnn-18", "cnn-45", "cnn-60", "resnet-32")
PAPER = {
    "sigmoid-0.1": (82.08, 91.13, 91.43, 89.34, 87.67, 90.94),
    "sigmoid-0.3": (81.92, 91.28, 91.55, 89.73, 87.85, 91.70),
    "sigmoid-0.7": (82.40, 91.18, 91.69, 89.85, 88.42, 91.19),
    "linear": (82.31, 91.15, 91.24, 90.15, 89.91, 91.25),
    "cosine": (82.23, 90.99, 91.23, 90.05, 89.28, 91.38),
    "none": (81.19, 90.68, 90.62, 88.23, 88.15, 90.40),
}


def cells(preset: str) -> list[Cell]:
    """The grid; on two cores a part of it."""
    rows = {"paper": tuple(OPERATORS), "cpu": ("sigmoid-0.3", "none"), "smoke": ("cosine", "none")}[preset]
    columns = {"paper": NETWORKS, "cpu": ("cnn-3", "cnn-18"), "smoke": ("cnn-3", "resnet-32")}[preset]
    return [
        Cell(
            f"{row}_{column}",
            row,
            column,
            cifar(
                preset,
                model=column,
                **operator_options(row),
                loss="softmax" if row == "none" else "w-cosine",
                iterations_cpu=2000,
            ),
            PAPER[row][NETWORKS.index(column)],
        )
        for row in rows
        for column in columns
    ]


EXPERIMENT = Experiment(
    "table2",
    "Operators and depth, CIFAR-10",
    "accuracy of each operator in networks of several depths",
    cells,
    tuple(
        Claim(
            f"SphereNets beat the plain network, {net}",
            "Table 2",
            tuple((f"{row}_{net}", f"none_{net}") for row in OPERATORS if row != "none"),
        )
        for net in NETWORKS
    ),
)
