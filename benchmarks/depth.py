"""How much of a picture's class a deep plain network still shows at initialisation, layer by layer.

A linear classifier (ridge regression, its strength chosen by cross-validation) is fitted to the maps after a layer,
averaged to 2 × 2, of some pictures and asked about others: chance is 10 %. What the last layers do not see, they
cannot learn from before the first layers have learned. Needs CIFAR-10 (SPHERENET_DATA). Minutes on one core.

    python benchmarks/depth.py
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

import spherenet as sn
from spherenet.data import load_dataset

LAYERS_A_STAGE = 23
NETWORKS = {
    "convolution, BatchNorm": {"operator": None},
    "cosine, BatchNorm": {"operator": "cosine"},
    "convolution, BatchNorm, no ReLU": {"operator": None, "relu": False},
    "cosine, BatchNorm, no ReLU": {"operator": "cosine", "relu": False},
    "cosine alone (SphereNorm)": {"operator": "cosine", "batch_norm": False},
}


def share_right(maps: Tensor, labels: Tensor) -> float:
    """Of the last quarter of the pictures, how many a classifier fitted to the others names rightly, in %."""
    features, fitted = adaptive_avg_pool2d(maps, 2).flatten(1).numpy(), len(maps) * 3 // 4
    classifier = make_pipeline(StandardScaler(), RidgeClassifierCV(np.logspace(0, 4, 9)))
    classifier.fit(features[:fitted], labels[:fitted])
    return 100 * float(classifier.score(features[fitted:], labels[fitted:]))


def by_depth(images: Tensor, labels: Tensor, seed: int, **options: object) -> list[float]:
    """The shares after layers 6, 23, 46 and 69 of cnn-69 in training mode."""
    torch.manual_seed(seed)
    model = sn.create_model("cnn-69", widths=(16, 24, 32), input_size=16, **options)  # type: ignore[arg-type]
    found: list[float] = []
    stages = model.features.stages  # type: ignore[union-attr]
    for module in (stages[0][5], *stages):  # type: ignore[index,misc]
        module.register_forward_hook(lambda module, inputs, output: found.append(share_right(output, labels)))
    with torch.no_grad():
        model.features(images)
    return found


def main() -> None:
    """Print a row a network, mean ± standard deviation over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    test = load_dataset("cifar10", image_size=16).test
    order = [(0, torch.arange(arguments.pictures))]
    batch = next(test.batches(order, device=torch.device("cpu"), augmentation=None))
    print(f"the pictures themselves: {share_right(batch.images, batch.labels):.1f}")
    print(f"{'after layer':34}" + "".join(f"{layer:<14}" for layer in (6, *(n * LAYERS_A_STAGE for n in (1, 2, 3)))))
    for name, options in NETWORKS.items():
        rows = [by_depth(batch.images, batch.labels, seed, **options) for seed in range(arguments.seeds)]
        cells = [f"{mean(column):.1f} ± {stdev(column):.1f}" for column in zip(*rows, strict=True)]
        print(f"{name:34}" + "".join(f"{cell:<14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
