"""Figure: cnn-9 at four widths, cosine against none, softmax, CIFAR-10.

The width 64/96/128 is the paper's; the other three are ours. cpu: the first three as they are; the widest
takes five minutes a run. The paper: similar to a CNN or slightly worse with few filters, better with many.

One seed of the cpu preset took 9 minutes of one core (AMD EPYC).

    spherenet reproduce fig-width --preset cpu --seeds 3
"""

from __future__ import annotations

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar, operator_options

WIDTHS = ((16, 32, 48), (32, 64, 96), (64, 96, 128), (128, 192, 256))
MANY = (("cosine_64", "none_64"), ("cosine_128", "none_128"))


def cells(preset: str) -> list[Cell]:
    """Two operators at each width."""
    return [
        Cell(
            f"{row}_{widths[0]}",
            row,
            "/".join(map(str, widths)),
            cifar(preset, model="cnn-9", widths=list(widths), **operator_options(row)),
        )
        for widths in {"paper": WIDTHS, "cpu": WIDTHS[:3], "smoke": WIDTHS[:1]}[preset]
        for row in ("cosine", "none")
    ]


EXPERIMENT = Experiment(
    "fig-width",
    "Width of cnn-9",
    "test accuracy over iterations at four widths",
    cells,
    (
        Claim("With few filters a SphereNet is slightly worse", "Figure: width", (("none_16", "cosine_16"),)),
        Claim("With many filters SphereNets are better", "Figure: width", MANY),
        Claim("With many filters SphereNets converge faster", "Figure: width", MANY, "early"),
    ),
)
