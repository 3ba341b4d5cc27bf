"""Compare logistic regression and a linear SVM with their angular versions on four classic data sets.

Every estimator gets standardized features and selects its one parameter (C or the margin) by cross-validation within
each training split. Accuracies are those of the held-out folds. Training sets overlap, so the spread is that of the
folds and not an error of the mean: much smaller differences are not significant.

    python examples/estimators.py           about two minutes on one core
"""

import argparse
import time

from sklearn import datasets
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, RepeatedStratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from spherenet.estimators import SphereLogisticRegression, SphereSVC

FIT = {"tol": 1e-4, "random_state": 0}  # the tolerance of LogisticRegression
PENALTIES, MARGINS = {"C": [0.1, 1.0, 10.0]}, {"margin": [0.2, 0.5, 1.0]}
ESTIMATORS = {
    "LogisticRegression": (LogisticRegression(max_iter=2000), PENALTIES),
    "SphereLogisticRegression cosine": (SphereLogisticRegression(**FIT), PENALTIES),
    "SphereLogisticRegression linear": (SphereLogisticRegression(operator="linear", **FIT), PENALTIES),
    "SphereLogisticRegression sigmoid": (SphereLogisticRegression(operator="sigmoid", **FIT), PENALTIES),
    "LinearSVC": (LinearSVC(max_iter=5000, random_state=0), PENALTIES),
    "SphereSVC cosine": (SphereSVC(**FIT), MARGINS),
    "SphereSVC linear": (SphereSVC(operator="linear", **FIT), MARGINS),
    "SphereSVC sigmoid": (SphereSVC(operator="sigmoid", **FIT), MARGINS),
}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", nargs="+", default=["iris", "wine", "breast_cancer", "digits"])
parser.add_argument("--folds", type=int, default=5, help="of each cross-validation")
parser.add_argument("--repetitions", type=int, default=1, help="of the cross-validation, each with other folds")
args = parser.parse_args()
for name in args.data:
    samples, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    count, features = samples.shape
    print(f"{name}: {count} samples, {features} features; accuracy %, n = {args.folds * args.repetitions} folds")
    for title, (estimator, grid) in ESTIMATORS.items():
        search = GridSearchCV(estimator, grid, cv=3)
        outer = RepeatedStratifiedKFold(n_splits=args.folds, n_repeats=args.repetitions, random_state=0)
        start = time.process_time()
        scores = 100 * cross_val_score(make_pipeline(StandardScaler(), search), samples, labels, cv=outer)
        seconds = (time.process_time() - start) / len(scores)
        print(f"  {title:<34}{scores.mean():6.2f} ± {scores.std(ddof=1):.2f}{seconds:8.2f} s per fold", flush=True)
