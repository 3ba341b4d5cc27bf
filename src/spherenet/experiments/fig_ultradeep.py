"""Figure: 69 plain layers without shortcuts: cosine with cosine W-Softmax against none with softmax, CIFAR-10.

The paper: nearly 90 % for the SphereNet at the end. Beside it the 45 layers of Table 2 and, ours, 69 layers without
ReLU. cpu: 45 layers for 2,000 iterations, the learning rate falling once, at seven eighths, and 69 without ReLU for
500; with ReLU 69 layers are still at chance after 2,300 (docs/findings.md).

One seed of the cpu preset took 18 minutes of one core (AMD EPYC).

    spherenet reproduce fig-ultradeep --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar

NETWORKS: dict[str, dict[str, Any]] = {
    "cosine_w-cosine": {"operator": "cosine", "loss": "w-cosine"},
    "none_softmax": {"operator": None},
}
COLUMNS: dict[str, dict[str, Any]] = {
    "cnn-45": {"model": "cnn-45"},
    "cnn-69": {"model": "cnn-69"},
    "cnn-69 without ReLU": {"model": "cnn-69", "relu": False},
}
PAPER = {"cosine_w-cosine_45": 90.05, "none_softmax_45": 88.23, "cosine_w-cosine_69": 90.0}
"""Those of 45 layers are from Table 2; of the plain network of 69 there is only a curve."""


def _name(network: str, column: str) -> str:
    return f"{network}_{column.removeprefix('cnn-').replace(' without ReLU', '-without-relu')}"


def cells(preset: str) -> list[Cell]:
    """The SphereNet and the plain network, at two depths."""
    columns = {"paper": COLUMNS, "cpu": ("cnn-45", "cnn-69 without ReLU"), "smoke": ("cnn-69", "cnn-69 without ReLU")}
    longer: dict[str, Any] = {"iterations_cpu": 2000, "milestones": [1750]}
    return [
        Cell(
            name := _name(network, column),
            network.replace("_", ", "),
            column,
            cifar(preset, **COLUMNS[column], **options, **(longer if (preset, column) == ("cpu", "cnn-45") else {})),
            PAPER.get(name),
        )
        for column in columns[preset]
        for network, options in NETWORKS.items()
    ]


EXPERIMENT = Experiment(
    "fig-ultradeep",
    "45 and 69 plain layers",
    "whether a very deep network without shortcuts trains",
    cells,
    tuple(
        Claim(
            f"A SphereNet of {words} trains more easily than a CNN",
            source,
            ((_name("cosine_w-cosine", column), _name("none_softmax", column)),),
        )
        for words, column, source in (
            ("69 plain layers", "cnn-69", "Figure: ultra-deep"),
            ("45 plain layers", "cnn-45", "Table 2, 45 layers"),
            ("69 plain layers without ReLU", "cnn-69 without ReLU", "Figure: ultra-deep; without ReLU ours"),
        )
    ),
)
