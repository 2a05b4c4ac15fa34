"""The estimator as scikit-learn's tools use it."""

from __future__ import annotations

import importlib
import pickle
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.6")

import joblib
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from numpyro_orthgp.sklearn import GPClassifier, GPRegressor

SMALL = {"M": 10, "num_steps": 15}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (100, 2))
    return X, np.sin(X[:, 0]) + 0.1 * rng.normal(size=100)


@pytest.fixture(scope="module")
def fitted(data):
    return GPRegressor(**SMALL).fit(*data)


def test_fit_predict_and_score(data, fitted):
    X, y = data
    mean, std = fitted.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, fitted.gp_.predict(X).mean)
    assert std.shape == mean.shape and (std > 0.05).all()
    assert fitted.score(X, y) > 0.9 and fitted.n_features_in_ == 2


def test_copies(data, fitted):
    X, _ = data
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(X), fitted.predict(X))
    fresh = clone(fitted)
    assert fresh.get_params() == fitted.get_params() == {"time": 60.0, "random_state": 0, **SMALL}
    with pytest.raises(NotFittedError):
        fresh.predict(X)


def test_pipelines_and_cross_validation(data):
    scores = cross_val_score(make_pipeline(StandardScaler(), GPRegressor(**SMALL)), *data, cv=2)
    assert scores.shape == (2,) and scores.min() > 0.7


def test_threads_of_joblib_wait_for_each_other(data):
    """Two of three fits were refused, and scikit-learn took that for scores of NaN."""
    estimator = GPRegressor(M=10, num_steps=3)
    with joblib.parallel_backend("threading", n_jobs=2):
        found = cross_val_score(estimator, *data, cv=3)
    np.testing.assert_array_equal(found, cross_val_score(estimator, *data, cv=3))


def test_tables(data):
    pd = pytest.importorskip("pandas")
    X, y = data
    frame = pd.DataFrame({"a": X[:, 0], "b": np.where(X[:, 1] > 0, "u", "v")})
    estimator = GPRegressor(**SMALL).fit(frame, y)
    assert list(estimator.feature_names_in_) == ["a", "b"] and estimator.predict(frame).shape == (100,)


def test_classifier(data):
    X, y = data
    labels = np.where(y > 0.3, "high", "low")
    estimator = GPClassifier(**SMALL).fit(X, labels)
    p = estimator.predict_proba(X)
    np.testing.assert_array_equal(estimator.predict_log_proba(X), np.log(p))
    assert estimator.classes_.tolist() == ["high", "low"] and p.shape == (100, 2)
    np.testing.assert_allclose(p.sum(-1), 1)
    np.testing.assert_array_equal(estimator.predict(X), estimator.classes_[p.argmax(-1)])
    assert estimator.score(X, labels) > 0.85 and clone(estimator).get_params() == estimator.get_params()
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(estimator)).predict_proba(X), p)
    assert cross_val_score(GPClassifier(**SMALL), X, labels, cv=2).min() > 0.75
    with pytest.raises(ValueError, match="Unknown label type"):
        GPClassifier(**SMALL).fit(X, y)


def test_classes_are_sorted_as_scikit_learn_takes_them_to_be(data):
    """Categories in an order of their own had columns of probabilities in that order, and scores were those of other classes."""
    pd = pytest.importorskip("pandas")
    X, _ = data
    frame = pd.DataFrame(X, columns=["a", "b"])
    y = pd.Series(pd.Categorical(np.where(X[:, 0] > 0, "high", "low"), categories=["low", "high"], ordered=True))
    estimator = GPClassifier(**SMALL).fit(frame, y)
    assert estimator.classes_.tolist() == ["high", "low"]
    assert log_loss(y.astype(object), estimator.predict_proba(frame)) < 0.5
    assert cross_val_score(GPClassifier(**SMALL), frame, y, cv=2, scoring="roc_auc").min() > 0.9


def test_random_states_of_scikit_learn(data):
    X, y = data
    first, again = (GPRegressor(**SMALL, random_state=np.random.RandomState(3)).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(first.predict(X), again.predict(X))
    GPRegressor(**SMALL, random_state=None).fit(X, y)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [GPRegressor(M=5, num_steps=3), GPClassifier(M=5, num_steps=40)])
def test_check_estimator(estimator):
    results = check_estimator(estimator, on_fail=None)
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed, failed


def test_masked_entries_are_missing(rng):
    """scikit-learn drops masks, so the numbers beneath were used."""
    X = rng.normal(size=(40, 2))
    hidden = np.ma.masked_array(X, mask=X > 1.5)
    options = {"M": 5, "num_steps": 3}
    masked = GPRegressor(**options).fit(hidden, X[:, 0])
    known = GPRegressor(**options).fit(hidden.filled(np.nan), X[:, 0])
    np.testing.assert_array_equal(masked.predict(hidden[:9]), known.predict(hidden[:9].filled(np.nan)))
    with pytest.raises(ValueError, match=r"`y` is a masked array with entries missing\. Leave these rows out"):
        GPRegressor(**options).fit(X, np.ma.masked_array(X[:, 0], mask=X[:, 0] > 1))


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    """Its name there is not the one that is imported."""
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "numpyro_orthgp.sklearn")
    with pytest.raises(
        ImportError, match=r"needs scikit-learn, 1\.6 or newer: pip install 'numpyro_orthgp\[sklearn\]'"
    ):
        importlib.import_module("numpyro_orthgp.sklearn")
