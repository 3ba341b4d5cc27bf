"""SphereSVC: a support vector machine whose margin is one of angles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spherenet.estimators.classifier import EPS, SphereClassifier, positive
from spherenet.layers import AngularHead
from spherenet.losses.base import angle_of_loss
from spherenet.ops.angle_functions import DEFAULT_K
from spherenet.ops.angular_output import AngularOutput
from spherenet.ops.arguments import require_one_of

__all__ = ["LOSSES", "SphereSVC"]

LOSSES = ("squared_hinge", "hinge")


class SphereSVC(SphereClassifier):
    """A linear SVM on angles: a sample's own class must lead every other by a margin in g(θ) (SPEC 1 (7)).

        mean_i Σ_{j ≠ y_i} max(0, margin − (g(θ_iy) − g(θ_ij)))^p        p = 2 "squared_hinge", 1 "hinge"

    Scores lie in [−1, 1] whatever the lengths of samples and weights, so `margin` is a distance on the sphere
    and no ‖w‖² need keep it from being bought with longer weights: it is the only setting of capacity. A small
    one listens to the few samples near a boundary, as a large C does in `sklearn.svm.LinearSVC`; one that few
    samples reach averages over all of them. A lead cannot exceed 2, nor can the margin.

    loss: "squared_hinge" (LinearSVC's default too) is smooth, the minimiser finds its minimum; "hinge" has
        kinks, there it stops near one, after more iterations.
    angle: g, "cosine", "linear" or "sigmoid"; k: of the sigmoid. The other parameters, and the attributes
    after fit, are those of `SphereLogisticRegression`.

    There is no predict_proba: a hinge models no probability. `sklearn.calibration.CalibratedClassifierCV`
    learns one from the scores.
    """

    model_: AngularHead

    def __init__(
        self,
        *,
        angle: str = "cosine",
        k: float = DEFAULT_K,
        margin: float = 0.5,
        loss: str = "squared_hinge",
        standardize: bool = True,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        tol: float = 1e-6,
        max_iter: int = 1000,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.angle = angle
        self.k = k
        self.margin = margin
        self.loss = loss
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.random_state = random_state

    def _module(self, in_features: int, num_classes: int) -> AngularHead:
        return AngularHead(in_features, num_classes, eps=EPS, dtype=torch.float64)

    def _objective(self, model: AngularHead, features: Tensor, labels: Tensor) -> Tensor:
        margin = positive("margin", self.margin)
        if margin > 2:
            raise ValueError(f"margin must be at most 2, the width of g's range, got {self.margin!r}.")
        squared = require_one_of("loss", self.loss, LOSSES) == "squared_hinge"
        similarity = self._similarity(model(features))
        own = labels.unsqueeze(1)
        missing = (margin - (similarity.gather(1, own) - similarity)).clamp_min(0).scatter(1, own, 0)
        return (missing.square() if squared else missing).sum(1).mean()

    def _scores(self, features: Tensor) -> Tensor:
        return self._similarity(self.model_(features))

    def _head(self) -> AngularHead:
        return self.model_

    def _similarity(self, output: AngularOutput) -> Tensor:
        """g(θ) [n, classes]."""
        similarity: Tensor = angle_of_loss(self.angle, self.k)(output.cosine)
        return similarity
