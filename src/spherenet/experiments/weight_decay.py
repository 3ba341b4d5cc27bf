"""Weight decay: cosine and none, with and without 5e-4 on all weights, cnn-9, softmax, CIFAR-10.

The paper: weight decay is "no longer needed in SphereNet".

One seed of the cpu preset took 2 minutes of one core (Intel Xeon at 2.80 GHz).

    spherenet reproduce weight-decay --preset cpu --seeds 3
"""

from __future__ import annotations

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar, operator_options


def cells(preset: str) -> list[Cell]:
    """Two operators, with and without decay on every weight."""
    return [
        Cell(
            f"{row}_{'decay' if decay else 'free'}",
            row,
            "5e-4 on all weights" if decay else "no decay",
            cifar(
                preset, model="cnn-9", weight_decay=decay, decay_all=True, orthogonality=0.0, **operator_options(row)
            ),
        )
        for row in ("cosine", "none")
        for decay in (5e-4, 0.0)
    ]


EXPERIMENT = Experiment(
    "weight-decay",
    "Weight decay",
    "accuracy with and without L2 decay",
    cells,
    (Claim("A SphereNet without decay beats one with it", "Section 3.3", (("cosine_free", "cosine_decay"),)),),
)
