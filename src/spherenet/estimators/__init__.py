"""Logistic regression and a support vector machine on angles, as scikit-learn estimators (SPEC 1 (7))."""

try:
    import sklearn as _sklearn  # type: ignore[import-untyped]  # noqa: F401
except ImportError:
    raise ImportError(
        "spherenet.estimators needs the package scikit-learn: pip install 'spherenet[sklearn]'."
    ) from None

from spherenet.estimators.base import SphereClassifier
from spherenet.estimators.classifiers import SphereLogisticRegression, SphereSVC

__all__ = ["SphereClassifier", "SphereLogisticRegression", "SphereSVC"]
