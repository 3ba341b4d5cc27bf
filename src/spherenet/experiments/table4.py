"""Table 4: resnet-32-wide on CIFAR-10+ and CIFAR-100, each operator with its own loss.

CIFAR-10+ is CIFAR-10 with flips both ways and crops. CIFAR-100 has to be downloaded (`spherenet data cifar100
--download`). cpu: without CIFAR-100 and without the row of the linear operator, 300 iterations. Quoted in the paper for
comparison: ELU 94.16 / 72.34, LSUV 93.45 / 65.72, ResNet-1001 95.38 / 77.29.

One seed of the cpu preset took 17 minutes of one core (AMD EPYC).

    spherenet reproduce table4 --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar

ROWS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "none_softmax": ({"operator": None}, (93.26, 72.85)),
    "sigmoid-0.3_w-sigmoid-0.3": (
        {"operator": "sigmoid", "k": 0.3, "loss": "w-sigmoid", "loss_k": 0.3},
        (94.47, 76.02),
    ),
    "linear_w-linear": ({"operator": "linear", "loss": "w-linear"}, (94.33, 75.62)),
    "cosine_w-cosine": ({"operator": "cosine", "loss": "w-cosine"}, (94.64, 74.92)),
    "sigmoid-0.3_ga-linear": ({"operator": "sigmoid", "k": 0.3, "loss": "ga-linear", "m": 4.0}, (95.01, 76.39)),
}
DATA = {"cifar10": "CIFAR-10+", "cifar100": "CIFAR-100"}


def cells(preset: str) -> list[Cell]:
    """Five rows on two data sets; the second only in full."""
    found = []
    for index, (data, column) in enumerate(DATA.items()):
        if index and preset != "paper":
            continue
        for row, (options, paper) in ROWS.items():
            if row == "linear_w-linear" and preset == "cpu":
                continue
            where: dict[str, Any] = {"data": data} if preset == "paper" else {}
            config = cifar(
                preset,
                model="resnet-32-wide",
                augmentation="flips-crop",
                iterations_cpu=300,
                widths_cpu=(24, 48, 96),
                **options,
                **where,
            )
            found.append(Cell(f"{row}_{data}", row, column, config, paper[index]))
    return found


EXPERIMENT = Experiment(
    "table4",
    "Wide residual networks, CIFAR-10+ and CIFAR-100",
    "accuracy of resnet-32-wide with each operator and its own loss",
    cells,
    tuple(
        Claim(
            f"SphereNets with {loss} beat the plain residual network",
            "Table 4",
            tuple((f"{row}_{data}", f"none_softmax_{data}") for row in ROWS if part in row for data in DATA),
        )
        for loss, part in (("W-Softmax", "_w-"), ("GA-Softmax", "_ga-"))
    ),
)
