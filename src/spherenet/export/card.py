"""Model cards: architecture, training data and accuracy of a saved model as Markdown."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date

import torch
import yaml  # type: ignore[import-untyped]

from spherenet import __version__
from spherenet._util.text import markdown
from spherenet._util.validation import require_number
from spherenet.errors import InvalidArgument

__all__ = ["ModelCard", "library_versions"]

USAGE = """\
import torch
from spherenet.export import load_metadata, load_model

model = load_model("path/to/this/folder")
print(load_metadata("path/to/this/folder"))  # class names and preprocessing, if available
scores = model(torch.zeros({shape}))  # a batch of images; softmax turns scores into probabilities"""

LICENSES = ("apache-2.0", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "mit")
"""Names of licenses that model hubs know; others are "other"."""

Z_95 = 1.959964
"""Quantile of the standard normal distribution for a two-sided 95% interval."""


def library_versions() -> dict[str, str]:
    """Return the running versions of spherenet, torch and Python."""
    return {"spherenet": __version__, "torch": torch.__version__, "Python": platform.python_version()}


@dataclass(frozen=True)
class ModelCard:
    """Description of a model. Fields that are None do not appear in the text.

    Args:
        name: Title of the card.
        description: Introductory paragraph.
        architecture: Description of the network.
        trained_on: Training data and its size.
        accuracy: Accuracy as a fraction from 0 to 1.
        accuracy_n: Number of samples that the accuracy was measured on. The text adds the 95% interval.
        accuracy_on: Name of these samples.
        selection: Sentence that states how the weights were selected, e.g. the last ones of the training.
        command: Command that trained the model.
        versions: Library versions used in training.
        date: Date as it should be printed. The clock is never read.
        license: License of the model.
        intended_use: Intended use.
        limits: Known limitations.
        classes: Class names.
        input_shape: Shape of a batch of inputs, for the usage text.
        usage: Python code that replaces the default usage text.
        dataset: Name of the data set of these samples on a hub, e.g. "cifar10"; None derives one from accuracy_on.

    Raises:
        ValueError: If the name is empty, the accuracy outside of [0, 1] or the number of samples below 1.
        TypeError: If accuracy or accuracy_n is not a number.
    """

    name: str
    description: str | None = None
    architecture: str | None = None
    trained_on: str | None = None
    accuracy: float | None = None
    accuracy_n: int | None = None
    accuracy_on: str | None = None
    selection: str | None = None
    command: str | None = None
    versions: Mapping[str, str] | None = None
    date: str | Date | None = None
    license: str | None = None
    intended_use: str | None = None
    limits: str | None = None
    classes: Sequence[str] | None = None
    input_shape: Sequence[int] | None = None
    usage: str | None = None
    dataset: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidArgument("name", f"must be a string that is not empty, got {self.name!r}.")
        if self.accuracy is not None and not 0 <= require_number("accuracy", self.accuracy) <= 1:
            raise InvalidArgument("accuracy", f"must be a fraction from 0 to 1, got {self.accuracy!r}.")
        if self.accuracy_n is not None and require_number("accuracy_n", self.accuracy_n) < 1:
            raise InvalidArgument("accuracy_n", f"must be at least 1, got {self.accuracy_n!r}.")

    def to_markdown(self) -> str:
        """Return the card as Markdown, with one section per field that is not None."""
        classes, versions, usage = self.classes, self.versions or {}, self.usage
        if usage is None:
            usage = USAGE.format(shape=", ".join(map(str, self.input_shape or (1, 3, 32, 32))))
        sections = {
            "Model": self.architecture,
            "Training data": self.trained_on,
            "Accuracy": self._accuracy_text(),
            "Command": None if self.command is None else _code_block(self.command, "bash"),
            "Versions": ", ".join(markdown(f"{name} {version}") for name, version in versions.items()),
            "Date": None if self.date is None else str(self.date),
            "Classes": None if classes is None else f"{len(classes)}: {', '.join(map(markdown, classes))}.",
            "Intended use": self.intended_use,
            "Limits": self.limits,
            "License": self.license,
            "Usage": _code_block(usage, "python"),
        }
        paragraphs = [f"# {markdown(_one_line(self.name))}"]
        paragraphs += [] if self.description is None else [self.description.strip()]
        paragraphs += [f"## {title}\n\n{text.strip()}" for title, text in sections.items() if text]
        return "\n\n".join(paragraphs) + "\n"

    def to_hub_page(self) -> str:
        """Return the card with a YAML header, as model hubs read it: library, task, license and accuracy."""
        header: dict[str, object] = {
            "library_name": "spherenet",
            "pipeline_tag": "image-classification",
            "tags": ["hyperspherical-learning", "pytorch", "spherenet"],
        }
        if self.license is not None:
            header["license"] = self.license.lower() if self.license.lower() in LICENSES else "other"
        if self.accuracy is not None:
            name = _one_line(self.dataset or self.accuracy_on or "unknown")
            dataset = {"name": name, "type": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"}
            metric = {"type": "accuracy", "value": round(float(self.accuracy), 6)}
            result = {"task": {"type": "image-classification"}, "dataset": dataset, "metrics": [metric]}
            header["model-index"] = [{"name": _one_line(self.name), "results": [result]}]
        return f"---\n{yaml.safe_dump(header, allow_unicode=True, sort_keys=False)}---\n\n{self.to_markdown()}"

    def _accuracy_text(self) -> str | None:
        if self.accuracy is None:
            return None
        samples = "" if self.accuracy_on is None else f" on {markdown(_one_line(self.accuracy_on))}"
        selection = "" if self.selection is None else f" {markdown(_one_line(self.selection))}"
        if self.accuracy_n is None:
            return f"{self.accuracy:.2%}{samples}.{selection}"
        low, high = wilson_interval(self.accuracy, self.accuracy_n)
        interval = f"95% interval {low:.2%} to {high:.2%}"
        return f"{self.accuracy:.2%}{samples} (n = {self.accuracy_n:,}; {interval}).{selection}"


def wilson_interval(fraction: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a fraction of n independent samples."""
    spread = Z_95 * math.sqrt(fraction * (1 - fraction) / n + Z_95**2 / (4 * n * n))
    center, denominator = fraction + Z_95**2 / (2 * n), 1 + Z_95**2 / n
    return max(0.0, (center - spread) / denominator), min(1.0, (center + spread) / denominator)


def _code_block(text: str, language: str) -> str:
    """Return a Markdown code block whose fence is longer than any fence in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
