"""Logistic regression and a support vector machine on angles, as scikit-learn estimators."""

from spherenet.errors import require_extra

require_extra("sklearn", "sklearn")
require_extra("sklearn", "scipy")

from spherenet.estimators.base import SphereClassifier  # noqa: E402 (after the check)
from spherenet.estimators.classifiers import SphereLogisticRegression, SphereSVC  # noqa: E402

__all__ = ["SphereClassifier", "SphereLogisticRegression", "SphereSVC"]
