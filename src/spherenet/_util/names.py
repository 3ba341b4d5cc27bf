"""Suggestions for public names that do not exist: names of papers and of other libraries, and similar ones."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

__all__ = ["missing_name"]

SYNONYMS: dict[str, tuple[str, ...]] = {
    "sphereface": ("ASoftmaxLoss", "SphereFace2Loss"),
    "spherefacer": ("ASoftmaxLoss",),
    "angularsoftmax": ("ASoftmaxLoss",),
    "arcface": ("ArcFaceLoss",),
    "additiveangularmargin": ("ArcFaceLoss",),
    "aamsoftmax": ("ArcFaceLoss",),
    "cosface": ("CosFaceLoss",),
    "amsoftmax": ("CosFaceLoss",),
    "largemargincosine": ("CosFaceLoss",),
    "normface": ("SSoftmaxLoss",),
    "normalizedsoftmax": ("SSoftmaxLoss",),
    "normsoftmax": ("SSoftmaxLoss",),
    "crossentropy": ("SoftmaxLoss",),
    "sphereconv": ("SphereConv2d",),
    "cosineconv2d": ("SphereConv2d",),
    "spherenet": ("create_model",),
    "spheredense": ("SphereLinear",),
    "cosinelinear": ("SphereLinear", "AngularHead"),
    "cosineclassifier": ("AngularHead",),
    "arcmarginproduct": ("AngularHead", "ArcFaceLoss"),
    "convertmodel": ("to_sphere",),
    "mhe": ("hyperspherical_energy",),
    "minimumhypersphericalenergy": ("hyperspherical_energy",),
}
"""Other names, in lower case without underscores and the ending "loss", with the public names that they mean."""


def missing_name(name: str, names: Sequence[str]) -> str:
    """Return the message of an AttributeError: which name spherenet does not have, and which ones may be meant."""
    reduced = name.replace("_", "").lower().removesuffix("loss")
    meant = SYNONYMS.get(reduced) or tuple(get_close_matches(name, names, n=2))
    if not meant:  # difflib compares letters exactly
        lower = {other.lower(): other for other in names}
        meant = tuple(lower[match] for match in get_close_matches(name.lower(), lower, n=2))
    hint = f"; did you mean {' or '.join(f'spherenet.{other}' for other in meant)}?" if meant else "."
    return f"module 'spherenet' has no attribute {name!r}{hint}"
