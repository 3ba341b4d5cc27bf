"""Dependence of features on the rest of the batch at initialization, by depth.

With BatchNorm, the output for an image depends slightly on the other images of its batch, and a deep network with
random weights amplifies small differences. Eight images pass through a network in training mode in two batches that
have no other image in common. The script prints the mean cosine between both outputs, after subtraction of the mean
over the eight images: 1 if the output depends on the image only, 0 if it depends on the batch only. Requires CIFAR-10
(SPHERENET_DATA). Takes a minute on one core.

    python benchmarks/batch_dependence.py
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import spherenet as sn
from spherenet.data import load_dataset

SHARED = 8
DEPTHS = (9, 18, 45, 69)


def two_batches(size: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return two batches of test images that start with the same eight."""
    test = load_dataset("cifar10", image_size=size).test
    order = [(0, torch.arange(batch)), (0, torch.arange(batch, 2 * batch))]
    first, second = (
        batch_of_images.images for batch_of_images in test.batches(order, device=torch.device("cpu"), augmentation=None)
    )
    second[:SHARED] = first[:SHARED]
    return first, second


@torch.no_grad()
def dependence(
    batches: tuple[Tensor, Tensor], depth: int, seed: int, operator: str | None, width: int, *, relu: bool
) -> float:
    """Return the mean cosine between the features of the same images in both batches."""
    torch.manual_seed(seed)
    widths = (width, 3 * width // 2, 2 * width)
    size = batches[0].shape[-1]
    model = sn.create_model(f"cnn-{depth}", operator=operator, widths=widths, input_size=size, relu=relu)
    first, second = (model.features(images)[:SHARED] for images in batches)
    return cosine_similarity(first - first.mean(0), second - second.mean(0)).mean().item()


def main() -> None:
    """Print one row per network: mean ± standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16, help="side length of the images")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="filters of the first stage (64 in the paper)")
    parser.add_argument("--no-relu", action="store_true", help="networks without ReLU")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    batches = two_batches(arguments.size, arguments.batch)
    print("layers".ljust(14), *(str(depth).rjust(14) for depth in DEPTHS))
    for operator in (None, "cosine", "sigmoid"):
        cells = []
        for depth in DEPTHS:
            cosines = [
                dependence(batches, depth, seed, operator, arguments.width, relu=not arguments.no_relu)
                for seed in range(arguments.seeds)
            ]
            cells.append(f"{mean(cosines):.3f} ± {stdev(cosines) if len(cosines) > 1 else 0:.3f}")
        print((operator or "convolution").ljust(14), *(cell.rjust(14) for cell in cells))


if __name__ == "__main__":
    main()
