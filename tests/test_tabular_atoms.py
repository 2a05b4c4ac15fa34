"""Outputs with atoms: single values that recur, such as no rain, beside others that hardly do."""

from __future__ import annotations

import pickle
from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy import stats

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.atoms import Atoms, atoms_of
from numpyro_orthgp.tabular.mixtures import Mixture
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.strays import StrayNumbers


def test_atoms_are_values_that_recur_beside_others_that_do_not(rng):
    x = rng.normal(size=400)
    some = rng.random(400) < 0.2
    assert atoms_of(np.where(some, 0.0, np.exp(x))).tolist() == [0]
    assert atoms_of(np.clip(50 + 40 * x, 0, 100)).tolist() == [0, 100]
    assert atoms_of(np.where(some, 0.0, np.round(20 + 15 * rng.random(400), 1))).tolist() == [0]
    for y in (
        x,
        np.round(x),
        np.round(x, 1),
        rng.integers(0, 5, 400),
        np.where(x > 0, 1.0, 0.0),
        rng.poisson(2.0, 400),
    ):
        assert not len(atoms_of(y.astype(float)))
    rare = np.where(
        np.arange(400) < 320, 0.0, np.where(np.arange(400) < 336, 1.0, x)
    )  # 4 % of all, and 20 % of the others
    assert atoms_of(rare).tolist() == [0, 1] and not len(atoms_of(rare[rare == x]))
    assert not len(atoms_of(np.where(some, 0.0, x)[:30]))  # too few others
    assert not len(atoms_of(np.where(np.arange(400) < 12, 0.0, x)))  # too few at zero


@pytest.mark.parametrize("is_log", [False, True])
def test_a_distribution_of_two_parts(is_log, rng):
    """Beside draws: an atom, or an output of the other part."""
    errors = Mixture(np.array([0.3, 0.7]), np.array([0.0, 0.5]), np.array([1.0, 0.6]))
    values, p = np.array([0.0, 1.5]), np.array([[0.5, 0.1], [0.0, 0.9], [0.2, 0.2]])
    loc, scale = np.array([0.1, 0.4, -0.2]), np.array([0.7, 0.5, 0.6])
    found = Predictions(loc, scale, scale, errors=errors, is_log=is_log, atoms=Atoms(values, p))
    num = 200_000
    part = (rng.random((num, 1)) > 0.3).astype(int)
    other = loc + scale * (errors.locs[part] + errors.scales[part] * rng.normal(size=(num, 3)))
    other, u = np.exp(other) if is_log else other, rng.random((num, 3))
    draws = np.where(u < p[:, 0], values[0], np.where(u < p.sum(1), values[1], other))
    np.testing.assert_allclose(found.mean, draws.mean(0), atol=0.02)
    np.testing.assert_allclose(found.sd, draws.std(0), rtol=0.03)
    for y in (-0.5, 0.0, 0.3, 1.5, 2.0):
        np.testing.assert_allclose(found.cdf(np.full(3, y)), (draws <= y).mean(0), atol=5e-3)
    level = np.array([0.02, 0.3, 0.45, 0.8, 0.97])
    q = found.quantile(level)
    np.testing.assert_array_equal(q[:, 1], found.quantile(0.3))
    below, at_most = (np.stack([found.cdf(q[:, i] + move) for i in range(5)], -1) for move in (-1e-9, 1e-9))
    assert (below <= level + 1e-8).all() and (at_most >= level - 1e-8).all()
    np.testing.assert_array_equal(q[1], [q[1, 0], 1.5, 1.5, 1.5, q[1, 4]])
    np.testing.assert_allclose(found.log_density(np.full(3, 1.5)), np.log(p[:, 1]))
    y = np.array([0.3, 0.7, 2.1])
    alone = replace(found, atoms=None)
    np.testing.assert_allclose(found.log_density(y), alone.log_density(y) + np.log(1 - p.sum(1)))


def test_quantiles_of_two_parts_allow_for_strays():
    atoms = Atoms(np.zeros(1), np.array([[0.4], [0.1]]))
    p = Predictions(np.ones(2), np.full(2, 0.1), np.ones(2), strays=StrayNumbers(0.05, 1.0, 2.0), atoms=atoms)
    for level in (0.01, 0.3, 0.6, 0.999):
        q = p.quantile(level)
        assert (p.cdf(q - 1e-8) <= level).all() and (p.cdf(q + 1e-8) >= level).all()
    assert p.interval(0.999)[1].min() > 2


def test_rows_without_rain(tmp_path):
    """The call gave up: one distribution of y for all rows, whose intervals began below zero."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(420, 2))
    chance = stats.norm.cdf(2 * X[:, 1])
    y = np.where(rng.random(420) < chance, 0.0, np.exp(2 + np.sin(1.5 * X[:, 0]) + 0.3 * rng.normal(size=420)))
    given = np.where(np.arange(220) < 3, np.nan, y[:220])
    fit = ogp.regression(X[:220], given, M=10, num_steps=25)
    p, new = fit.predict(X[220:]), y[220:]
    dry = int(np.sum(given == 0))
    assert fit.num_dropped == 3 and fit.num_rows == 217 - dry and f"y is 0 in {dry} of 217 rows" in str(fit)
    assert fit.units.is_log and not fit.found.is_mean and min(fit.importance().values()) > 0.3
    np.testing.assert_allclose(p.cdf(np.zeros(200)), chance[220:], atol=0.25)
    lower, upper = p.interval(0.8)
    assert lower.min() == 0 and 0.74 < np.mean((lower <= new) & (new <= upper))
    assert np.sqrt(np.mean((p.mean - new) ** 2)) < 0.85 * new.std()
    fit.save(tmp_path / "fit.npz")
    for again in (ogp.load(tmp_path / "fit.npz"), pickle.loads(pickle.dumps(fit))):
        np.testing.assert_array_equal(again.predict(X[220:]).quantile(0.9), p.quantile(0.9))
    with jax.enable_x64(True):
        served = fit.export().call(fit.as_array(X[220:]))
    np.testing.assert_allclose([served["mean"], served["sd"]], [p.mean, p.sd], rtol=1e-9)
    np.testing.assert_allclose(served["atoms"], p.atoms.probabilities, rtol=1e-9)
