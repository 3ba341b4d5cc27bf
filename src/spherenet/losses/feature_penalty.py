"""Soft feature normalization: a penalty that pulls the norms of features to a number (Eq. 19)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from spherenet._util.validation import require_number, require_one_of, require_positive
from spherenet.errors import InvalidArgument
from spherenet.losses.base import AngularLoss
from spherenet.losses.scales import default_scale

__all__ = ["FeaturePenalty"]

PENALTY_FORMS = ("squared", "absolute")


class FeaturePenalty(AngularLoss):
    """Base class of losses with a penalty on feature norms; `GASoftmaxLoss` documents the options."""

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
