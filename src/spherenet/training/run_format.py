"""What config.json of a run records: its options and its data, and whether the data are still the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spherenet.data import Dataset, FolderSplit, Split
from spherenet.errors import DataError, RunError
from spherenet.runs import RunDirectory
from spherenet.training.config import TrainConfig

__all__ = ["SPLITS", "broken_of", "config_of", "data_record", "parse_config", "require_same_data"]

SPLITS = {"train": "training", "validation": "validation", "test": "test"}
"""Names of the splits in messages."""

MAX_NAMED = 3
"""Number of changed classes that a message names."""


def config_of(run: RunDirectory) -> TrainConfig:
    """Return the configuration of a run. Raises RunError if config.json does not contain one."""
    return parse_config(run, run.config)


def parse_config(run: RunDirectory, description: dict[str, Any]) -> TrainConfig:
    """Return the configuration in the content of config.json. Raises RunError if there is none."""
    if description.get("format") != 1 or not isinstance(description.get("train"), dict):
        raise RunError(f"{run.path} is not a training run that this version can read.")
    try:
        return TrainConfig.from_dict(description["train"])
    except TypeError as error:
        raise RunError(f"{run.path} has the configuration of another version: {error}") from None
    except ValueError as error:
        raise RunError(f"{run.path} has an invalid configuration: {error}") from None


def data_record(dataset: Dataset) -> dict[str, Any]:
    """Return the images that were left out and, per split, what identifies its images."""
    splits = {name: split for name in SPLITS if (split := getattr(dataset, name)) is not None}
    records = {name: _split_record(split, len(dataset.classes)) for name, split in splits.items()}
    return {"broken": list(dataset.broken), **records}


def _split_record(split: Split, classes: int) -> dict[str, Any]:
    """Return the number of images per class, a hash of all images and, for a folder, of the names per class."""
    record = {"per_class": split.labels.bincount(minlength=classes).tolist(), "listing": split.listing_hash()}
    return {**record, "names": split.class_hashes(classes)} if isinstance(split, FolderSplit) else record


def broken_of(description: Mapping[str, Any]) -> list[str]:
    """Return the images that a run has left out because they could not be read."""
    data = description.get("data")
    broken = data.get("broken") if isinstance(data, Mapping) else None
    return [path for path in broken if isinstance(path, str)] if isinstance(broken, list) else []


def require_same_data(
    description: Mapping[str, Any], dataset: Dataset, current: Mapping[str, Any], remedy: str
) -> None:
    """Raise DataError, naming the change, if the data are not those that a run was started with.

    Args:
        description: The run's config.json.
        dataset: Current data.
        current: Their `data_record`.
        remedy: End of the sentence: what the user can do.
    """
    names = list(dataset.classes)
    classes = description.get("classes")
    if classes != names:
        raise DataError(
            f"the classes must be those of the run ({_first_classes(classes)}), got {_first_classes(names)}; {remedy}."
        )
    before = description.get("data")
    for split, title in SPLITS.items():
        saved = before.get(split) if isinstance(before, Mapping) else None
        record: Any = current.get(split)
        if not isinstance(saved, Mapping):
            continue
        if record is None or any(saved.get(name) != record[name] for name in ("per_class", "listing")):
            change = "none" if record is None else _describe_change(saved, record, names)
            raise DataError(f"the {title} images must be those that the run was started with, got {change}; {remedy}.")


def _describe_change(saved: Mapping[str, Any], current: Mapping[str, Any], classes: list[str]) -> str:
    """Name the classes whose number of images or names of images changed."""
    changes: list[str] = []
    for key, text in (("per_class", "{now} of class {name!r} instead of {before}"), ("names", "others of {name!r}")):
        old, new = saved.get(key), current.get(key)
        if not changes and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            changes = [
                text.format(now=now, name=name, before=before)
                for name, before, now in zip(classes, old, new, strict=True)
                if before != now
            ]
    more = f" and {len(changes) - MAX_NAMED} more" if len(changes) > MAX_NAMED else ""
    return ", ".join(changes[:MAX_NAMED]) + more if changes else "the same number of other images"


def _first_classes(classes: Any) -> str:
    if not isinstance(classes, Sequence) or isinstance(classes, str):
        return "none"
    return ", ".join(map(str, classes[:5])) + (f", … ({len(classes)})" if len(classes) > 5 else "")
