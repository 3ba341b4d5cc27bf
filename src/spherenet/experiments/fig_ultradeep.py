"""Figure: 69 plain layers without shortcuts: cosine with cosine W-Softmax against none with softmax, CIFAR-10.

The paper: nearly 90 % for the SphereNet at the end. Beside it the 45 layers of Table 2. cpu: a quarter of the width, 45
layers for 2,000 iterations, 69 for 3,000; the learning rate falls once, at seven eighths.

    spherenet reproduce fig-ultradeep --preset cpu --seeds 1
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.cells import Cell, Claim, Experiment
from spherenet.experiments.presets import cifar

NETWORKS: dict[str, dict[str, Any]] = {
    "cosine_w-cosine": {"operator": "cosine", "loss": "w-cosine"},
    "none_softmax": {"operator": None},
}
PAPER = {"cosine_w-cosine_45": 90.05, "none_softmax_45": 88.23, "cosine_w-cosine_69": 90.0}
"""Those of 45 layers are from Table 2; of the plain network of 69 there is only a curve."""
ITERATIONS_CPU = {45: 2000, 69: 3000}


def cells(preset: str) -> list[Cell]:
    """The SphereNet and the plain network."""
    return [
        Cell(
            f"{name}_{depth}",
            name.replace("_", ", "),
            f"cnn-{depth}",
            cifar(preset, model=f"cnn-{depth}", **options, **_length(preset, depth)),
            PAPER.get(f"{name}_{depth}"),
        )
        for depth in ((69,) if preset == "smoke" else (45, 69))
        for name, options in NETWORKS.items()
    ]


def _length(preset: str, depth: int) -> dict[str, Any]:
    iterations = ITERATIONS_CPU[depth]
    return {"iterations_cpu": iterations, "milestones": [iterations * 7 // 8]} if preset == "cpu" else {}


EXPERIMENT = Experiment(
    "fig-ultradeep",
    "69 plain layers",
    "whether a very deep network without shortcuts trains",
    cells,
    tuple(
        Claim(
            f"A SphereNet of {depth} plain layers trains more easily than a CNN",
            source,
            ((f"cosine_w-cosine_{depth}", f"none_softmax_{depth}"),),
        )
        for depth, source in ((69, "Figure: ultra-deep"), (45, "Table 2, 45 layers"))
    ),
)
