"""ImageNet: resnet-18 plain, v1 (cosine and cosine W-Softmax) and v2 (cosine and softmax), single-crop validation.

SGD with momentum 0.9, learning rate 0.1 falling tenfold at 200K and 375K of 550K iterations, batch 40; pictures
resized to 256 × 256, random 224 crops, horizontal flips. Give the folder with train/ and val/ by --data-dir. Days on a
GPU. The cpu preset has no cells: the data are not to be had here.

    spherenet reproduce imagenet --preset paper --data-dir imagenet
"""

from __future__ import annotations

from typing import Any

from spherenet.experiments.experiment import Cell, Claim, Experiment, cifar
from spherenet.training.config import TrainConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"operator": None},
    "v1": {"operator": "cosine", "loss": "w-cosine", "shortcut": "operator"},
    "v2": {"operator": "cosine"},
}


def cells(preset: str) -> list[Cell]:
    """Three networks."""
    if preset == "cpu":
        return []
    if preset == "smoke":
        return [
            Cell(
                name,
                name,
                "resnet-18",
                cifar(preset, model="resnet-18", widths_cpu=(4, 4, 4, 4), optimizer="sgd", **options),
            )
            for name, options in VARIANTS.items()
        ]
    recipe: dict[str, Any] = {
        "data": "folder",
        "model": "resnet-18",
        "augmentation": "imagenet",
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "milestones": [200_000, 375_000],
        "iterations": 550_000,
        "batch_size": 40,
        "workers": 8,
        "eval_every": 5000,
        "checkpoint_every": 5000,
    }
    return [Cell(name, name, "resnet-18", TrainConfig(**recipe, **options)) for name, options in VARIANTS.items()]


EXPERIMENT = Experiment(
    "imagenet",
    "ImageNet, resnet-18",
    "single-crop validation accuracy over iterations",
    cells,
    (
        Claim(
            "SphereNets beat the plain residual network on ImageNet",
            "Figure: ImageNet",
            (("v1", "none"), ("v2", "none")),
        ),
    ),
)
