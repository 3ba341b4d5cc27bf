"""How much of a picture's features at initialisation is the picture, and how much the batch it came in, by depth.

BatchNorm makes every picture's answer depend a little on the rest of its batch, and a deep network of random weights
magnifies small differences. Eight pictures go through a network in training mode in two batches that share nothing
else; printed is the mean cosine between the two answers, the mean over the eight being taken off. 1: the picture alone
decides; 0: the batch does. Needs CIFAR-10 (SPHERENET_DATA). A minute on one core.

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
    """Two batches of test pictures that begin with the same eight."""
    test = load_dataset("cifar10", image_size=size).test
    order = [(0, torch.arange(batch)), (0, torch.arange(batch, 2 * batch))]
    first, second = (made.images for made in test.batches(order, device=torch.device("cpu"), augmentation=None))
    second[:SHARED] = first[:SHARED]
    return first, second


@torch.no_grad()
def dependence(
    batches: tuple[Tensor, Tensor], depth: int, seed: int, operator: str | None, width: int, *, relu: bool
) -> float:
    """The mean cosine between the features of the same pictures in both batches."""
    torch.manual_seed(seed)
    widths = (width, 3 * width // 2, 2 * width)
    size = batches[0].shape[-1]
    model = sn.create_model(f"cnn-{depth}", operator=operator, widths=widths, input_size=size, relu=relu)
    first, second = (model.features(images)[:SHARED] for images in batches)
    return cosine_similarity(first - first.mean(0), second - second.mean(0)).mean().item()


def main() -> None:
    """Print a row a network, mean ± standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16, help="side of the pictures")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="of the first stage; the paper's is 64")
    parser.add_argument("--no-relu", action="store_true", help="leave ReLU out")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    batches = two_batches(arguments.size, arguments.batch)
    print("layers".ljust(14), *(str(depth).rjust(14) for depth in DEPTHS))
    for operator in (None, "cosine", "sigmoid"):
        cells = []
        for depth in DEPTHS:
            found = [
                dependence(batches, depth, seed, operator, arguments.width, relu=not arguments.no_relu)
                for seed in range(arguments.seeds)
            ]
            cells.append(f"{mean(found):.3f} ± {stdev(found) if len(found) > 1 else 0:.3f}")
        print((operator or "convolution").ljust(14), *(cell.rjust(14) for cell in cells))


if __name__ == "__main__":
    main()
