"""The model card: what a saved model is, what it was trained on and how well it does, as Markdown."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date

import torch

from spherenet import __version__
from spherenet.text import markdown
from spherenet.validation import require_number

__all__ = ["ModelCard", "library_versions"]

USAGE = """\
import torch
from spherenet.export import load_metadata, load_model

model = load_model("path/to/this/folder")
print(load_metadata("path/to/this/folder"))  # class names and preprocessing, where they are known
scores = model(torch.zeros({shape}))  # a batch of images; softmax turns scores into probabilities"""

Z_95 = 1.959964
"""Standard deviations of a normal distribution that hold 95 % of it."""


def library_versions() -> dict[str, str]:
    """The versions of what runs now: spherenet, torch and Python."""
    return {"spherenet": __version__, "torch": torch.__version__, "Python": platform.python_version()}


@dataclass(frozen=True)
class ModelCard:
    """What there is to say about a model; what is not known is left out of the text, never invented.

    trained_on: the data, with its size. accuracy: a fraction from 0 to 1 of `accuracy_n` samples of `accuracy_on`; the
    text adds the 95 % interval that so many samples allow. command: what was run. versions: of the libraries it was
    run with. date: as it should be printed; no clock is read. input_shape: of one batch, for the usage text.
    Raises ValueError or TypeError for an accuracy outside [0, 1] or a number of samples below 1.
    """

    name: str
    description: str | None = None
    architecture: str | None = None
    trained_on: str | None = None
    accuracy: float | None = None
    accuracy_n: int | None = None
    accuracy_on: str | None = None
    command: str | None = None
    versions: Mapping[str, str] | None = None
    date: str | Date | None = None
    license: str | None = None
    intended_use: str | None = None
    limits: str | None = None
    classes: Sequence[str] | None = None
    input_shape: Sequence[int] | None = None
    usage: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name must be a word or more, got {self.name!r}.")
        if self.accuracy is not None and not 0 <= require_number("accuracy", self.accuracy) <= 1:
            raise ValueError(f"accuracy must be a fraction from 0 to 1, got {self.accuracy!r}.")
        if self.accuracy_n is not None and require_number("accuracy_n", self.accuracy_n) < 1:
            raise ValueError(f"accuracy_n must be at least 1, got {self.accuracy_n!r}.")

    def to_markdown(self) -> str:
        """The card as Markdown, one section for each thing that is known."""
        sections = {
            "Model": self.architecture,
            "Training data": self.trained_on,
            "Accuracy": self._accuracy_text(),
            "Command": None if self.command is None else _fenced(self.command, "bash"),
            "Versions": self._versions_text(),
            "Date": None if self.date is None else str(self.date),
            "Classes": None
            if self.classes is None
            else f"{len(self.classes)}: {', '.join(map(markdown, self.classes))}.",
            "Intended use": self.intended_use,
            "Limits": self.limits,
            "License": self.license,
            "Usage": _fenced(self._usage_text(), "python"),
        }
        parts = [f"# {markdown(_one_line(self.name))}"]
        parts += [] if self.description is None else [self.description.strip()]
        parts += [f"## {title}\n\n{text.strip()}" for title, text in sections.items() if text]
        return "\n\n".join(parts) + "\n"

    def _accuracy_text(self) -> str | None:
        if self.accuracy is None:
            return None
        where = "" if self.accuracy_on is None else f" on {markdown(_one_line(self.accuracy_on))}"
        if self.accuracy_n is None:
            return f"{self.accuracy:.2%}{where}."
        low, high = wilson_interval(self.accuracy, self.accuracy_n)
        return f"{self.accuracy:.2%}{where} (n = {self.accuracy_n:,}; 95 % interval {low:.2%} to {high:.2%})."

    def _classes_text(self) -> str | None:
        if self.classes is None:
            return None
        return f"{len(self.classes)}: {', '.join(map(markdown, self.classes))}."

    def _versions_text(self) -> str | None:
        return ", ".join(markdown(f"{name} {version}") for name, version in (self.versions or {}).items()) or None

    def _usage_text(self) -> str:
        if self.usage is not None:
            return self.usage
        return USAGE.format(shape=", ".join(map(str, self.input_shape or (1, 3, 32, 32))))


def wilson_interval(fraction: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a fraction that was seen in n independent samples, by Wilson's formula."""
    spread = Z_95 * math.sqrt(fraction * (1 - fraction) / n + Z_95**2 / (4 * n * n))
    centre, shrink = fraction + Z_95**2 / (2 * n), 1 + Z_95**2 / n
    return max(0.0, (centre - spread) / shrink), min(1.0, (centre + spread) / shrink)


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
