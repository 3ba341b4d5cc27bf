"""Multiplicative margins: GA-Softmax and A-Softmax, with their scale, margin forms and annealing.

Both, and `SSoftmaxLoss`, are one loss with different defaults. Its options are independent of each other:

    operator          g                             "linear", "cosine", "sigmoid" or an object
    m                 margin                        1 for none
    scale             S in z = S·similarity         "norm" for ‖x‖, a number, "auto" for one that fits the classes
    margin_gradient   gradient of the margin        "full", or "detached" for the gradient of m = 1 (Eq. 16)
    form              margin function               "psi" (Eq. 6), "r1" or "r2" (Eq. 17)
    annealing         schedule of the margin        Eq. 7
    feature_penalty   soft feature normalization    Eq. 19
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from spherenet._util.validation import require_number, require_one_of, require_positive
from spherenet.angles import AngleFunction, angle_from_cosine
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.losses.arguments import MarginOptions, angle_of_loss, default_scale
from spherenet.losses.base import AngularLoss

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


__all__ = ["ASoftmaxLoss", "Annealing", "GASoftmaxLoss", "MarginLoss"]

MARGIN_FORMS = ("psi", "r1", "r2")
PENALTY_FORMS = ("squared", "absolute")

DEFAULT_M = 1.5
"""Default margin: with the detached gradient it costs no accuracy at a scale of 10, and gains some at 30."""


@dataclass(frozen=True)
class Annealing:
    """Schedule of λ (Eq. 7): λ(t) = max(floor, start / (1 + decay·t)^power) at iteration t.

    The similarity of the target is (λ·g(θ) + ψ_m(θ))/(1 + λ). At λ = 100 the loss is almost that of m = 1; at λ = 5 the
    margin function ψ has a weight of 1/6. With the full margin gradient and without annealing, a margin loss can drive
    all feature norms to 0 and stay at chance level.

    `sphereface`, `clcarwin` and `l_softmax` return published schedules. They are made for runs of 20,000 iterations or
    more; `for_run` fits a schedule to any length.

    Args:
        start: λ at iteration 0.
        decay: Speed at which λ decreases, at least 0.
        floor: Smallest λ, from 0 to `start`.
        power: Exponent of the decrease, at least 0.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If an argument is out of range.
    """

    start: float = 100.0
    decay: float = 0.2
    floor: float = 5.0
    power: float = 1.0

    def __post_init__(self) -> None:
        for name in ("start", "decay", "floor", "power"):
            if require_number(name, getattr(self, name)) < 0:
                raise InvalidArgument(name, f"must be at least 0, got {getattr(self, name)!r}.")
        if self.start < self.floor:
            raise InvalidArgument("start", f"must be at least floor ({self.floor!r}), got {self.start!r}.")

    @classmethod
    def sphereface(cls) -> Annealing:
        """Return the schedule of SphereFace (Liu et al., CVPR 2017): max(5, 1000/(1 + 0.12·t))."""
        return cls(1000.0, 0.12, 5.0)

    @classmethod
    def clcarwin(cls) -> Annealing:
        """Return the schedule of the widespread PyTorch port of SphereFace by clcarwin: max(5, 1500/(1 + 0.1·t))."""
        return cls(1500.0, 0.1, 5.0)

    @classmethod
    def l_softmax(cls) -> Annealing:
        """Return the schedule of L-Softmax (Liu et al., ICML 2016), made for m = 2: 1000·(1 + 2e-5·t)^−45."""
        return cls(1000.0, 2e-5, 0.0, 45.0)

    @classmethod
    def for_run(cls, iterations: int, start: float = 100.0, floor: float = 5.0, floor_at: float = 1 / 6) -> Annealing:
        """Return a schedule that fits the length of a run.

        Short and long runs have the same λ at the same fraction of the run. The default corresponds to a decay of 0.2
        in a run of 600 iterations.

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
            raise InvalidArgument("floor_at", f"must be a fraction of the run, at most 1, got {floor_at!r}.")
        ratio = require_number("start", start) / require_positive("floor", floor)
        return cls(start, max(0.0, ratio - 1) / (floor_at * length), floor)

    def at(self, iteration: float) -> float:
        """Return λ at an iteration."""
        growth = 1 + self.decay * iteration
        # A negative power of a large number is 0; a positive one would overflow.
        decreased = self.start / growth if self.power == 1 else self.start * math.pow(growth, -self.power)
        return max(self.floor, decreased)


class FeaturePenalty(AngularLoss):
    """Losses with a penalty that pulls feature norms to a number (Eq. 19); `GASoftmaxLoss` documents the options."""

    def __init__(
        self,
        *,
        feature_penalty: float = 0.0,
        feature_norm: float | Literal["auto"] | None = "auto",
        penalty_form: str = "squared",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.feature_penalty = require_number("feature_penalty", feature_penalty)
        automatic = feature_norm is None or feature_norm == "auto"
        self._feature_norm = None if automatic else require_positive("feature_norm", feature_norm)
        self.penalty_form = require_one_of("penalty_form", penalty_form, PENALTY_FORMS)
        if self.feature_penalty < 0:
            raise InvalidArgument("feature_penalty", f"must be at least 0, got {feature_penalty!r}.")
        if self.feature_penalty > 0 and self.scale != "norm":
            raise InvalidArgument(
                "feature_penalty",
                f'must be 0 unless scale is "norm", got {feature_penalty!r} with scale={self.scale!r}, '
                "which does not depend on the norm.",
            )
        if self.feature_penalty == 0:
            defaults = {"feature_norm": (self.feature_norm, "auto"), "penalty_form": (penalty_form, "squared")}
            for name, (value, default) in defaults.items():
                if value != default:
                    raise InvalidArgument(name, f"must be left out unless feature_penalty is set, got {value!r}.")
        if self.feature_penalty > 0 and automatic:
            self._similarity_at_45 = self._measure_similarity_at_45()

    @property
    def feature_norm(self) -> float | Literal["auto"]:
        """Norm to which the penalty pulls features."""
        return self._feature_norm or "auto"

    def row_penalty(self, feature_norm: Tensor, num_classes: int) -> Tensor | None:
        """Return the penalty of each row, None if its weight is 0."""
        if self.feature_penalty == 0:
            return None
        target = self._feature_norm or default_scale(num_classes, self._similarity_at_45)
        # Limited so that the square of a huge norm does not overflow; the gradient there is 0.
        difference = (feature_norm - target).clamp_max(torch.finfo(feature_norm.dtype).max ** 0.4)
        return self.feature_penalty * (difference.square() if self.penalty_form == "squared" else difference.abs())


class MarginLoss(FeaturePenalty):
    """Softmax with a multiplicative margin, base class of `GASoftmaxLoss` and `SSoftmaxLoss`.

    The caller sets λ: a training loop calls `set_step` before each iteration, or assigns `lambda_`. Until then λ is the
    floor of the schedule, i.e. the margin has its final strength. The loss itself counts nothing, and λ is not saved
    with the model.
    """

    angle: AngleFunction
    option_defaults = {"scale": "auto", "margin_gradient": "detached"}  # noqa: RUF012

    def __init__(
        self,
        angle: AngleFunction,
        m: float,
        *,
        form: str = "psi",
        annealing: Annealing | None = None,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = dict(self.option_defaults)
        super().__init__(operator=angle, **(defaults | options))
        if require_number("m", m) < 1:
            raise InvalidArgument("m", f"must be at least 1, got {m!r}.")
        self.m = float(m)
        self.form = require_one_of("form", form, MARGIN_FORMS)
        self.annealing = annealing

    @property
    def annealing(self) -> Annealing | None:
        """Schedule of λ; assigning one sets λ to its floor."""
        return self._annealing

    @annealing.setter
    def annealing(self, annealing: Annealing | None) -> None:
        if annealing is not None and not isinstance(annealing, Annealing):
            raise InvalidArgumentType("annealing", f"must be an Annealing or None, got {annealing!r}.")
        self._annealing = annealing
        self.lambda_ = 0.0 if annealing is None else float(annealing.floor)

    @property
    def lambda_(self) -> float:
        """Weight λ of g against the margin function, at least 0."""
        return self._lambda

    @lambda_.setter
    def lambda_(self, value: float) -> None:
        if require_number("lambda_", value) < 0:
            raise InvalidArgument("lambda_", f"must be at least 0, got {value!r}.")
        self._lambda = float(value)

    @property
    def margin_on(self) -> Literal["none", "target", "others"]:
        """Classes whose logits have a margin: none for m = 1, the other classes for form "r2", else the target."""
        if self.m == 1:
            return "none"
        return "others" if self.form == "r2" else "target"

    def set_step(self, step: int) -> None:
        """Set λ to its value at an iteration of the schedule; without a schedule λ stays as it is.

        Args:
            step: Number of the iteration, from 0.

        Raises:
            TypeError: If the step is not a number.
            ValueError: If it is negative.
        """
        if require_number("step", step) < 0:
            raise InvalidArgument("step", f"must be at least 0, got {step!r}.")
        if self._annealing is not None:
            self.lambda_ = self._annealing.at(step)

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """Return (λ·g(θ) + t(θ))/(1 + λ) with t = ψ_m, or t(θ) = g(min(mθ, π)) for form "r1"; g for form "r2"."""
        if self.form == "r2":
            return self.similarity(cosine)
        if self.form == "psi":
            with_margin = self.angle.psi(cosine, self.m)
        else:
            with_margin = self.angle.extended((angle_from_cosine(cosine) * self.m).clamp_max(math.pi))
        return self._annealed(cosine, with_margin)

    def other_similarity(self, cosine: Tensor) -> Tensor:
        """Return (λ·g(θ) + g(θ/m))/(1 + λ) for form "r2", else g(θ)."""
        if self.form != "r2":
            return self.similarity(cosine)
        return self._annealed(cosine, self.angle.extended(angle_from_cosine(cosine) / self.m))

    def extra_repr(self) -> str:
        """Return the margin and the options that differ from their defaults."""
        parts = [f"m={self.m:g}, scale={self.scale!r}, margin_gradient={self.margin_gradient!r}, form={self.form!r}"]
        if self._annealing is not None:
            parts.append(f"annealing={self._annealing}")
        if self.feature_penalty:
            parts.append(f"feature_penalty={self.feature_penalty:g}, feature_norm={self.feature_norm!r}")
            parts.append(f"penalty_form={self.penalty_form!r}")
        return ", ".join(filter(None, (*parts, super().extra_repr())))

    def _annealed(self, cosine: Tensor, with_margin: Tensor) -> Tensor:
        """Return (λ·g(θ) + with_margin)/(1 + λ)."""
        if self.lambda_ == 0:
            return with_margin
        return (self.lambda_ * self.similarity(cosine) + with_margin) / (1 + self.lambda_)


class GASoftmaxLoss(MarginLoss):
    """Generalized angular softmax (Eq. 6): the target class must win at m times its angle.

        z_j = S·g(θ_j) + b_j
        z_y = S·(λ·g(θ_y) + ψ_m(θ_y))/(1 + λ) + b_y    for the target class y

    The defaults differ from the paper, whose form (`GASoftmaxLoss.paper`) often trains worse than the same loss without
    a margin: S = ‖x‖ lets a sample reduce its loss by a shorter feature, and the full gradient of ψ_m is m times as
    large for the target as for the other classes.

    Args:
        operator: Angle function g: "linear" (no saddle points, the best loss of the paper), "cosine" (A-Softmax),
            "sigmoid" or an `AngleFunction` object.
        m: Margin, at least 1; m = 1 is no margin. Published values: 1.2 to 1.7 with a fixed scale, 4 with annealing.
        k: Parameter of the sigmoid, 0.3 by default; not allowed with another angle function.
        angle: Another name of `operator`.
        scale: S: "norm" for ‖x‖, a fixed number > 0 (published: 10 to 64), or "auto" (the same as None) for
            `default_scale` of the number of classes.
        margin_gradient: "detached" for the value with the margin and the gradient of m = 1 (Eq. 16), or "full".
        form: Margin function, for any g (Eq. 17): "psi" for ψ_m; "r1" for g(min(mθ, π)), as SphereFace-R v1; "r2" for
            g(θ_y) of the target and g(θ_j/m) of the other classes, as SphereFace-R v2.
        annealing: Schedule of λ (Eq. 7), or None for λ = 0. It can be replaced at any time, which sets λ to the new
            floor.
        feature_penalty: Weight of the soft feature normalization (Eq. 19), published as 0.01; 0 for none. It requires
            scale="norm".
        feature_norm: Norm to which the penalty pulls features; "auto" (the same as None) for `default_scale` of the
            number of classes.
        penalty_form: "squared" for (‖x‖ − feature_norm)², "absolute" for |‖x‖ − feature_norm|.
        class_weight: As in `AngularLoss`; likewise ignore_index, label_smoothing and reduction.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, or two options contradict each other.

    Example:
        >>> loss = GASoftmaxLoss()  # m = 1.5, fixed scale, detached gradient
        >>> loss = GASoftmaxLoss.paper(m=4, annealing=Annealing.for_run(iterations))
        >>> for step in range(iterations):
        ...     loss.set_step(step)
        ...     loss(head(features), labels).backward()
    """

    def __init__(
        self,
        operator: str | AngleFunction = "linear",
        m: float = DEFAULT_M,
        k: float | None = None,
        *,
        angle: str | AngleFunction | None = None,
        **margin_options: Unpack[MarginOptions],
    ) -> None:
        super().__init__(angle_of_loss(operator, k, angle), m, **margin_options)

    @classmethod
    def paper(cls, **options: Any) -> Self:
        """Return the loss as the paper prints it: m = 4, S = ‖x‖, full gradient, with the annealing of SphereFace.

        Args:
            **options: Arguments of the constructor that differ, e.g. operator, m or annealing.
        """
        printed: dict[str, Any] = {
            "m": 4,
            "scale": "norm",
            "margin_gradient": "full",
            "annealing": Annealing.sphereface(),
        }
        return cls(**(printed | options))


class ASoftmaxLoss(GASoftmaxLoss):
    """Angular softmax of SphereFace (Eq. 6): GA-Softmax with g = cosine.

    Args:
        m: Margin, at least 1.
        **margin_options: scale, margin_gradient, form, annealing, feature_penalty, feature_norm, penalty_form and the
            options of the cross entropy, as in `GASoftmaxLoss`.
    """

    def __init__(self, m: float = DEFAULT_M, **margin_options: Unpack[MarginOptions]) -> None:
        super().__init__("cosine", m, **margin_options)
