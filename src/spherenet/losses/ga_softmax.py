"""GA-Softmax and A-Softmax: W-Softmax with a multiplicative margin on the target's angle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spherenet.kernels.snapshot import snapshot
from spherenet.losses.annealing import DEFAULT_ANNEALING, Annealing
from spherenet.losses.w_softmax import WSoftmaxLoss
from spherenet.ops.angle_functions import DEFAULT_K, AngleFunction
from spherenet.ops.angular_output import AngularOutput
from spherenet.ops.arguments import require_number
from spherenet.ops.margins import psi

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from spherenet.losses.base import CrossEntropyOptions

__all__ = ["ASoftmaxLoss", "GASoftmaxLoss"]


class GASoftmaxLoss(WSoftmaxLoss):
    """Generalised angular softmax: z_j = ‖x‖·g(θ_j) + b_j, for the target ‖x‖·(λ·g(θ_y) + ψ_m(θ_y))/(1 + λ) + b_y.

    ψ_m is that of SPEC 1 (5): the target must win at m times its angle. angle: "linear" (no saddle points, the
    paper's best), "cosine" (then it is A-Softmax), "sigmoid" or an `AngleFunction` object; m: a number ≥ 1,
    1 is W-Softmax; k: of the sigmoid.

    λ follows `annealing`, which may be replaced at any time (`Annealing.for_run(iterations)` fits the length of
    a run); None is no annealing, λ = 0. Its counter `iteration` is saved with the module and goes up by one for
    every loss computed in training mode; in evaluation mode λ stays where it is.
    Raises ValueError or TypeError for m < 1, a wrong angle, k or annealing.
    """

    iteration: Tensor

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
        self.register_buffer("iteration", torch.zeros((), dtype=torch.int64))

    @property
    def annealing(self) -> Annealing | None:
        """The schedule of λ."""
        return self._annealing

    @annealing.setter
    def annealing(self, annealing: Annealing | None) -> None:
        if annealing is not None and not isinstance(annealing, Annealing):
            raise TypeError(f"annealing must be an Annealing or None, got {annealing!r}.")
        self._annealing = annealing

    @property
    def current_lambda(self) -> float:
        """The λ of the next loss, for logging: 0 without annealing (reads the counter from its device)."""
        return 0.0 if self._annealing is None else self._annealing.at(float(self.iteration))

    def target_similarity(self, cosine: Tensor) -> Tensor:
        """(λ·g(θ) + ψ_m(θ))/(1 + λ)."""
        with_margin = psi(cosine, self.m, self.angle)
        if self._annealing is None:
            return with_margin
        weight = self._annealing.at(snapshot(self.iteration).to(cosine.dtype))
        blend: Tensor = (weight * self.angle(cosine) + with_margin) / (1 + weight)
        return blend

    def forward(self, output: AngularOutput, labels: Tensor) -> Tensor:
        """Return the loss; in training mode, advance the annealing by one iteration."""
        loss = super().forward(output, labels)
        if self.training and self._annealing is not None:
            self.iteration.add_(1)
        return loss

    def extra_repr(self) -> str:
        """Name the margin and its schedule."""
        return ", ".join(filter(None, (f"m={self.m:g}, annealing={self._annealing}", super().extra_repr())))


class ASoftmaxLoss(GASoftmaxLoss):
    """Angular softmax of SphereFace: GA-Softmax with g = cosine (SPEC 1 (5)); arguments as there."""

    def __init__(
        self,
        m: float = 4,
        *,
        annealing: Annealing | None = DEFAULT_ANNEALING,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__("cosine", m, annealing=annealing, **cross_entropy)
