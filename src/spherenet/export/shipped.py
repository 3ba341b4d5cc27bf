"""The model that comes with the package: a small SphereNet trained on CIFAR-10, as a saved folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["shipped_model"]


def shipped_model() -> Path:
    """Return the folder of the shipped model, for `load_model`, `load_metadata` and `spherenet predict`.

    Its model card says how it was trained and how well it does; its classes are CIFAR-10's ten.
    """
    return Path(__file__).with_name("cifar10-cnn-9-cosine")
