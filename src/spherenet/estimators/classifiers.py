"""The estimators: logistic regression (W-Softmax on the features) and a support vector machine with angular margin."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spherenet._util.validation import require_one_of
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument
from spherenet.estimators.base import EPS, SphereClassifier, positive
from spherenet.layers import AngularHead
from spherenet.losses import WSoftmaxLoss
from spherenet.ops.angular import AngularOutput

__all__ = ["LOSSES", "SphereLogisticRegression", "SphereSVC"]


class _ScaledHead(nn.Module):
    """An `AngularHead` for s·x with a trainable s > 0: the cosines of x, and the norm s·‖x‖."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.head = AngularHead(in_features, num_classes, eps=EPS, dtype=torch.float64)
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, features: Tensor) -> AngularOutput:
        # Cheaper than head(s·x), whose gradient with respect to s passes through every feature.
        output: AngularOutput = self.head(features)
        return output._replace(feature_norm=self.log_scale.exp() * output.feature_norm)


class SphereLogisticRegression(SphereClassifier):
    """Logistic regression on angles: p(j | x) = softmax_j(s·‖x‖·g(θ_j)), θ_j between x and class j (Eq. 5).

    The class weights have unit length, so a class is a direction. In a network the features learn a length that suits
    the softmax; here one scale s > 0 is learned for all classes instead. Fitting minimizes

        C·Σ_i −log p(y_i | x_i) + ½·K·s²        for K classes.

    s·w_j are the weights of plain logistic regression, restricted to a common length. The penalty and C have the same
    meaning as in `sklearn.linear_model.LogisticRegression` for three classes or more. With operator="cosine" the only
    differences are the common length and the penalty of the intercept. For two classes the models are the same if its C
    is doubled, because it penalizes one weight instead of two.

    Args:
        operator: Angle function g: "cosine", "linear" or "sigmoid".
        k: Parameter of the sigmoid, 0.3 by default; not allowed with another angle function.
        C: Inverse strength of the regularization.
        standardize: Whether to standardize the features, see `spherenet.estimators.base`.
        fit_intercept: Whether to append a constant feature, see `spherenet.estimators.base`.
        intercept_scaling: Value of the constant feature.
        tol: Largest entry of the gradient of the mean objective at convergence.
        max_iter: Largest number of iterations.
        warm_start: Whether to start from the last fit.
        random_state: Seed of the initial directions.

    Attributes:
        classes_: Classes in the order of the scores.
        directions_: Class weights [classes, features (+ 1)] of unit length.
        scale_: Learned scale s.
        model_: Fitted torch module.
        angle_: Angle function of the scores.
        scaler_: Fitted scaler, or None.
        constant_: Value of the constant feature, or None.
        n_iter_: Number of iterations.
        objective_: Final objective divided by C·n.
        n_features_in_: Number of features.
    """

    model_: _ScaledHead
    scale_: float

    def __init__(
        self,
        *,
        operator: str = "cosine",
        k: float | None = None,
        C: float = 1.0,  # noqa: N803
        standardize: bool = True,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        tol: float = 1e-6,
        max_iter: int = 1000,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.operator = operator
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
        """Fit the estimator to samples X [n, features] and labels y [n], as `SphereClassifier.fit`."""
        super().fit(X, y)
        self.scale_ = self.model_.log_scale.exp().item()
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the probabilities of samples X [n, features]: [n, classes], in the order of `classes_`."""
        probabilities: npt.NDArray[np.float64] = self._scores_of_samples(X).softmax(1).numpy()
        return probabilities

    def predict_log_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the log-probabilities of samples X [n, features]; finite even if the probability rounds to 0."""
        log_probabilities: npt.NDArray[np.float64] = self._scores_of_samples(X).log_softmax(1).numpy()
        return log_probabilities

    def _module(self, in_features: int, num_classes: int) -> _ScaledHead:
        return _ScaledHead(in_features, num_classes)

    def _objective(self, model: _ScaledHead, angle: AngleFunction, features: Tensor, labels: Tensor) -> Tensor:
        output: AngularOutput = model(features)
        squared_scale = (2 * model.log_scale).exp()
        penalty = output.cosine.shape[1] * squared_scale / (2 * positive("C", self.C) * len(features))
        total: Tensor = WSoftmaxLoss(angle)(output, labels) + penalty
        return total

    def _scores(self, features: Tensor) -> Tensor:
        return WSoftmaxLoss(self.angle_).logits(self.model_(features))

    def _head(self) -> AngularHead:
        return self.model_.head


LOSSES = ("squared_hinge", "hinge")


class SphereSVC(SphereClassifier):
    """Linear SVM on angles: g(θ) of the true class must exceed that of every other class by a margin.

        mean_i Σ_{j ≠ y_i} max(0, margin − (g(θ_iy) − g(θ_ij)))^p        p = 2 "squared_hinge", 1 "hinge"

    Scores are in [−1, 1] for all lengths of samples and weights, so `margin` is a distance on the sphere, and no
    penalty on ‖w‖² is needed. The margin controls the capacity: a small one depends on the few samples near a
    boundary, as a large C does in `sklearn.svm.LinearSVC`; one that few samples reach averages over all samples.

    There is no `predict_proba`, because the hinge loss does not model probabilities.
    `sklearn.calibration.CalibratedClassifierCV` learns them from the scores.

    Args:
        operator: Angle function g: "cosine", "linear" or "sigmoid".
        k: Parameter of the sigmoid, 0.3 by default; not allowed with another angle function.
        margin: Margin, greater than 0 and at most 2, the width of the range of g.
        loss: "squared_hinge" (also the default of LinearSVC) is smooth and reaches its minimum; "hinge" has kinks, and
            the minimization ends near the minimum after more iterations.
        standardize: Whether to standardize the features, see `spherenet.estimators.base`.
        fit_intercept: Whether to append a constant feature, see `spherenet.estimators.base`.
        intercept_scaling: Value of the constant feature.
        tol: Largest entry of the gradient of the mean objective at convergence.
        max_iter: Largest number of iterations.
        warm_start: Whether to start from the last fit.
        random_state: Seed of the initial directions.

    The attributes after fit are those of `SphereLogisticRegression`, without `scale_`.
    """

    model_: AngularHead

    def __init__(
        self,
        *,
        operator: str = "cosine",
        k: float | None = None,
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
        self.operator = operator
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

    def _features(self, X: Any, scaler: Any, constant: float | None) -> Tensor:  # noqa: N803
        """Return unit vectors: the scores do not depend on lengths, and tiny samples stay far above eps."""
        features = super()._features(X, scaler, constant)
        largest = features.abs().amax(1, keepdim=True)
        return nn.functional.normalize(features / largest.where(largest > 0, 1.0), eps=EPS)

    def _objective(self, model: AngularHead, angle: AngleFunction, features: Tensor, labels: Tensor) -> Tensor:
        margin = positive("margin", self.margin)
        if margin > 2:
            raise InvalidArgument("margin", f"must be at most 2, the width of the range of g, got {self.margin!r}.")
        squared = require_one_of("loss", self.loss, LOSSES) == "squared_hinge"
        similarity = angle(model(features).cosine)
        target = labels.unsqueeze(1)
        violation = (margin - (similarity.gather(1, target) - similarity)).clamp_min(0).scatter(1, target, 0)
        objective: Tensor = (violation.square() if squared else violation).sum(1).mean()
        return objective

    def _scores(self, features: Tensor) -> Tensor:
        similarity: Tensor = self.angle_(self.model_(features).cosine)
        return similarity

    def _head(self) -> AngularHead:
        return self.model_
