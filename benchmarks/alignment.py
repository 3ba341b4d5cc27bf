"""Similarity of the feature maps of different images at initialization: mean cosine over all pairs, per stage.

If all images give nearly the same direction, a layer that depends only on directions has little to learn from.
Requires CIFAR-10 (SPHERENET_DATA). Takes seconds on one core.

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
    """Return the mean cosine between the maps [N, …] of two different images."""
    directions = torch.nn.functional.normalize(maps.flatten(1))
    pairs = len(maps) * (len(maps) - 1)
    return ((directions @ directions.t()).sum().item() - len(maps)) / pairs


def alignment(images: Tensor, seed: int, **options: object) -> list[float]:
    """Return the mean cosine after each stage of cnn-9 and of its features, in training mode."""
    torch.manual_seed(seed)
    model = sn.create_model("cnn-9", widths=(16, 24, 32), input_size=16, **options)  # type: ignore[arg-type]
    cosines: list[float] = []
    for stage in model.features.stages:  # type: ignore[union-attr]
        stage.register_forward_hook(lambda module, inputs, output: cosines.append(mean_cosine(output)))
    with torch.no_grad():
        features = model.features(images)
    return [*cosines, mean_cosine(features)]


def main() -> None:
    """Print one row per network: mean ± standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    test = load_dataset("cifar10", image_size=16).test
    order = [(0, torch.arange(arguments.images))]
    images = next(test.batches(order, device=torch.device("cpu"), augmentation=None)).images
    print(f"input images: {mean_cosine(images):.3f}")
    for name, options in NETWORKS.items():
        rows = [alignment(images, seed, **options) for seed in range(arguments.seeds)]
        cells = [f"{mean(column):.3f} ± {stdev(column):.3f}" for column in zip(*rows, strict=True)]
        print(f"{name:28}" + "  ".join(cells))


if __name__ == "__main__":
    main()
