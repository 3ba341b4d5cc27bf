"""What an experiment is: a typed list of runs with the paper's values attached, and what it claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spherenet.experiments.config import TrainConfig

__all__ = ["PRESETS", "Cell", "Claim", "Experiment", "command_line"]

PRESETS = ("paper", "cpu", "smoke")


@dataclass(frozen=True)
class Cell:
    """One run of an experiment, but for its seed.

    name: of its folder, unique in the experiment. row, column: its place in the table. paper: the accuracy in per cent
    that the paper prints, None where it draws a curve. starts_from: the cell whose weights this one starts from.
    """

    name: str
    row: str
    column: str
    config: TrainConfig
    paper: float | None = None
    starts_from: str | None = None

    def described(self) -> dict[str, Any]:
        """The cell as experiment.json holds it."""
        return {name: value for name, value in asdict(self).items() if name != "config"}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that pairs of cells can confirm or refute: in each pair, the first beats the second.

    quantity: "accuracy" at the end; "early": the mean test accuracy over the evaluations of the first half of the run,
    higher for what converges faster; "steadiness": how little accuracy falls between these evaluations; "rise":
    how much larger the mean learned k is in the last convolution than in the first; "narrowing": how much closer
    together learned k lie at the head of the last stage than of the first. Both are 0 where k is not learned. source:
    where the paper says it.
    """

    text: str
    source: str
    pairs: tuple[tuple[str, str], ...]
    quantity: str = "accuracy"


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. cells: its runs for a preset."""

    id: str
    title: str
    shows: str
    cells: Callable[[str], list[Cell]]
    claims: tuple[Claim, ...] = field(default=())

    def claims_of(self, cells: list[Cell]) -> list[Claim]:
        """The claims as far as these cells can decide them."""
        names = {cell.name for cell in cells}
        kept = [
            Claim(
                claim.text, claim.source, tuple(pair for pair in claim.pairs if names.issuperset(pair)), claim.quantity
            )
            for claim in self.claims
        ]
        return [claim for claim in kept if claim.pairs]


def command_line(config: TrainConfig) -> list[str]:
    """The options of `spherenet train` that make this configuration: those that differ from the defaults."""
    options: list[str] = []
    for made in fields(TrainConfig):
        value = getattr(config, made.name)
        if value == made.default:
            continue
        options.append(f"--{made.name.replace('_', '-')}")
        options += [_word(part) for part in (value if isinstance(value, (list, tuple)) else [value])]
    return options


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
