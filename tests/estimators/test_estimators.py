"""The estimators match their formulas, for all kinds of labels and any order of samples."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.preprocessing import StandardScaler

from oracle import sphere_conv as reference
from spherenet.estimators import SphereLogisticRegression, SphereSVC

ANGLES = {"cosine": reference.g_cosine, "linear": reference.g_linear, "sigmoid": lambda t: reference.g_sigmoid(t, 0.3)}
every_angle = pytest.mark.parametrize("angle", ANGLES)
both = pytest.mark.parametrize("cls", [SphereLogisticRegression, SphereSVC])
DATA = {"binary": load_breast_cancer(return_X_y=True), "multiclass": load_iris(return_X_y=True)}
both_kinds = pytest.mark.parametrize("task", DATA)


def similarities(model, X, angle):  # noqa: N803
    """Compute g(θ) of each sample and class in a loop from the public attributes of the estimator."""
    X = (X - X.mean(0)) / X.std(0)  # noqa: N806
    rows = np.concatenate([X, np.ones((len(X), 1))], 1)
    result = np.empty((len(X), len(model.directions_)))
    for i, x in enumerate(rows):
        for j, w in enumerate(model.directions_):
            theta = np.arccos(np.clip(x @ w / np.linalg.norm(x), -1, 1))
            result[i, j] = ANGLES[angle](torch.tensor(theta)).item()
    return result, np.linalg.norm(rows, axis=1)


@both_kinds
@every_angle
def test_logistic_regression_matches_a_loop(task, angle):
    X, y = (array[:60] if task == "binary" else array[::3] for array in DATA[task])  # noqa: N806
    model = SphereLogisticRegression(operator=angle, random_state=0).fit(X, y)
    similarity, norm = similarities(model, X, angle)
    logits = model.scale_ * norm[:, None] * similarity
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(X), probabilities, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probabilities, rtol=1e-6, atol=1e-9)
    scores = logits[:, 1] - logits[:, 0] if task == "binary" else logits
    np.testing.assert_allclose(model.decision_function(X), scores, rtol=1e-6, atol=1e-7)
    cross_entropy = -np.log(probabilities[np.arange(len(y)), y]).mean()
    penalty = len(model.classes_) * model.scale_**2 / (2 * model.C * len(y))
    assert model.objective_ == pytest.approx(cross_entropy + penalty, rel=1e-6)


@both_kinds
@every_angle
@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_svc_matches_a_loop(task, angle, loss):
    X, y = (array[:60] if task == "binary" else array[::3] for array in DATA[task])  # noqa: N806
    model = SphereSVC(operator=angle, margin=0.7, loss=loss, random_state=0).fit(X, y)
    similarity, _ = similarities(model, X, angle)
    scores = similarity[:, 1] - similarity[:, 0] if task == "binary" else similarity
    np.testing.assert_allclose(model.decision_function(X), scores, rtol=1e-6, atol=1e-7)
    total = 0.0
    for row, own in zip(similarity, y, strict=True):
        missing = [max(0.0, 0.7 - (row[own] - other)) for j, other in enumerate(row) if j != own]
        total += sum(m**2 if loss == "squared_hinge" else m for m in missing)
    assert model.objective_ == pytest.approx(total / len(y), rel=1e-6)


@both
@both_kinds
def test_accuracy_is_high(cls, task):
    X, y = DATA[task]  # noqa: N806
    assert cross_val_score(cls(random_state=0), X, y, cv=5).mean() > 0.94


@pytest.mark.parametrize("C", [0.1, 1.0, 10.0])
def test_cosine_with_two_classes_equals_plain_logistic_regression(C):  # noqa: N803
    """Two opposite weights of the same length are equivalent to one weight at half the penalty."""
    X, y = DATA["binary"]  # noqa: N806
    X = np.concatenate([StandardScaler().fit_transform(X), np.ones((len(X), 1))], 1)  # noqa: N806
    ours = SphereLogisticRegression(C=C, standardize=False, fit_intercept=False, tol=1e-8, random_state=0).fit(X, y)
    plain = LogisticRegression(C=2 * C, fit_intercept=False, tol=1e-8, max_iter=5000).fit(X, y)
    np.testing.assert_allclose(ours.directions_[0], -ours.directions_[1], atol=1e-3)
    np.testing.assert_allclose(ours.scale_ * (ours.directions_[1] - ours.directions_[0]), plain.coef_[0], atol=1e-3)
    np.testing.assert_allclose(ours.predict_proba(X), plain.predict_proba(X), atol=1e-4)


def test_cosine_with_several_classes_is_close_to_plain_logistic_regression():
    X, y = DATA["multiclass"]  # noqa: N806
    ours = SphereLogisticRegression(random_state=0).fit(X, y)
    plain = LogisticRegression().fit(StandardScaler().fit_transform(X), y)
    both_predicted = ours.predict_proba(X), plain.predict_proba(StandardScaler().fit_transform(X))
    assert np.abs(both_predicted[0] - both_predicted[1]).mean() < 0.05


@both
@every_angle
def test_string_labels_are_predicted(cls, angle):
    X, y = DATA["multiclass"]  # noqa: N806
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = cls(operator=angle, random_state=0).fit(X, names)
    assert list(model.classes_) == ["setosa", "versicolor", "virginica"]
    assert set(model.predict(X)) == set(names)
    np.testing.assert_array_equal(
        model.predict(X) == names, cls(operator=angle, random_state=0).fit(X, y).predict(X) == y
    )


@both
@both_kinds
def test_result_does_not_depend_on_the_order_of_samples(cls, task):
    X, y = DATA[task]  # noqa: N806
    order = np.random.default_rng(0).permutation(len(y))
    models = [cls(random_state=3, tol=1e-9).fit(*data) for data in ((X, y), (X[order], y[order]))]
    np.testing.assert_allclose(*(model.decision_function(X) for model in models), rtol=1e-4, atol=1e-4)


@both
def test_same_random_state_gives_same_result_and_keeps_the_global_random_state(cls):
    X, y = DATA["multiclass"]  # noqa: N806
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (cls(random_state=1).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(first.directions_, second.directions_)
    assert torch.equal(torch.rand(3), expected)


@both
@both_kinds
def test_warm_start_continues_from_the_last_fit(cls, task):
    X, y = DATA[task]  # noqa: N806
    model = cls(random_state=0, warm_start=True).fit(X, y)
    cold, directions = model.n_iter_, model.directions_.copy()
    model.fit(X, y)
    assert cold > 5
    assert model.n_iter_ <= 2
    np.testing.assert_allclose(model.directions_, directions, atol=1e-3)
    model.fit(X[:, :2], y)  # other features: no warm start
    assert model.directions_.shape[1] == 3
    assert model.n_iter_ > 2


@both
def test_intercept_and_standardization_separate_clouds_on_one_ray(cls):
    """Without an intercept x and 2x have the same direction; with it, or after centering, they do not."""
    generator = np.random.default_rng(0)
    X = np.array([1.0, 1.0]) * np.repeat([1.0, 3.0], 50)[:, None] + 0.05 * generator.standard_normal((100, 2))  # noqa: N806
    y = np.repeat([0, 1], 50)
    scores = {
        (standardize, intercept): cls(standardize=standardize, fit_intercept=intercept, random_state=0)
        .fit(X, y)
        .score(X, y)
        for standardize in (False, True)
        for intercept in (False, True)
    }
    assert scores.pop((False, False)) < 0.8
    assert min(scores.values()) == 1.0


def test_scores_of_raw_features_ignore_their_length():
    X, y = DATA["multiclass"]  # noqa: N806
    model = SphereSVC(standardize=False, fit_intercept=False, random_state=0).fit(X, y)
    np.testing.assert_allclose(model.decision_function(7 * X), model.decision_function(X), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(model.directions_, axis=1), 1)


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1e150])
def test_svc_does_not_depend_on_the_scale_of_raw_features(scale):
    X, y = DATA["multiclass"]  # noqa: N806
    expected, model = (
        SphereSVC(standardize=False, fit_intercept=False, random_state=0).fit(factor * X, y) for factor in (1, scale)
    )
    np.testing.assert_allclose(model.directions_, expected.directions_, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(model.decision_function(scale * X), expected.decision_function(X), rtol=1e-6, atol=1e-6)
    assert np.array_equal(model.decision_function(np.zeros((1, X.shape[1]))), np.zeros((1, len(model.classes_))))


@both
def test_parameters_set_after_fit_change_nothing_before_the_next_fit(cls):
    X, y = DATA["multiclass"]  # noqa: N806
    model = cls(operator="sigmoid", k=0.5, random_state=0).fit(X, y)
    scores = model.decision_function(X)
    model.set_params(operator="linear", k=None, fit_intercept=False, intercept_scaling=5.0, standardize=False)
    assert np.array_equal(model.decision_function(X), scores)
    assert not np.array_equal(model.fit(X, y).decision_function(X), scores)


def test_smaller_c_gives_a_smaller_scale():
    X, y = DATA["multiclass"]  # noqa: N806
    scales = [SphereLogisticRegression(C=C, random_state=0).fit(X, y).scale_ for C in (0.01, 1.0, 100.0)]
    assert scales == sorted(scales)
    assert scales[2] > 4 * scales[0]


@both
def test_estimators_work_in_pipelines_grid_search_and_calibration(cls):
    X, y = DATA["multiclass"]  # noqa: N806
    name = "C" if cls is SphereLogisticRegression else "margin"
    search = GridSearchCV(cls(random_state=0), {name: np.array([0.1, 1.0], dtype=np.float32)}, cv=2).fit(X, y)
    assert search.best_score_ > 0.8
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()
    assert not hasattr(SphereSVC(), "predict_proba")
    calibrated = CalibratedClassifierCV(cls(random_state=0), cv=2).fit(X, y)
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(1), 1)


@both
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"operator": "cosin"}, "operator must be one of .*Did you mean 'cosine'"),
        ({"operator": "learnable"}, "learnable"),
        ({"k": 0.5}, "k must be None for the cosine operator, got 0.5"),
        ({"k": 0.3}, "k must be None for the cosine operator, got 0.3"),
        ({"tol": 0}, "tol must be greater than 0"),
        ({"max_iter": 2.5}, "max_iter must be a whole number of at least 1, got 2.5"),
        ({"intercept_scaling": -1}, "intercept_scaling must be greater than 0"),
    ],
)
def test_invalid_shared_parameters_raise_value_error(cls, parameters, message):
    with pytest.raises(ValueError, match=message):
        cls(**parameters).fit(*DATA["multiclass"])


def test_invalid_specific_parameters_raise_value_error():
    X, y = DATA["multiclass"]  # noqa: N806
    for model, message in (
        (SphereLogisticRegression(C=0), "C must be greater than 0, got 0"),
        (SphereSVC(margin=3), "margin must be at most 2"),
        (SphereSVC(loss="hing"), "Did you mean 'hinge'"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X, y)
    with pytest.raises(ValueError, match="at least 2 classes, got 1 class: 'a'"):
        SphereSVC().fit(X, ["a"] * len(X))


@both
def test_too_few_iterations_warn(cls):
    with pytest.warns(ConvergenceWarning, match="stopped after 2 iterations .* raise max_iter=2"):
        cls(max_iter=2, random_state=0).fit(*DATA["multiclass"])


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fits_where_gradients_are_switched_off(cls, mode):
    samples, labels = DATA["multiclass"]
    expected = cls(random_state=0).fit(samples, labels)
    with mode():
        model = cls(random_state=0).fit(samples, labels)
        assert np.array_equal(model.predict(samples), expected.predict(samples))
    assert np.array_equal(model.directions_, expected.directions_)


@both
def test_numpy_scalars_are_accepted_as_k(cls):
    samples, labels = DATA["multiclass"]
    model = cls(operator="sigmoid", k=np.float32(0.5), random_state=0).fit(samples, labels)
    assert np.array_equal(
        model.directions_, cls(operator="sigmoid", k=0.5, random_state=0).fit(samples, labels).directions_
    )


def test_missing_scikit_learn_names_the_extra():
    code = "import sys; sys.modules['sklearn'] = None; import spherenet.estimators"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    message = "sklearn is not installed: pip install 'spherenet-torch[sklearn]'."
    assert last == f"spherenet.errors.MissingExtraError: {message}"
