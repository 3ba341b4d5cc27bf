"""GA-Softmax and A-Softmax: W-Softmax with a multiplicative margin on the target angle, and its annealing schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spherenet.angles import DEFAULT_K, AngleFunction
from spherenet.losses.softmax import WSoftmaxLoss
from spherenet.ops.margins import psi
from spherenet.validation import require_number, require_positive

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["DEFAULT_ANNEALING", "ASoftmaxLoss", "Annealing", "GASoftmaxLoss", "obsolete_state"]


@dataclass(frozen=True)
class Annealing:
    """Schedule of λ (Eq. 5): λ(t) = max(floor, start / (1 + decay·t)) at iteration t.

    The similarity of the target is (λ·g(θ) + ψ_m(θ))/(1 + λ). At λ = 100 the loss is almost W-Softmax; at λ = 5 the
    margin function ψ has a weight of 1/6. Without annealing, a margin loss can drive all feature norms to 0 and stay at
    chance level.

    Args:
        start: λ at iteration 0.
        decay: Speed at which λ decreases, at least 0.
        floor: Smallest λ, from 0 to `start`.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
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
        """Return a schedule that fits the length of a run.

        Short and long runs have the same λ at the same fraction of the run. The default corresponds to the published
        decay of 0.2 in a run of 600 iterations.

        Args:
            iterations: Length of the run.
            start: λ at iteration 0.
            floor: Smallest λ, greater than 0.
            floor_at: Fraction of the run after which λ reaches `floor`, at most 1.

        Raises:
            ValueError: If an argument is out of range.
        """
        length = require_positive("iterations", iterations)
        if require_positive("floor_at", floor_at) > 1:
            raise ValueError(f"floor_at must be a fraction of the run, at most 1, got {floor_at!r}.")
        ratio = require_number("start", start) / require_positive("floor", floor)
        return cls(start, max(0.0, ratio - 1) / (floor_at * length), floor)

    def at(self, iteration: float) -> float:
        """Return λ at an iteration."""
        return max(self.floor, self.start / (1 + self.decay * iteration))


DEFAULT_ANNEALING = Annealing()
"""Default schedule of margin losses; `Annealing.for_run` fits a schedule to the length of a run."""


class GASoftmaxLoss(WSoftmaxLoss):
    """Generalized angular softmax (Eq. 5): the target class must win at m times its angle.

        z_j = ‖x‖·g(θ_j) + b_j
        z_y = ‖x‖·(λ·g(θ_y) + ψ_m(θ_y))/(1 + λ) + b_y    for the target class y

    The caller sets λ: a training loop calls `set_step` before each iteration, or assigns `lambda_`. Until then λ is the
    floor of the schedule, i.e. the margin has its final strength. The loss itself counts nothing, and λ is not saved
    with the model.

    Args:
        angle: "linear" (no saddle points, the best loss of the paper), "cosine" (A-Softmax), "sigmoid" or an
            `AngleFunction` object.
        m: Margin, at least 1; m = 1 is W-Softmax.
        k: Parameter of the sigmoid; not allowed with another angle function.
        annealing: Schedule of λ, or None for λ = 0. It can be replaced at any time, which sets λ to the new floor.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> loss = GASoftmaxLoss(m=4, annealing=Annealing.for_run(iterations))
        >>> for step in range(iterations):
        ...     loss.set_step(step)
        ...     loss(head(features), labels).backward()
    """

    lambda_: float
    """Weight λ of g against ψ in the target's similarity."""

    def __init__(
        self,
        angle: str | AngleFunction = "linear",
        m: float = 4,
        k: float = DEFAULT_K,
        *,
        annealing: Annealing | None = DEFAULT_ANNEALING,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(angle, k, **cross_entropy)
        if require_number("m", m) < 1:
            raise ValueError(f"m must be at least 1, got {m!r}.")
        self.m = float(m)
        self.annealing = annealing

    @property
    def annealing(self) -> Annealing | None:
        """Schedule of λ."""
        return self._annealing

    @annealing.setter
    def annealing(self, annealing: Annealing | None) -> None:
        if annealing is not None and not isinstance(annealing, Annealing):
            raise TypeError(f"annealing must be an Annealing or None, got {annealing!r}.")
        self._annealing = annealing
        self.lambda_ = 0.0 if annealing is None else float(annealing.floor)

    @property
    def current_lambda(self) -> float:
        """λ of the next loss, for logging."""
        return self.lambda_

    def set_step(self, step: int) -> None:
        """Set λ to its value at an iteration of the schedule; without a schedule λ stays as it is.

        Args:
            step: Number of the iteration, from 0.
        """
        if self._annealing is not None:
            self.lambda_ = float(self._annealing.at(step))

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return (λ·g(θ) + ψ_m(θ))/(1 + λ)."""
        with_margin = psi(cosine, self.m, self.angle)
        if self.lambda_ == 0:
            return with_margin
        blend: Tensor = (self.lambda_ * self.angle(cosine) + with_margin) / (1 + self.lambda_)
        return blend

    def extra_repr(self) -> str:
        """Return the margin, its schedule and the options that differ from their defaults."""
        return ", ".join(filter(None, (f"m={self.m:g}, annealing={self._annealing}", super().extra_repr())))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a state dict; earlier versions saved a counter of iterations, which is dropped."""
        state_dict.pop(f"{prefix}iteration", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ASoftmaxLoss(GASoftmaxLoss):
    """Angular softmax of SphereFace (Eq. 5): GA-Softmax with g = cosine.

    Args:
        m: Margin, at least 1.
        annealing: Schedule of λ, or None for λ = 0, as in `GASoftmaxLoss`.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    def __init__(
        self,
        m: float = 4,
        *,
        annealing: Annealing | None = DEFAULT_ANNEALING,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__("cosine", m, annealing=annealing, **cross_entropy)


def obsolete_state(model: nn.Module) -> set[str]:
    """Return the names in state dicts of earlier versions that a model no longer has and ignores when it loads them."""
    margins = (name for name, module in model.named_modules() if isinstance(module, GASoftmaxLoss))
    return {f"{name}.iteration" if name else "iteration" for name in margins}
