"""Rows that are unlike all those seen: densities, probabilities and quantiles allow for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import integrate, stats

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.mixtures import Mixture
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.strays import StrayCounts, StrayNumbers, weight_of

LOC, SCALE = np.array([0.3, 2.0, -1.0]), np.array([0.1, 0.5, 0.02])
ERRORS = Mixture(np.array([0.7, 0.3]), np.array([0.0, 0.2]), np.array([0.8, 1.9]))


def numbers(weight, is_log=False):
    return Predictions(LOC, SCALE, 0.0 * LOC, None, None, ERRORS, is_log, StrayNumbers(weight, 0.5, 1.5))


def rows(p, y):
    return np.full(len(p.loc), y)


@pytest.mark.parametrize("is_log", [False, True])
def test_numbers_have_one_distribution(is_log):
    p = numbers(0.04, is_log)
    for y in (0.4, 1.9, 7.0):
        z = (np.log(y) if is_log else y) - LOC
        slope = 1 / y if is_log else 1.0
        near = slope * sum(
            w * stats.norm.pdf(z / SCALE, m, s) / SCALE
            for w, m, s in zip(ERRORS.weights, ERRORS.locs, ERRORS.scales, strict=True)
        )
        far = slope * stats.cauchy.pdf(np.log(y) if is_log else y, 0.5, 1.5)
        np.testing.assert_allclose(np.exp(p.log_density(rows(p, y))), 0.96 * near + 0.04 * far, rtol=1e-12)
        steps = np.diff([p.cdf(rows(p, y + d)) for d in (-1e-6, 1e-6)], axis=0)[0] / 2e-6
        np.testing.assert_allclose(steps, np.exp(p.log_density(rows(p, y))), rtol=1e-5, atol=1e-8)
    level = np.array([0.001, 0.025, 0.5, 0.9, 0.999])
    found = p.quantile(level)
    np.testing.assert_allclose(
        np.stack([p.cdf(q) for q in found.T], -1), np.broadcast_to(level, found.shape), rtol=1e-9
    )
    np.testing.assert_array_equal(p.quantile(0.9), found[:, 3])


def test_means_leave_strays_out_and_none_change_nothing():
    with_some, with_none = numbers(0.04), numbers(0.0)
    np.testing.assert_array_equal(with_some.mean, with_none.mean)
    np.testing.assert_array_equal(with_some.sd, with_none.sd)
    np.testing.assert_array_equal(with_none.quantile(0.8), LOC + SCALE * ERRORS.quantile(np.array(0.8)))
    np.testing.assert_allclose(with_none.log_density(LOC), ERRORS.log_density(0 * LOC) - np.log(SCALE), rtol=1e-12)


def test_counts_have_one_distribution():
    mean = np.array([0.7, 12.0])

    def densities(log_mean, log_sd, y):
        return stats.poisson.logpmf(y, np.exp(log_mean))

    p = CountPredictions(np.log(mean), np.full(2, 1e-9), np.inf, densities, strays=StrayCounts(0.1, 2 * mean))
    pmf = np.exp([p.log_density(np.full(2, y)) for y in range(400)])
    np.testing.assert_allclose(np.cumsum(pmf, 0), [p.cdf(np.full(2, y)) for y in range(400)], rtol=1e-9)
    assert (1 - pmf.sum(0) < 0.1 * 2 * mean / 400).all()
    for level in (0.05, 0.5, 0.95, 0.999):
        found = p.quantile(level)
        assert (p.cdf(found) >= level).all() and (p.cdf(found - 1) < level).all()
    np.testing.assert_array_equal(p.cdf(np.full(2, -1)), 0.0)


def test_the_weight_is_the_expected_share_of_what_was_never_seen():
    for n in (1, 12, 500):
        # w = u^2 takes the prior's peak at zero away
        whole = integrate.quad(lambda u, n=n: (1 - u**2) ** (n - 0.5), 0, 1)[0]
        share = integrate.quad(lambda u, n=n: u**2 * (1 - u**2) ** (n - 0.5), 0, 1)[0]
        assert weight_of(n) == pytest.approx(share / whole, rel=1e-6)


def test_a_slip_of_the_pen_costs_no_more_than_it_should(rng):
    """One such row among a thousand cost 1000 nats and more: the whole test's mean said that the fit was worse than no fit."""
    x = rng.uniform(0, 6, 100)
    fit = ogp.regression(x, np.sin(x) + 0.01 * rng.normal(size=100), M=20, num_steps=60)
    assert "one new output in 202 is taken to have nothing to do with the inputs" in str(fit)
    new = fit.predict(x[:1])
    assert new.log_density(np.array([80.0])) > -20
    lower, upper = new.interval(0.95)
    assert upper - lower < 0.1
    counts = ogp.counts(x, rng.poisson(np.exp(1 + np.sin(x))), M=20, num_steps=60).predict(x[:1])
    assert counts.log_density(np.array([4000])) > -25
    alone = replace(fit, found=replace(fit.found, is_mean=True))
    assert alone.strays.weight == 0 and "nothing to do with the inputs" not in str(alone)


@pytest.mark.slow
def test_intervals_of_few_rows_hold_what_they_say():
    """Nothing was calibrated below 40 rows, and 95 % intervals held 80 %."""
    held = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(220, 4))
        y = X[:, 0] + np.sin(2 * X[:, 1]) + 0.4 * rng.normal(size=220)
        new = ogp.regression(X[:20], y[:20], num_steps=100).predict(X[20:])
        held.append([np.mean((low <= y[20:]) & (y[20:] <= high)) for low, high in map(new.interval, (0.5, 0.8, 0.95))])
    np.testing.assert_array_less([0.4, 0.68, 0.87], np.mean(held, 0))
