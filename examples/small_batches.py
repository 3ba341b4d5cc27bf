"""Train with two images per batch: BatchNorm fails, a SphereConv without BatchNorm does not.

Four convolutions of stride 2 reduce a digit of 16 × 16 (mnist5k) to 1 × 1. With a batch of 2, the last BatchNorm
computes mean and variance of two numbers per channel: in training little more remains than which one is larger, and in
evaluation the running averages fit neither. A SphereConv normalizes every patch separately. Batches are random, and
nothing else is unfavorable to BatchNorm; with larger maps it fails much less. All networks are trained on the same
number of images.

    python examples/small_batches.py        about three minutes on one core
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import spherenet as sn
from spherenet.data import load_dataset

WIDTH, GEOMETRY = 32, {"kernel_size": 3, "stride": 2, "padding": 1}
UNITS = {
    "no normalization": lambda channels: [nn.Conv2d(channels, WIDTH, **GEOMETRY)],
    "BatchNorm": lambda channels: [nn.Conv2d(channels, WIDTH, **GEOMETRY, bias=False), nn.BatchNorm2d(WIDTH)],
    "SphereNorm": lambda channels: [sn.SphereConv2d(channels, WIDTH, **GEOMETRY, operator="cosine")],
}


def network(unit: Callable[[int], list[nn.Module]]) -> nn.Sequential:
    """Return a network from digits [N, 1, 16, 16] to scores [N, 10]."""
    layers = [module for channels in (1, WIDTH, WIDTH, WIDTH) for module in (*unit(channels), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTH, 10))


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--images", type=int, default=4000, help="that each network is trained on")
parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 16], help="batch sizes")
parser.add_argument("--seeds", type=int, default=3, help="at least 2")
arguments = parser.parse_args()
data, cpu = load_dataset("mnist5k", image_size=16), torch.device("cpu")
orders = {split: [(0, torch.arange(len(split)))] for split in (data.train, data.test)}
train, test = (next(split.batches(order, device=cpu, augmentation=None)) for split, order in orders.items())
print(f"test accuracy %, {arguments.images} images seen, n = {arguments.seeds} seeds")
for batch_size in arguments.batches:
    for name, unit in UNITS.items():
        accuracies = []
        for seed in range(arguments.seeds):
            torch.manual_seed(seed)
            model = network(unit)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for _ in range(arguments.images // batch_size):
                chosen = torch.randint(len(train.labels), (batch_size,))
                F.cross_entropy(model(train.images[chosen]), train.labels[chosen]).backward()
                optimizer.step()
                optimizer.zero_grad()
            accuracies.append(100 * (model.eval()(test.images).argmax(1) == test.labels).double().mean().item())
        spread = f"{statistics.mean(accuracies):5.1f} ± {statistics.stdev(accuracies):4.1f}"
        print(f"batch {batch_size:<4} {name:<18}{spread}", flush=True)
