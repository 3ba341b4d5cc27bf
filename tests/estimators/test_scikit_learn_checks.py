"""Every check that scikit-learn has for a classifier, none expected to fail."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from spherenet.estimators import SphereLogisticRegression, SphereSVC

ESTIMATORS = [
    SphereLogisticRegression(),
    SphereLogisticRegression(angle="linear", standardize=False),
    SphereLogisticRegression(angle="sigmoid", C=10.0, fit_intercept=False),
    SphereSVC(),
    SphereSVC(angle="sigmoid", margin=0.2),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)
