"""Figure: SphereNorm against BatchNorm at small batches, cnn-9, softmax, CIFAR-10.

The batch sizes 4, 8, 16 and 32 are ours. Shows that SphereNorm does without BatchNorm where a batch is too small for
its statistics. cpu: batches of 4 and 16, three variants more than the plain network.

One seed of the cpu preset took 16 minutes of one core (Intel Xeon at 2.80 GHz).

    spherenet reproduce fig-spherenorm --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar

VARIANTS: dict[str, dict[str, Any]] = {
    "batchnorm": {"operator": None},
    "spherenorm": {"operator": "cosine", "batch_norm": False, "orthogonality": 0.0},
    "spherenorm_orth": {"operator": "cosine", "batch_norm": False},
    "spherenorm_rescaled": {"operator": "cosine", "batch_norm": False, "rescale": "learned"},
    "spherenorm_batchnorm": {"operator": "cosine"},
}
BATCHES = (4, 8, 16, 32)
ALONE = tuple((f"{variant}_{b}", f"batchnorm_{b}") for variant in ("spherenorm", "spherenorm_orth") for b in BATCHES)


def cells(preset: str) -> list[Cell]:
    """Each variant at each batch size; as many iterations whatever the batch."""
    batches = {"paper": BATCHES, "cpu": (4, 16), "smoke": (4,)}[preset]
    return [
        Cell(
            f"{variant}_{batch}",
            variant,
            f"batch {batch}",
            cifar(preset, model="cnn-9", batch_size=batch, iterations_cpu=1200, **options),
        )
        for batch in batches
        for variant, options in VARIANTS.items()
    ]


EXPERIMENT = Experiment(
    "fig-spherenorm",
    "SphereNorm at small batches",
    "test accuracy over iterations at batches of 4 to 32",
    cells,
    (
        Claim(
            "At small batches SphereNorm converges faster than BatchNorm",
            "Figure: SphereNorm",
            ALONE,
            "early",
        ),
        Claim(
            "At small batches the accuracy with SphereNorm fluctuates less than with BatchNorm",
            "Figure: SphereNorm",
            ALONE,
            "steadiness",
        ),
        Claim(
            "Rescaled SphereNorm does not work as well as SphereNorm",
            "Figure: SphereNorm",
            tuple((f"spherenorm_{b}", f"spherenorm_rescaled_{b}") for b in BATCHES),
        ),
        Claim(
            "SphereNorm with BatchNorm beats BatchNorm alone",
            "Figure: SphereNorm",
            tuple((f"spherenorm_batchnorm_{b}", f"batchnorm_{b}") for b in BATCHES),
        ),
    ),
)
