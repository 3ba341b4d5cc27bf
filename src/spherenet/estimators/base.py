"""Full-batch minimisation of an objective over a module's parameters, by scipy's L-BFGS in float64.

What the two estimators share: features as directions, class weights in an `AngularHead`, full-batch fitting.

Where the origin is. An angle is taken at the origin, so a classifier on angles gives x and 2x the same class
and all its boundaries pass through 0. Two settings decide what "the origin" means for given data:

    standardize      subtracts each feature's mean and divides by its standard deviation (of the training
                     data): directions are seen from the middle of the data, in units that can be compared.
    fit_intercept    appends a constant feature, x → (x, intercept_scaling), as LinearSVC does. The data then
                     lie on a plane beside the origin, where x and 2x have different directions, and a cone
                     through the origin of the larger space cuts the plane in a boundary that lies anywhere.
                     The last column of `directions_` is the intercept.

With both off the angles are those of the raw features: right for data that are directions already, such as
embeddings compared by their cosine.
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

from spherenet.layers import AngularHead
from spherenet.validation import require_positive

__all__ = ["EPS", "Minimum", "SphereClassifier", "minimize_over_parameters", "positive"]

Vector = npt.NDArray[np.float64]

SMALLEST_DECREASE = 64 * np.finfo(np.float64).eps
"""A relative decrease below which a step is rounding: what stops a hinge, whose gradient never gets small."""

LINE_SEARCH_STEPS = 50
"""scipy's 20 are too few across the kinks of a hinge; smooth objectives take one or two."""


class Minimum(NamedTuple):
    """Where a minimisation ended: the objective there, the iterations it took, whether it converged, and why."""

    value: float
    iterations: int
    converged: bool
    reason: str


def minimize_over_parameters(
    module: nn.Module, objective: Callable[[], Tensor], *, max_iter: int, tol: float
) -> Minimum:
    """Move the float64 parameters of `module` to a minimum of `objective()`, a scalar that depends on them.

    It has converged when no entry of the gradient exceeds `tol`, or when an iteration lowers the objective by
    rounding only; it gives up after `max_iter` iterations. No random numbers are used.
    """
    parameters = list(module.parameters())

    def value_and_gradient(vector: Vector) -> tuple[float, Vector]:
        # A copy: scipy writes its next point into the same memory.
        vector_to_parameters(torch.tensor(vector), parameters)
        value = objective()
        gradient = parameters_to_vector(torch.autograd.grad(value, parameters))
        return value.item(), gradient.numpy()

    found = minimize(
        value_and_gradient,
        parameters_to_vector(parameters).detach().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_iter, "gtol": tol, "ftol": SMALLEST_DECREASE, "maxls": LINE_SEARCH_STEPS},
    )
    # The last point tried need not be the best one.
    vector_to_parameters(torch.tensor(found.x), parameters)
    return Minimum(float(found.fun), int(found.nit), bool(found.success), str(found.message))


EPS = 1e-12
"""Under the square roots of the norms: float64 needs less than the layers' 1e-4 to keep gradients finite, and
the features are data here, whose angles should be exact."""

Array = npt.NDArray[Any]


class SphereClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: a subclass names its module, its objective and its scores.

    Fitting minimises the objective over all samples at once, in float64. It starts from directions drawn with
    `random_state`; the objective is a mean over samples, so their order does not matter. The result is a local
    minimum, for unit weights are no convex set. Cosine and linear ended in the same one from each of ten starts
    on the four data sets of examples/estimators.py; the sigmoid, flat far from π/2, did not on two of them.
    """

    classes_: Array
    directions_: npt.NDArray[np.float64]
    model_: nn.Module
    n_features_in_: int
    n_iter_: int
    objective_: float

    def fit(self, X: Any, y: Any) -> SphereClassifier:  # noqa: N803
        """Fit to samples X [n, features] and their labels y [n], numbers or strings; return the estimator.

        Raises ValueError or TypeError for wrong data, fewer than two classes or a wrong parameter; warns with
        ConvergenceWarning where max_iter iterations were not enough.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must have at least 2 classes, got 1 class: {classes.tolist()[0]!r}.")
        max_iter, tol = _whole("max_iter", self.max_iter), positive("tol", self.tol)
        scaler = StandardScaler().fit(X) if self.standardize else None
        features = self._features(X, scaler)
        model = self._start(features.shape[1], classes)
        indices = torch.from_numpy(labels)
        found = minimize_over_parameters(
            model, lambda: self._objective(model, features, indices), max_iter=max_iter, tol=tol
        )
        if not found.converged:
            warnings.warn(
                f"{type(self).__name__} stopped after {found.iterations} iterations before it converged "
                f"({found.reason}): raise max_iter={self.max_iter} or tol={self.tol:g}.",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.classes_, self.scaler_, self.model_ = classes, scaler, model.requires_grad_(False)
        self.n_iter_, self.objective_ = found.iterations, found.value
        self.directions_ = nn.functional.normalize(self._head().weight, eps=EPS).numpy()
        return self

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the scores of samples X [n, features]: [n, classes], or [n] for two, the second's lead."""
        scores = self._scores_of_samples(X).numpy()
        lead: npt.NDArray[np.float64] = scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores
        return lead

    def predict(self, X: Any) -> Array:  # noqa: N803
        """Return the class with the highest score, the smallest angle, of each sample of X [n, features]."""
        scores = self.decision_function(X)
        chosen: Array = self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)]
        return chosen

    @abstractmethod
    def _module(self, in_features: int, num_classes: int) -> nn.Module:
        """A float64 module from features to an `AngularOutput`, its weights drawn at random."""

    @abstractmethod
    def _objective(self, model: Any, features: Tensor, labels: Tensor) -> Tensor:
        """What fitting minimises: a mean over samples, and what is added to it."""

    @abstractmethod
    def _scores(self, features: Tensor) -> Tensor:
        """The scores [n, classes] of prepared features."""

    @abstractmethod
    def _head(self) -> AngularHead:
        """The fitted class weights."""

    def _scores_of_samples(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)  # noqa: N806
        with torch.no_grad():
            return self._scores(self._features(X, self.scaler_))

    def _features(self, X: Array, scaler: Any) -> Tensor:  # noqa: N803
        """The samples as the model sees them: standardised, the constant appended."""
        columns = [X if scaler is None else scaler.transform(X)]
        if self.fit_intercept:
            columns.append(np.full((len(X), 1), positive("intercept_scaling", self.intercept_scaling)))
        return torch.from_numpy(np.concatenate(columns, axis=1))

    def _start(self, in_features: int, classes: Array) -> nn.Module:
        """The module to begin with: the last fit's where warm_start asks for it and its classes are these."""
        if self.warm_start and hasattr(self, "model_"):
            same = np.array_equal(self.classes_, classes) and self.directions_.shape[1] == in_features
            if same:
                # A copy: the last fit stays whole should this one fail.
                return copy.deepcopy(self.model_).requires_grad_(True)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        # The caller's torch draws the same numbers whether or not it fits an estimator in between.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            return self._module(in_features, len(classes))


def positive(name: str, value: Any) -> float:
    """Return a parameter as a float > 0; numpy's numbers, which a parameter grid holds, are numbers too."""
    return require_positive(name, value.item() if isinstance(value, np.generic) else value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
    return int(value)
