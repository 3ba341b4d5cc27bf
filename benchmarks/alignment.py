"""How alike the maps of different pictures are at initialisation, stage by stage: the mean cosine over all pairs.

Where every picture gives nearly the same direction, a layer that sees only directions has little to learn from.
Needs CIFAR-10 (SPHERENET_DATA). Seconds on one core.

    python benchmarks/alignment.py
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev

import torch
from torch import Tensor

import spherenet as sn
from spherenet.data import load_dataset

NETWORKS = {
    "convolution, BatchNorm": {"operator": None},
    "cosine, BatchNorm": {"operator": "cosine"},
    "cosine alone (SphereNorm)": {"operator": "cosine", "batch_norm": False},
    "cosine alone, no ReLU": {"operator": "cosine", "batch_norm": False, "relu": False},
    "convolution alone": {"operator": None, "batch_norm": False},
}


def mean_cosine(maps: Tensor) -> float:
    """The mean cosine between the maps [N, …] of two different pictures."""
    directions = torch.nn.functional.normalize(maps.flatten(1))
    pairs = len(maps) * (len(maps) - 1)
    return ((directions @ directions.t()).sum().item() - len(maps)) / pairs


def alignment(images: Tensor, seed: int, **options: object) -> list[float]:
    """The mean cosine after each stage of cnn-9 and of the features, the network being in training mode."""
    torch.manual_seed(seed)
    model = sn.create_model("cnn-9", widths=(16, 24, 32), input_size=16, **options)  # type: ignore[arg-type]
    found: list[float] = []
    for stage in model.features.stages:  # type: ignore[union-attr]
        stage.register_forward_hook(lambda module, inputs, output: found.append(mean_cosine(output)))
    with torch.no_grad():
        features = model.features(images)
    return [*found, mean_cosine(features)]


def main() -> None:
    """Print a row a network, mean ± standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    test = load_dataset("cifar10", image_size=16).test
    order = [(0, torch.arange(arguments.pictures))]
    images = next(test.batches(order, device=torch.device("cpu"), augmentation=None)).images
    print(f"the pictures themselves: {mean_cosine(images):.3f}")
    for name, options in NETWORKS.items():
        rows = [alignment(images, seed, **options) for seed in range(arguments.seeds)]
        cells = [f"{mean(column):.3f} ± {stdev(column):.3f}" for column in zip(*rows, strict=True)]
        print(f"{name:28}" + "  ".join(cells))


if __name__ == "__main__":
    main()
