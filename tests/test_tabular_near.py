"""Predictions of tables from the rows nearest to each input, with hyperparameters that are learned from such predictions."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import pytest
from numpyro.infer.util import log_density
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.functions.neighbors import given_rows, nearest_rows
from numpyro_orthgp.tabular import near
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.left_out import with_errors
from numpyro_orthgp.tabular.mixtures import fit_mixture
from numpyro_orthgp.tabular.near import learn_near, neighbors_model

VALUES = {"lengthscale": np.array([0.7, 1.3]), "scale": np.array(1.2), "slope": np.array(0.4), "noise": np.array(0.3)}


def covariance(A, B):
    """Of ``VALUES``, by the formulas."""
    r = np.sqrt(5 * (((A[:, None] - B) / VALUES["lengthscale"]) ** 2).sum(-1))
    return VALUES["scale"] ** 2 * (1 + r + r**2 / 3) * np.exp(-r) + VALUES["slope"] ** 2 / 2 * A @ B.T


def table(num, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num, 2)), rng.normal(size=num)


def waves(num, seed=0):
    """Far more waves than few points can follow."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 1, (num, 2))
    return X, 100 + 20 * np.sin(12 * X[:, 0]) * np.cos(12 * X[:, 1]) + rng.normal(size=num)


def log_joint(values, *args, **kwargs):
    return float(log_density(numpyro.handlers.seed(neighbors_model, 0), args, kwargs, values)[0])


def test_all_other_rows_give_the_density_of_rows_left_out():
    """Rasmussen and Williams 2006, Eqs. 5.10 to 5.12, by the inverse of the whole covariance."""
    X, y = table(12)
    others = np.array([[j for j in range(12) if j != i] for i in range(12)])
    precision = np.linalg.inv(covariance(X, X) + 0.09 * np.eye(12))
    variance = 1 / np.diag(precision)
    mean = y - precision @ y * variance
    expected = np.sum(-0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance))

    def prior():
        near.covariance(2)
        numpyro.sample("noise", near.log_normal(0.2, 1.5))

    found = log_joint(VALUES, X, y, X[others], y[others], num_rows=12) - float(log_density(prior, (), {}, VALUES)[0])
    assert found == pytest.approx(expected, abs=1e-9)


def test_rows_stand_for_all_rows():
    X, y = table(12)
    given = (X[:4], y[:4], X[None, 5:9].repeat(4, 0), y[None, 5:9].repeat(4, 0))
    once, thrice = (log_joint(VALUES, *given, num_rows=num) for num in (4, 12))
    assert log_joint(VALUES, *given, num_rows=8) == pytest.approx((once + thrice) / 2, abs=1e-9) and once != thrice


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-4)])
def test_the_function_given_rows_of_each_input(dtype, tolerance):
    X, y = table(30)
    new, rows = X[:3].astype(dtype), np.array([[4, 9, 11, 20], [5, 6, 7, 8], [28, 29, 3, 10]])
    kernel = near.kernel_of({k: v.astype(dtype) for k, v in VALUES.items()})
    mean, variance = given_rows(kernel, dtype(0.3), new, X[rows].astype(dtype), y[rows].astype(dtype))
    assert mean.dtype == variance.dtype == dtype
    for i, r in enumerate(rows):
        solved = np.linalg.solve(covariance(X[r], X[r]) + 0.09 * np.eye(4), covariance(X[r], X[i : i + 1]))[:, 0]
        assert mean[i] == pytest.approx(solved @ y[r], abs=tolerance)
        expected = covariance(X[i : i + 1], X[i : i + 1])[0, 0] - solved @ covariance(X[r], X[i : i + 1])[:, 0]
        assert variance[i] == pytest.approx(expected, abs=tolerance)


def test_nearest_rows_by_lengthscales_without_the_row_itself():
    X, _ = table(50)
    lengthscale = np.array([0.2, 5.0])
    found = nearest_rows(kernels.Matern52(lengthscale), X[:7], X, 5, but=np.arange(7))
    distances = (((X[:7, None] - X) / lengthscale) ** 2).sum(-1)
    distances[np.arange(7), np.arange(7)] = np.inf
    assert (np.sort(found, -1) == np.sort(np.argsort(distances, -1)[:, :5], -1)).all()


def test_what_is_learned_predicts_rows_better_than_what_it_begins_with():
    X, y = waves(700)
    X, y = (X - 0.5) / X.std(0), (y - 100) / y.std()
    begin = {k: np.array(v) for k, v in {"lengthscale": [2.0, 2.0], "scale": 1.0, "slope": 0.3, "noise": 0.8}.items()}
    with jax.enable_x64(True):
        values = learn_near(begin, X[100:], y[100:], 0.0, Budget(None, 10, 40))
        assert 0.01 < values["noise"] < 0.2 and (values["lengthscale"] < 1.5).all()
        again = learn_near(begin, X[100:], y[100:], 0.0, Budget(None, 10, 40))
        assert all((values[name] == again[name]).all() for name in values)
        floored = learn_near(begin, X[100:], y[100:], 0.3, Budget(None, 10, 2))
        assert floored["noise"] >= 0.3
        assert learn_near(begin, X, y, 0.3, Budget(1e-9, None, 10))["noise"] == pytest.approx(np.hypot(0.8, 0.3))


def test_rows_left_out_pay_for_the_distribution_of_their_errors():
    """Half a log N for each parameter (Schwarz 1978); errors as stated have none."""
    rng = np.random.default_rng(0)
    stated, wide = rng.normal(size=400), 3 * rng.normal(size=400)
    tails = np.where(rng.uniform(size=400) < 0.2, 8, 0.5) * rng.normal(size=400) + 2
    assert [fit_mixture(z).num_parameters for z in (stated, wide)] == [0, 1] and fit_mixture(tails).num_parameters == 5
    for z in (stated, wide, tails):
        errors, normal = fit_mixture(z), stats.norm.logpdf(z).sum()
        price = 0.5 * np.log(400) * errors.num_parameters
        # The score may be of another unit of y: it is changed by what the distribution gains.
        assert with_errors(normal + 7, z) == pytest.approx(errors.log_density(z).sum() + 7 - price)


@pytest.fixture(scope="module")
def fit():
    return ogp.regression(*waves(5000), M=20, num_steps=25)


def test_many_rows_are_predicted_by_hyperparameters_of_their_own(fit):
    X, y = waves(500, seed=1)
    assert fit.found.near.own and fit.found.near.num_neighbors == 128
    assert "128 rows nearest to each input, with hyperparameters learned for this, and noise" in str(fit)
    assert 0.6 < fit.noise * fit.units.scale < 1.4 < fit.hyperparameters["noise"] * fit.units.scale
    predicted = fit.predict(X)
    assert np.std(predicted.mean - y) < 1.15
    lower, upper = predicted.interval(0.8)
    assert 0.74 < np.mean((lower < y) & (y < upper)) < 0.86


def test_such_a_fit_in_a_file(fit, tmp_path):
    X, _ = waves(40, seed=1)
    fit.save(tmp_path / "fit.npz")
    loaded = ogp.load(tmp_path / "fit.npz")
    assert str(loaded) == str(fit) and loaded.found.near.own
    for name in ("mean", "sd"):
        assert (getattr(loaded.predict(X), name) == getattr(fit.predict(X), name)).all()


def test_such_a_fit_as_a_program(fit):
    X, _ = waves(5, seed=1)
    program = fit.export()
    found = program.call(fit.as_array(X))
    assert np.asarray(found["mean"]) == pytest.approx(fit.predict(X).mean, rel=1e-9)


def test_ctrl_c_ends_the_time(monkeypatch):
    X, y = waves(300)
    begin = {k: np.array(v) for k, v in {"lengthscale": [2.0, 2.0], "scale": 1.0, "slope": 0.3, "noise": 0.8}.items()}

    def interrupt(self, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(Budget, "watch", interrupt)
    whole = Budget(None, 10, 20)
    part = whole.part(0.5)
    with jax.enable_x64(True):
        learn_near(begin, X, y / y.std(), 0.0, part)
    assert not part.allows(0.0) and not whole.allows(0.0) and whole.words().endswith("ended by Ctrl-C")
