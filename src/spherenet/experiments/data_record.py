"""What a run remembers of its data, and how they are compared when it is resumed or evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spherenet.data import Dataset, Split
from spherenet.errors import DataError

__all__ = ["data_record", "require_same_data"]

SPLITS = ("train", "test")
WORDS = {"train": "training", "test": "test"}


def data_record(dataset: Dataset) -> dict[str, Any]:
    """Return the classes and, for each split, its number of images per class and a hash of which images they are."""
    splits = {name: _split_record(getattr(dataset, name), len(dataset.classes)) for name in SPLITS}
    return {"classes": list(dataset.classes), **splits}


def _split_record(split: Split, classes: int) -> dict[str, Any]:
    return {"per_class": split.labels.bincount(minlength=classes).tolist(), "listing": split.listing_hash()}


def require_same_data(description: Mapping[str, Any], dataset: Dataset, remedy: str) -> None:
    """Raise DataError, naming what changed, unless the data are those that a run was started with.

    Args:
        description: The run's config.json. Runs of earlier versions recorded the classes only.
        dataset: The data as they are now.
        remedy: The end of the sentence: what the user can do.
    """
    now = data_record(dataset)
    classes = description.get("classes")
    if classes != now["classes"]:
        raise DataError(
            f"the classes must be those of the run ({_some(classes)}), got {_some(now['classes'])}; {remedy}."
        )
    before = description.get("data")
    if not isinstance(before, Mapping):
        return
    for name in SPLITS:
        saved, found = before.get(name), now[name]
        if not isinstance(saved, Mapping) or saved == found:
            continue
        change = _change(saved.get("per_class"), found["per_class"], now["classes"])
        raise DataError(
            f"the {WORDS[name]} images must be those that the run was started with, got {change}; {remedy}."
        )


def _change(saved: Any, found: list[int], classes: list[str]) -> str:
    """Name the first class whose number of images changed, else that they are others."""
    if isinstance(saved, list) and len(saved) == len(found):
        for label, (count, now) in enumerate(zip(saved, found, strict=True)):
            if count != now:
                return f"{now} of class {classes[label]!r} instead of {count}"
    return "as many, but others"


def _some(classes: Any) -> str:
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        return "none"
    return ", ".join(map(str, classes[:5])) + (f", … ({len(classes)})" if len(classes) > 5 else "")
