"""All estimator checks of scikit-learn; none is expected to fail."""

import os
import subprocess
import sys

from sklearn.utils.estimator_checks import parametrize_with_checks

from spherenet.estimators import SphereLogisticRegression, SphereSVC

ESTIMATORS = [
    SphereLogisticRegression(),
    SphereLogisticRegression(operator="linear", C=10.0, standardize=False, fit_intercept=False),
    SphereSVC(),
    SphereSVC(operator="sigmoid", loss="hinge", margin=0.2),
]

ARRAY_CHECK = "check_array_api_input"
"""This check is skipped unless SCIPY_ARRAY_API is set before scipy is imported, so it runs in a separate process."""


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_check(estimator, check):
    check(estimator)


def test_array_api_check_with_scipy_array_api():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", ARRAY_CHECK, __file__]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"SCIPY_ARRAY_API": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert f"{len(ESTIMATORS)} passed" in result.stdout
