"""Draw `optimizers.svg`: the angle by which one step rotates the kernels of a sphere layer.

    python docs/images/optimizers.py [FILE]

A SphereConv2d(16, 32, 3) is fitted to the output of another one; every optimizer has a constant learning rate. Lines
are medians over the filters.
"""

import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import spherenet as sn
from spherenet_paper.style import WIDTH, color_of, save, style

STEPS = 150
OPTIMIZERS = {
    "SGD": (lambda layer: torch.optim.SGD(layer.parameters(), lr=30.0), "standardized"),
    "Adam": (lambda layer: torch.optim.Adam(layer.parameters(), lr=0.01), "CNN"),
    'Muon, norm="filter"': (lambda layer: sn.Muon(layer.parameters(), lr=0.1, norm="filter"), "other"),
    'Hyperball("adam")': (lambda layer: sn.Hyperball(layer.parameters(), lr=0.05, scope="filter"), "linear"),
}


def angles(make_optimizer) -> list[float]:
    """Return the median angle of the filters of every step, in degrees."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 16, 6, 6, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer, target = (sn.SphereConv2d(16, 32, 3, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        wanted = target(images)
    optimizer, result = make_optimizer(layer), []
    for _ in range(STEPS):
        before = layer.weight.detach().flatten(1).clone()
        optimizer.zero_grad()
        (layer(images) - wanted).square().mean().backward()
        optimizer.step()
        cosine = torch.cosine_similarity(before, layer.weight.detach().flatten(1))
        result.append(cosine.clamp(-1, 1).acos().rad2deg().median().item())
    return result


def main(path: Path) -> None:
    """Draw the angles of all optimizers over the steps."""
    with style("optimizers"):
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
        for name, (make_optimizer, color) in OPTIMIZERS.items():
            axes.plot(range(1, STEPS + 1), angles(make_optimizer), color=color_of(color), label=name)
        axes.set_yscale("log")
        axes.set_xlabel("step, at a constant learning rate")
        axes.set_ylabel("rotation per step (°)")
        figure.legend(loc="outside upper center", ncols=2)
        save(figure, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
