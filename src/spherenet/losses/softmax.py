"""Losses without a margin by default: softmax, W-Softmax (unit class weights), S-Softmax (unit features too)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from spherenet.angles import AngleFunction
from spherenet.losses.arguments import CrossEntropyOptions, ShapeOptions, angle_of_loss, named_scale
from spherenet.losses.base import AngularLoss, NamedScale
from spherenet.losses.margins import MarginLoss

if TYPE_CHECKING:
    from typing_extensions import Unpack


__all__ = ["SSoftmaxLoss", "SoftmaxLoss", "WSoftmaxLoss"]


class SoftmaxLoss(AngularLoss):
    """Plain softmax: z_j = ‖w_j‖·‖x‖·cos θ_j + b_j = w_jᵀx + b_j, then cross entropy.

    It equals `torch.nn.CrossEntropyLoss` on a linear layer and allows comparisons on the same head. In float32, ‖x‖ is
    limited so that no product of two norms exceeds 6e30.

    Args:
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    uses_weight_norm = True

    def __init__(self, **cross_entropy: Unpack[CrossEntropyOptions]) -> None:
        super().__init__(**cross_entropy)


class WSoftmaxLoss(AngularLoss):
    """Weight-normalized softmax (Eq. 5): z_j = ‖x‖·g(θ_j) + b_j, then cross entropy.

    Without a bias, the predicted class depends on the angles only.

    Args:
        operator: Angle function g: "cosine", "linear", "sigmoid" or an `AngleFunction` object.
        k: Parameter of the sigmoid, 0.3 by default; not allowed with another angle function.
        angle: Another name of `operator`.
        **cross_entropy: class_weight, ignore_index, label_smoothing and reduction as in `AngularLoss`.
    """

    angle: AngleFunction

    def __init__(
        self,
        operator: str | AngleFunction = "cosine",
        k: float | None = None,
        *,
        angle: str | AngleFunction | None = None,
        **cross_entropy: Unpack[CrossEntropyOptions],
    ) -> None:
        super().__init__(operator=angle_of_loss(operator, k, angle), **cross_entropy)


class SSoftmaxLoss(NamedScale, MarginLoss):
    """Sphere-normalized softmax (Eq. 8): z_j = s·g(θ_j) + b_j, then cross entropy.

    A margin m > 1 makes it a `GASoftmaxLoss` with a fixed scale.

    Args:
        operator: Angle function g: "cosine", "linear", "sigmoid" or an `AngleFunction` object.
        s: Scale > 0, or "auto" (the same as None) for `default_scale` of the number of classes. From scratch, s = 1
            does not train; 10 to 70 do.
        k: Parameter of the sigmoid, 0.3 by default; not allowed with another angle function.
        m: Margin, at least 1; m = 1 is no margin.
        angle: Another name of `operator`.
        margin_gradient: As in `GASoftmaxLoss`.
        form: As in `GASoftmaxLoss`.
        annealing: As in `GASoftmaxLoss`.
        class_weight: As in `AngularLoss`; likewise ignore_index, label_smoothing and reduction.
    """

    def __init__(
        self,
        operator: str | AngleFunction = "cosine",
        s: float | Literal["auto"] | None = "auto",
        k: float | None = None,
        *,
        m: float = 1,
        angle: str | AngleFunction | None = None,
        **shape_options: Unpack[ShapeOptions],
    ) -> None:
        super().__init__(angle_of_loss(operator, k, angle), m, scale=named_scale(s), **shape_options)

    def extra_repr(self) -> str:
        """Return the scale, the margin and the options that differ from their defaults."""
        with_margin = super().extra_repr().replace(f"scale={self.scale!r}", f"s={self.s!r}")
        return with_margin if self.m > 1 else ", ".join(filter(None, (f"s={self.s!r}", AngularLoss.extra_repr(self))))
