"""Learnable k: cnn-9, one k a filter from 0.5, cosine W-Softmax, CIFAR-10, against the fixed sigmoid 0.3.

The paper reports 91.64, and histograms of k in the first convolution of each stage: spread over 0 to 1, more
concentrated, highly concentrated near 0.8. It compares with 91.22; its own table 2 has 91.28 for k = 0.3. cpu: 2,000
iterations, for k moves slowly.

One seed of the cpu preset took 6 minutes of one core (AMD EPYC).

    spherenet reproduce learnable --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar


def cells(preset: str) -> list[Cell]:
    """Learned and fixed."""
    rows: dict[str, tuple[dict[str, Any], float]] = {
        "learnable": ({"operator": "learnable", "k": 0.5}, 91.64),
        "sigmoid-0.3": ({"operator": "sigmoid", "k": 0.3}, 91.28),
    }
    return [
        Cell(row, row, "w-cosine", cifar(preset, model="cnn-9", loss="w-cosine", iterations_cpu=2000, **options), paper)
        for row, (options, paper) in rows.items()
    ]


EXPERIMENT = Experiment(
    "learnable",
    "Learned k",
    "accuracy with a learned k, and where the k of each stage come to lie",
    cells,
    (
        Claim("A learned k beats the best fixed one", "Section 4.2", (("learnable", "sigmoid-0.3"),)),
        Claim("Learned k grow with depth", "Figure: learned k", (("learnable", "sigmoid-0.3"),), "rise"),
        Claim(
            "Learned k are spread in the first stage and concentrated in the last",
            "Figure: learned k",
            (("learnable", "sigmoid-0.3"),),
            "narrowing",
        ),
    ),
)
