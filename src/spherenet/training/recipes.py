"""Recipes: named sets of options, which `spherenet train --recipe NAME` uses as defaults.

A recipe only lists what differs from the defaults of `TrainConfig`. `--print-config` shows the result, and any option
overrides it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RECIPES", "recipe"]

RECIPES: dict[str, dict[str, Any]] = {
    # 8 epochs of 25 steps, with the rates of the public record. Its loss is a sum: rates and decay of biases and class
    # weights are per image.
    "speed": {
        "data": "cifar10",
        "augmentation": "translate",
        "model": "air",
        "initialization": "dirac",
        "loss": "softmax:label_smoothing=0.2",
        "epochs": 8.0,
        "batch_size": 2000,
        "optimizer": "muon:momentum=0.6",  # its other defaults are those of the record
        "learning_rate": 0.24,
        "schedule": "linear",
        "weight_decay": 2e-6,
        "decay_all": True,
        "orthogonality": 0.0,
        "eval_every": 25,
        "eval_batch_size": 1000,
        "tta": "mirror-shift",
        "precision": "bfloat16",
        "log_every": 5,
        "checkpoint_every": 25,
        "probes": False,
    },
    # Section 4 of the paper's appendix: Adam, divided by 10 at 34K and 54K of 64K iterations.
    "paper-cifar": {
        "data": "cifar10",
        "augmentation": "flip",
        "model": "cnn-9",
        "iterations": 64000,
        "eval_every": 500,
        "checkpoint_every": 1000,
    },
    "paper-imagenet": {
        "augmentation": "imagenet",
        "image_size": 224,
        "model": "resnet-18",
        "iterations": 550000,
        "batch_size": 40,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "milestones": [200000, 375000],
        "eval_every": 5000,
        "checkpoint_every": 5000,
    },
}


def recipe(name: str) -> dict[str, Any]:
    """Return the options of a recipe.

    Raises:
        ValueError: If there is no such recipe.
    """
    if name not in RECIPES:
        from spherenet._util.validation import require_one_of  # imports torch, which help texts do without

        require_one_of("recipe", name, RECIPES)
    return dict(RECIPES[name])
