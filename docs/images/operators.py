"""Draw `operators.svg`: g(θ) and its slope for every angle function, with the functions of the library.

python docs/images/operators.py [FILE]
"""

import math
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import spherenet as sn
from spherenet_paper.style import WIDTH, color_of, save, style

CURVES = [
    ("cosine", sn.CosineAngle(), "cosine", "solid"),
    ("linear", sn.LinearAngle(), "linear", (0, (4, 1.5))),
    ("sigmoid, k = 0.3", sn.SigmoidAngle(0.3), "sigmoid", "solid"),
    ("sigmoid, k = 0.1", sn.SigmoidAngle(0.1), "sigmoid", (0, (1, 1))),
    ("learnable, from k = 0.5", sn.SigmoidAngle(0.5), "learnable", (0, (5, 1.5))),
    ("square cosine", sn.SquareCosineAngle(), "other", "solid"),
    ("sharpened, p = 4", sn.SharpenedCosineAngle(p=4.0, dtype=torch.float64), "other", (0, (1, 1))),
]


def main(path: Path) -> None:
    """Draw value and slope of every angle function over the angle."""
    # Just inside the interval: at 0 and π the library sets the derivative to 0 (Eq. 2 of docs/concepts.md).
    theta = torch.linspace(1e-4, math.pi - 1e-4, 361, dtype=torch.float64)
    with style("operators"), torch.no_grad():
        figure, (value, slope) = plt.subplots(1, 2, figsize=(WIDTH, 3.6))
        for name, angle, method, dashes in CURVES:
            line = {"color": color_of(method), "linestyle": dashes}
            value.plot(theta, angle.at(theta), label=name, **line)
            slope.plot(theta, -theta.sin() * angle.derivative(theta.cos()), **line)
        value.set_title("g(θ), the output")
        slope.set_title("dg/dθ, the slope")
        for axes in (value, slope):
            axes.set_xticks([0, math.pi / 2, math.pi], ["0", "π/2", "π"])
        figure.supxlabel("angle θ between patch and kernel", fontsize=11)
        figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.8)
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
