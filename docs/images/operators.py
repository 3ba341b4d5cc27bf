"""Draw `operators.svg`, the figure of g(θ) in README.md, with the functions of the library.

python docs/images/operators.py [FILE]
"""

import math
import sys
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

import spherenet as sn

CURVES = [
    ("cosine", sn.CosineAngle(), "#4477aa"),
    ("linear", sn.LinearAngle(), "#228833"),
    ("sigmoid, k = 0.1", sn.SigmoidAngle(0.1), "#aa3377"),
    ("sigmoid, k = 0.3", sn.SigmoidAngle(0.3), "#ee6677"),
    ("sigmoid, k = 0.7", sn.SigmoidAngle(0.7), "#ccbb44"),
]


def main(path: Path) -> None:
    """Draw value and slope of every operator over the angle."""
    mpl.rcParams["svg.hashsalt"] = "operators"  # reproducible output
    # Just inside the interval: at 0 and π the library sets the derivative to 0 (Eq. 2 of docs/concepts.md).
    theta = torch.linspace(1e-4, math.pi - 1e-4, 721, dtype=torch.float64)
    figure, (value, slope) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, angle, color in CURVES:
        value.plot(theta, angle.at(theta), label=name, color=color)
        slope.plot(theta, -theta.sin() * angle.derivative(theta.cos()), color=color)
    value.set_title("g(θ): output of a layer")
    slope.set_title("dg/dθ: slope")
    for axes in (value, slope):
        axes.set_xticks([0, math.pi / 2, math.pi], ["0", "π/2", "π"])
        axes.set_xlabel("angle θ between kernel and patch")
        axes.grid(alpha=0.3)
    value.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
