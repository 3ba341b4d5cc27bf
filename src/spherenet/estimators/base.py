"""Base class of the estimators: features as directions, class weights in an `AngularHead`, full-batch fitting.

An angle is measured at the origin, so a classifier on angles assigns x and 2x to the same class, and all its boundaries
pass through 0. Two settings choose the origin:

- `standardize` subtracts the mean of each feature and divides by its standard deviation (of the training data).
  Directions are then measured from the center of the data, in comparable units.
- `fit_intercept` appends a constant feature, x → (x, intercept_scaling), as LinearSVC does. The data then lie in a
  plane that does not contain the origin, where x and 2x have different directions, and boundaries can lie anywhere.
  The last column of `directions_` is the intercept.

Without both, the angles are those of the raw features, which is right for data that are directions already, such as
embeddings that are compared by their cosine.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin  # type: ignore[import-untyped]
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, validate_data  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from spherenet._util.validation import require_positive
from spherenet.angles import AngleFunction
from spherenet.errors import InvalidArgument
from spherenet.layers import AngularHead
from spherenet.losses.arguments import angle_of_loss

__all__ = ["EPS", "Minimum", "SphereClassifier", "minimize_over_parameters", "positive"]

Vector = npt.NDArray[np.float64]

SMALLEST_DECREASE = 64 * np.finfo(np.float64).eps
"""A smaller relative decrease is rounding. It stops the hinge loss, whose gradient does not become small."""

LINE_SEARCH_STEPS = 50
"""The 20 steps of scipy are too few at the kinks of the hinge loss; smooth objectives need one or two."""


class Minimum(NamedTuple):
    """The result of a minimization: final objective, iterations, whether it converged, and the reason it ended."""

    value: float
    iterations: int
    converged: bool
    reason: str


def minimize_over_parameters(
    module: nn.Module, objective: Callable[[], Tensor], *, max_iter: int, tol: float
) -> Minimum:
    """Minimize `objective()` over the float64 parameters of `module` with L-BFGS of scipy.

    The minimization has converged when no entry of the gradient exceeds `tol`, or when an iteration decreases the
    objective only by rounding. It is deterministic.

    Args:
        module: Module whose parameters are changed.
        objective: Function that returns a scalar tensor.
        max_iter: Largest number of iterations.
        tol: Tolerance of the gradient.
    """
    parameters = list(module.parameters())

    def value_and_gradient(vector: Vector) -> tuple[float, Vector]:
        # Copy, because scipy writes its next point into the same memory.
        vector_to_parameters(torch.tensor(vector), parameters)
        value = objective()
        gradient = parameters_to_vector(torch.autograd.grad(value, parameters))
        return value.item(), gradient.numpy()

    result = minimize(
        value_and_gradient,
        parameters_to_vector(parameters).detach().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_iter, "gtol": tol, "ftol": SMALLEST_DECREASE, "maxls": LINE_SEARCH_STEPS},
    )
    # The last evaluated point is not necessarily the best one.
    vector_to_parameters(torch.tensor(result.x), parameters)
    return Minimum(float(result.fun), int(result.nit), bool(result.success), str(result.message))


EPS = 1e-12
"""Added under the square roots of the norms. float64 needs less than the 1e-4 of the layers for finite gradients, and
the angles of data should be exact."""

Array = npt.NDArray[Any]


class SphereClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base class of the estimators; a subclass defines its module, its objective and its scores.

    Fitting minimizes the objective over all samples at once in float64, starting from random directions drawn with
    `random_state`. The objective is a mean over samples, so their order does not matter. The result is a local minimum,
    because the set of unit weights is not convex. On the four data sets of examples/estimators.py, cosine and linear
    reached the same minimum from each of ten starts; the sigmoid, which is flat far from π/2, did not on two of them.
    """

    angle_: AngleFunction
    classes_: Array
    constant_: float | None
    directions_: npt.NDArray[np.float64]
    model_: nn.Module
    n_features_in_: int
    n_iter_: int
    objective_: float

    def fit(self, X: Any, y: Any) -> SphereClassifier:  # noqa: N803
        """Fit the estimator and return it. Warns with ConvergenceWarning if `max_iter` iterations are not enough.

        Args:
            X: Samples [n, features].
            y: Labels [n], numbers or strings.

        Raises:
            ValueError: The data are invalid, there are fewer than two classes, or a parameter is invalid.
            TypeError: A parameter has the wrong type.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise InvalidArgument("y", f"must have at least 2 classes, got 1 class: {classes.tolist()[0]!r}.")
        max_iter, tol = _positive_integer("max_iter", self.max_iter), positive("tol", self.tol)
        scaler = StandardScaler().fit(X) if self.standardize else None
        constant = positive("intercept_scaling", self.intercept_scaling) if self.fit_intercept else None
        angle = angle_of_loss(self.operator, as_python(self.k))
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller has switched off
            features = self._features(X, scaler, constant)
            model = self._start(features.shape[1], classes)
            indices = torch.from_numpy(labels)
            minimum = minimize_over_parameters(
                model, lambda: self._objective(model, angle, features, indices), max_iter=max_iter, tol=tol
            )
        if not minimum.converged:
            warnings.warn(
                f"{type(self).__name__} stopped after {minimum.iterations} iterations before convergence "
                f"({minimum.reason}): raise max_iter={self.max_iter} or tol={self.tol:g}.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.classes_, self.scaler_, self.model_ = classes, scaler, model.requires_grad_(False)
        # Scores use these, so that set_params has no effect before the next fit.
        self.angle_, self.constant_ = angle, constant
        self.n_iter_, self.objective_ = minimum.iterations, minimum.value
        self.directions_ = nn.functional.normalize(self._head().weight, eps=EPS).numpy()
        return self

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the scores of samples X [n, features]: [n, classes], or their difference [n] for two classes."""
        scores = self._scores_of_samples(X).numpy()
        decision: npt.NDArray[np.float64] = scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores
        return decision

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the class with the highest score (the smallest angle) for each sample of X [n, features]."""
        scores = self.decision_function(X)
        predicted: Array = self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]
        return predicted

    @abstractmethod
    def _module(self, in_features: int, num_classes: int) -> nn.Module:
        """Return a randomly initialized float64 module from features to an `AngularOutput`."""

    @abstractmethod
    def _objective(self, model: Any, angle: AngleFunction, features: Tensor, labels: Tensor) -> Tensor:
        """Return the objective: a mean over samples plus penalties."""

    @abstractmethod
    def _scores(self, features: Tensor) -> Tensor:
        """Return the scores [n, classes] of prepared features."""

    @abstractmethod
    def _head(self) -> AngularHead:
        """Return the head with the fitted class weights."""

    def _scores_of_samples(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
        with torch.no_grad():
            return self._scores(self._features(X, self.scaler_, self.constant_))

    def _features(self, X: Array, scaler: Any, constant: float | None) -> Tensor:  # noqa: N803
        """Return the samples standardized and with the constant feature appended, if there are any."""
        columns = [X if scaler is None else scaler.transform(X)]
        if constant is not None:
            columns.append(np.full((len(X), 1), constant))
        return torch.from_numpy(np.concatenate(columns, axis=1))

    def _start(self, in_features: int, classes: Array) -> nn.Module:
        """Return the initial module: that of the last fit if warm_start is set and its classes and features match."""
        if self.warm_start and hasattr(self, "model_"):
            same = np.array_equal(self.classes_, classes) and self.directions_.shape[1] == in_features
            if same:
                # Copy, so that the last fit stays valid if this one fails.
                return copy.deepcopy(self.model_).requires_grad_(True)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        # Fitting does not change the global random state of torch.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            return self._module(in_features, len(classes))


def positive(name: str, value: Any) -> float:
    """Return a parameter as a float > 0; NumPy scalars are accepted."""
    return require_positive(name, as_python(value))


def as_python(value: Any) -> Any:
    """Return a NumPy scalar, as in parameter grids, as a Python number, and other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def _positive_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise InvalidArgument(name, f"must be a whole number of at least 1, got {value!r}.")
    return int(value)
