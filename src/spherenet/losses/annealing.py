"""The schedule by which a margin is let in: SphereFace's λ, falling from `start` to `floor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from spherenet.ops.arguments import require_number, require_positive

__all__ = ["DEFAULT_ANNEALING", "Annealing"]

Iteration = TypeVar("Iteration", float, Tensor)


@dataclass(frozen=True)
class Annealing:
    """λ(t) = max(floor, start / (1 + decay·t)) at iteration t = 0, 1, … (SPEC 1 (5)).

    The target's similarity is (λ·g(θ) + ψ_m(θ))/(1 + λ): at λ = 100 the loss is W-Softmax but for a hundredth,
    at λ = 5 a sixth of it is ψ. Without it a margin loss can push all feature norms to 0 and stay at chance.
    Raises ValueError or TypeError unless start ≥ floor ≥ 0 and decay ≥ 0.
    """

    start: float = 100.0
    decay: float = 0.2
    floor: float = 5.0

    def __post_init__(self) -> None:
        for name in ("start", "decay", "floor"):
            if require_number(name, getattr(self, name)) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}.")
        if self.start < self.floor:
            raise ValueError(f"start must be at least floor ({self.floor!r}), got {self.start!r}.")

    @classmethod
    def for_run(cls, iterations: int, start: float = 100.0, floor: float = 5.0, floor_at: float = 1 / 6) -> Annealing:
        """The schedule that comes to `floor` after the fraction `floor_at` of a run of so many iterations.

        A short and a long run pass through the same λ at the same fraction. The default is the published
        decay of 0.2 at a run of 600 iterations, where it was measured to train: floor after 1/6 of the run.
        Raises ValueError unless iterations > 0, floor > 0 and 0 < floor_at ≤ 1.
        """
        iterations_checked = require_positive("iterations", iterations)
        if require_positive("floor_at", floor_at) > 1:
            raise ValueError(f"floor_at must be a fraction of the run, at most 1, got {floor_at!r}.")
        ratio = require_number("start", start) / require_positive("floor", floor)
        return cls(start, max(0.0, ratio - 1) / (floor_at * iterations_checked), floor)

    def at(self, iteration: Iteration) -> Iteration:
        """λ at an iteration: a number for a number, a tensor for a tensor (nothing waits for the device)."""
        value = self.start / (1 + self.decay * iteration)
        return value.clamp_min(self.floor) if isinstance(value, Tensor) else max(self.floor, value)


DEFAULT_ANNEALING = Annealing()
"""What margin losses anneal by unless told; `Annealing.for_run` fits it to a longer or a shorter run."""
