"""SphereLogisticRegression: W-Softmax on the features themselves.

SphereSVC: a support vector machine whose margin is one of angles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spherenet.angles import DEFAULT_K
from spherenet.estimators.base import EPS, SphereClassifier, positive
from spherenet.layers import AngularHead
from spherenet.losses import WSoftmaxLoss
from spherenet.losses.base import angle_of_loss
from spherenet.ops.margins import AngularOutput
from spherenet.validation import require_one_of

__all__ = ["LOSSES", "SphereLogisticRegression", "SphereSVC"]


class _ScaledHead(nn.Module):
    """An `AngularHead` for s·x with a trained s > 0: the cosines of x, and s·‖x‖ for its norm."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.head = AngularHead(in_features, num_classes, eps=EPS, dtype=torch.float64)
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, features: Tensor) -> AngularOutput:
        # Not head(s·x): the gradient would pass through every feature only to be summed into that of s.
        output: AngularOutput = self.head(features)
        return output._replace(feature_norm=self.log_scale.exp() * output.feature_norm)


class SphereLogisticRegression(SphereClassifier):
    """Logistic regression on angles: p(j | x) = softmax_j(s·‖x‖·g(θ_j)), θ_j between x and class j (SPEC 1 (4)).

    The class weights have unit length, so a class is a direction. In a network the features learn a length
    that fits the softmax; data cannot, so one scale s > 0 is learned for all classes. Fitting minimises

        C·Σ_i −log p(y_i | x_i) + ½·K·s²        for K classes.

    s·w_j are the weights of plain logistic regression, held to one length: the penalty and C mean what they
    mean in `sklearn.linear_model.LogisticRegression` for three classes or more. With angle="cosine" that length,
    and the penalty that the intercept shares, is all that differs; for two classes nothing else does, once its C
    is doubled, for it then penalises one weight where here are two.

    angle: g, "cosine", "linear" or "sigmoid"; k: of the sigmoid. C: less means more regularisation.
    standardize, fit_intercept, intercept_scaling: where the origin is, see `spherenet.estimators.base`.
    tol: the largest gradient entry of the mean objective at which fitting ends; max_iter: after how many
        iterations at the latest. warm_start: begin from the last fit. random_state: of the first directions.

    After fit: classes_, directions_ [classes, features (+ 1)] of unit length, scale_ (s), model_ (the torch
    module), scaler_, n_iter_, objective_ (divided by C·n), n_features_in_.
    """

    model_: _ScaledHead
    scale_: float

    def __init__(
        self,
        *,
        angle: str = "cosine",
        k: float = DEFAULT_K,
        C: float = 1.0,  # noqa: N803
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
        self.C = C
        self.standardize = standardize
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> SphereLogisticRegression:  # noqa: N803
        """Fit to samples X [n, features] and their labels y [n], as `SphereClassifier.fit`."""
        super().fit(X, y)
        self.scale_ = self.model_.log_scale.exp().item()
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return p(j | x) of samples X [n, features]: [n, classes], in the order of `classes_`."""
        probabilities: npt.NDArray[np.float64] = self._scores_of_samples(X).softmax(1).numpy()
        return probabilities

    def predict_log_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return log p(j | x) of samples X [n, features], finite where p itself would round to 0."""
        logarithms: npt.NDArray[np.float64] = self._scores_of_samples(X).log_softmax(1).numpy()
        return logarithms

    def _loss(self) -> WSoftmaxLoss:
        return WSoftmaxLoss(self.angle, self.k)

    def _module(self, in_features: int, num_classes: int) -> _ScaledHead:
        return _ScaledHead(in_features, num_classes)

    def _objective(self, model: _ScaledHead, features: Tensor, labels: Tensor) -> Tensor:
        output: AngularOutput = model(features)
        squared_scale = (2 * model.log_scale).exp()
        penalty = output.cosine.shape[1] * squared_scale / (2 * positive("C", self.C) * len(features))
        total: Tensor = self._loss()(output, labels) + penalty
        return total

    def _scores(self, features: Tensor) -> Tensor:
        return self._loss().logits(self.model_(features))

    def _head(self) -> AngularHead:
        return self.model_.head


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
