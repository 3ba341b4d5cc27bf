"""Figure: 69 plain layers without shortcuts: cosine with cosine W-Softmax against none with softmax, CIFAR-10.

The paper: nearly 90 % for the SphereNet at the end. cpu: a quarter of the width; 45 layers for 800 iterations, 69 for
3,000, for neither network begins to learn before; the learning rate falls once, at seven eighths.

    spherenet reproduce fig-ultradeep --preset cpu --seeds 1
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.cells import Cell, Claim, Experiment
from spherenet.experiments.presets import cifar

NETWORKS = {"cosine_w-cosine": {"operator": "cosine", "loss": "w-cosine"}, "none_softmax": {"operator": None}}
ITERATIONS_CPU = {45: 800, 69: 3000}


def cells(preset: str) -> list[Cell]:
    """The SphereNet and the plain network; on two cores also of 45 layers."""
    return [
        Cell(
            f"{name}_{depth}",
            name.replace("_", ", "),
            f"cnn-{depth}",
            cifar(preset, model=f"cnn-{depth}", **options, **_length(preset, depth)),
            90.0 if depth == 69 and options["operator"] else None,
        )
        for depth in ((45, 69) if preset == "cpu" else (69,))
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
        for depth, source in ((69, "Figure: ultra-deep"), (45, "Figure: ultra-deep, at 45 layers"))
    ),
)
