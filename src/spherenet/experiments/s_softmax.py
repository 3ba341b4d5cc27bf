"""S-Softmax: features and weights both normalised, s = 1, 10, 30, 70 from scratch, and fine-tuned from softmax.

cnn-9, cosine operator, CIFAR-10. The paper: from scratch with s = 1 it does not train; with a large s, or fine-tuned
from a softmax network, it does. The fine-tuned network has both lengths of training behind it.

One seed of the cpu preset took 5 minutes of one core (Intel Xeon at 2.80 GHz).

    spherenet reproduce s-softmax --preset cpu --seeds 3
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar

SCALES = (1, 10, 30, 70)


def cells(preset: str) -> list[Cell]:
    """The scales, a softmax network, and that network fine-tuned."""
    shared: dict[str, Any] = {"model": "cnn-9", "operator": "cosine"}
    found = [
        Cell(f"s-{s}", f"s = {s}", "from scratch", cifar(preset, loss="s-cosine", s=float(s), **shared)) for s in SCALES
    ]
    found.append(Cell("softmax", "softmax", "from scratch", cifar(preset, **shared)))
    tuned = cifar(preset, loss="s-cosine", s=1.0, learning_rate=1e-4, **shared)
    found.append(Cell("fine-tuned", "s = 1", "fine-tuned from softmax", tuned, starts_from="softmax"))
    return found


EXPERIMENT = Experiment(
    "s-softmax",
    "S-Softmax and its scale",
    "which s trains from scratch",
    cells,
    (
        Claim(
            "S-Softmax from scratch is better with s from 10 to 70 than with s = 1",
            "Section 3.4",
            tuple((f"s-{s}", "s-1") for s in SCALES[1:]),
        ),
        Claim("S-Softmax with s = 1 is better fine-tuned from softmax", "Section 3.4", (("fine-tuned", "s-1"),)),
    ),
)
