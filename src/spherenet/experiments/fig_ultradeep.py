"""Figure: 69 plain layers without shortcuts: cosine with cosine W-Softmax against none with softmax, CIFAR-10.

The paper: nearly 90 % for the SphereNet at the end. cpu: a quarter of the width, 300 iterations.

    spherenet reproduce fig-ultradeep --preset cpu --seeds 1
"""

from __future__ import annotations

from spherenet.experiments.cells import Cell, Claim, Experiment
from spherenet.experiments.presets import cifar


def cells(preset: str) -> list[Cell]:
    """The SphereNet and the plain network."""
    return [
        Cell("cosine_w-cosine", "cosine, w-cosine", "cnn-69",
             cifar(preset, model="cnn-69", operator="cosine", loss="w-cosine", iterations_cpu=300), 90.0),
        Cell("none_softmax", "none, softmax", "cnn-69",
             cifar(preset, model="cnn-69", operator=None, iterations_cpu=300)),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "fig-ultradeep",
    "69 plain layers",
    "whether a very deep network without shortcuts trains",
    cells,
    (
        Claim(
            "A SphereNet of 69 plain layers trains more easily than a CNN",
            "Figure: ultra-deep",
            (("cosine_w-cosine", "none_softmax"),),
            "early",
        ),
    ),
)
