"""Learnable k: cnn-9, one k a filter from 0.5, cosine W-Softmax, CIFAR-10, against the fixed sigmoid 0.3.

The paper reports 91.64, and histograms of k in the first convolution of each stage: spread over 0 to 1, more
concentrated, highly concentrated near 0.8. It compares with 91.22; its own table 2 has 91.28 for k = 0.3.

    spherenet reproduce learnable --preset cpu --seeds 3
"""

from __future__ import annotations

from spherenet.experiments.cells import Cell, Claim, Experiment
from spherenet.experiments.presets import cifar


def cells(preset: str) -> list[Cell]:
    """Learned and fixed."""
    return [
        Cell("learnable", "learnable", "w-cosine",
             cifar(preset, model="cnn-9", operator="learnable", k=0.5, loss="w-cosine"), 91.64),
        Cell("sigmoid-0.3", "sigmoid-0.3", "w-cosine",
             cifar(preset, model="cnn-9", operator="sigmoid", k=0.3, loss="w-cosine"), 91.28),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "learnable",
    "Learned k",
    "accuracy with a learned k, and where the k of each stage come to lie",
    cells,
    (Claim("A learned k beats the best fixed one", "Section 4.2", (("learnable", "sigmoid-0.3"),)),),
)
