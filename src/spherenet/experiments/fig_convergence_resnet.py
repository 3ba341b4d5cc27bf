"""Figure: accuracy over iterations of resnet-32 on CIFAR-10 and CIFAR-10+, softmax.

Shows that SphereNets converge faster. cpu: CIFAR-10 only, without the linear operator, 800
iterations.

One seed of the cpu preset took 6 minutes of one core (AMD EPYC).

    spherenet reproduce fig-convergence-resnet --preset cpu --seeds 3
"""

from __future__ import annotations

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar, operator_options

ROWS = ("cosine", "linear", "sigmoid-0.3", "none")
DATA = {"CIFAR-10": "flip", "CIFAR-10+": "flips-crop"}


def cells(preset: str) -> list[Cell]:
    """Four operators, with little and with more augmentation."""
    columns = DATA if preset == "paper" else {"CIFAR-10": "flip"}
    rows = ROWS if preset == "paper" else ("cosine", "sigmoid-0.3", "none")
    return [
        Cell(
            f"{row}_{'plus' if column.endswith('+') else 'cifar10'}",
            row,
            column,
            cifar(preset, model="resnet-32", augmentation=augmentation, iterations_cpu=800, **operator_options(row)),
        )
        for column, augmentation in columns.items()
        for row in rows
    ]


EXPERIMENT = Experiment(
    "fig-convergence-resnet",
    "Convergence of resnet-32",
    "test accuracy over iterations",
    cells,
    (
        Claim(
            "SphereNets converge faster than the plain network (resnet-32)",
            "Figure: convergence",
            tuple((f"{row}_{data}", f"none_{data}") for row in ROWS[:3] for data in ("cifar10", "plus")),
            "early",
        ),
    ),
)
