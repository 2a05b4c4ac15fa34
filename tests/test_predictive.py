"""Predictive densities where p(y | f) is narrow beside q(f), or far from its middle: fixed nodes would pass between it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpyro.distributions.transforms import AffineTransform
from scipy import stats
from scipy.special import gammaln, ndtr

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.math.quadrature import log_normal_expectation
from tests import oracles

MEAN = np.array([0.0, 2.0, -1.0, 1.0, 0.5])
VARIANCE = np.array([1.0, 4.0, 0.5, 25.0, 1e-6])


def log_binomial(total):
    def log_density(y, f):
        choices = gammaln(total + 1) - gammaln(y + 1) - gammaln(total - y + 1)
        return choices - y * np.logaddexp(0, -f) - (total - y) * np.logaddexp(0, f)

    return log_density


def log_level(y, f):
    """Of four levels with cutpoints -0.1, 0, 0.01 the third, by distribution functions on the side where they do not cancel."""
    sign = np.where(f > 0.005, 1, -1)
    p = sign * (ndtr(sign * (0 - f)) - ndtr(sign * (0.01 - f)))
    return np.log(np.abs(p) + 1e-300)


CUTS = np.array([-0.1, 0.0, 0.01])
# What is built of f, an output, and its density given f.
NARROW = {
    "poisson 0": (likelihoods.Poisson, 0.0, oracles.log_poisson()),
    "poisson 5000": (likelihoods.Poisson, 5000.0, oracles.log_poisson()),
    "student t": (lambda m: likelihoods.StudentT(m, 3.0, 1e-3), 0.7, oracles.log_student_t(3.0, 1e-3)),
    "student t, far": (lambda m: likelihoods.StudentT(m, 3.0, 1e-3), 6.0, oracles.log_student_t(3.0, 1e-3)),
    "gamma": (
        lambda m: likelihoods.Gamma(m, 1000.0),
        800.0,
        lambda y, f: stats.gamma.logpdf(y, 1000.0, scale=np.exp(f)),
    ),
    "binomial": (lambda m: likelihoods.Binomial(m, 10_000), 9000.0, log_binomial(10_000)),
    "logit": (likelihoods.Bernoulli, 1.0, oracles.log_bernoulli_logit),
    "ordinal": (lambda m: likelihoods.Ordinal(m, CUTS.astype(m.mean.dtype)), 2, log_level),
}
every = pytest.mark.parametrize("name", NARROW)


def truth(name: str, mean=MEAN, variance=VARIANCE) -> np.ndarray:
    _, y, log_density = NARROW[name]
    with np.errstate(over="ignore", under="ignore"):
        # 15 standard deviations each way, a spacing of 1e-4 of them: far below the width of any of these densities.
        each = [
            oracles.log_predictive(log_density, y, *pair, num_nodes=300_001, width=15.0)
            for pair in zip(mean, variance, strict=True)
        ]
    return np.concatenate(each)


@functools.cache
def found(name: str, dtype=np.float64):
    """Predictive densities, and their gradient with respect to mean and variance."""
    build, y, _ = NARROW[name]
    mean, variance = MEAN.astype(dtype), VARIANCE.astype(dtype)
    y = np.full(len(MEAN), y)
    y = y.astype(dtype) if y.dtype.kind == "f" else y

    def total(mean, variance):
        values = build(ogp.Marginals(mean, variance, 0 * variance)).log_predictive(y)
        return values.sum(), values

    (_, values), gradient = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(mean, variance)
    assert values.dtype == dtype
    return values, gradient


@every
def test_narrow_densities_equal_their_integral(name):
    assert_allclose(found(name)[0], truth(name), rtol=1e-8)


@every
def test_their_gradient_equals_that_of_the_integral(name):
    _, (by_mean, by_variance) = found(name)
    h = 1e-4 * np.sqrt(VARIANCE)
    assert_allclose(by_mean, (truth(name, MEAN + h) - truth(name, MEAN - h)) / (2 * h), rtol=1e-4, atol=1e-6)
    h = 1e-4 * VARIANCE
    slope = (truth(name, variance=VARIANCE + h) - truth(name, variance=VARIANCE - h)) / (2 * h)
    assert_allclose(by_variance, slope, rtol=1e-4, atol=1e-6)


@every
def test_in_float32_they_are_as_precise_as_the_density_itself(name):
    values, gradient = found(name, np.float32)
    # Logarithms of factorials of 10,000 have errors of 5e-3 in float32.
    assert_allclose(values, truth(name), rtol=1e-5, atol=0.01 if name in ("poisson 5000", "binomial") else 1e-3)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_a_gaussian_of_any_width_anywhere():
    # p(t) = N(c; t, s^2) integrates to N(c; 0, 1 + s^2).
    center = np.array([0.0, 0.3, -2.0, 10.0, 30.0])
    for width in (1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3):
        log_density = lambda t, width=width: jax.scipy.stats.norm.logpdf(center, t, width)  # noqa: E731
        got = jax.jit(lambda f=log_density: log_normal_expectation(f, center.shape, jnp.dtype(float)))()
        assert_allclose(got, stats.norm.logpdf(center, 0, np.sqrt(1 + width**2)), rtol=1e-8, atol=1e-10)


def test_an_integrator_of_draws_is_used_as_it_is():
    m = ogp.Marginals(MEAN, VARIANCE, 0 * VARIANCE)
    integrator = ogp.QuasiMonteCarlo(64)
    with_draws = likelihoods.Poisson(m, integrator=integrator)
    nodes = integrator.shared_nodes(1, None, jnp.dtype(float))[0]  # of predictions: the same for all points
    f = MEAN + np.sqrt(VARIANCE) * np.asarray(nodes).reshape(64, 1)
    expected = np.log(np.exp(stats.poisson.logpmf(3, np.exp(f))).mean(0))
    assert_allclose(with_draws.log_predictive(np.full(len(MEAN), 3.0)), expected, rtol=1e-9)


def test_outputs_of_several_draws_at_once():
    m = ogp.Marginals(MEAN, VARIANCE, 0 * VARIANCE)
    d = likelihoods.Poisson(m)
    y = np.array([[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 0.0, 7.0, 8.0, 9.0]])
    assert_allclose(d.log_predictive(y), [d.log_predictive(row) for row in y], rtol=1e-12)


def test_another_unit_of_a_censored_time_changes_densities_and_no_probabilities():
    m, years = ogp.Marginals(MEAN, VARIANCE, 0 * VARIANCE), np.array([0.3, 1.0, 2.0, 0.7, 5.0])
    censored = np.array([True, False, True, False, True])
    in_days = AffineTransform(0.0, 365.0)
    for ours, expected in (
        (
            likelihoods.Transformed(likelihoods.Exponential(m, censored), in_days),
            likelihoods.Exponential(m + np.log(365.0), censored),
        ),
        (
            likelihoods.Transformed(likelihoods.LogNormal(m, 0.3, censored), in_days),
            likelihoods.LogNormal(m + np.log(365.0), 0.3, censored),
        ),
        (likelihoods.Transformed(likelihoods.Exponential(m), in_days), likelihoods.Exponential(m + np.log(365.0))),
    ):
        for method in ("log_prob", "log_predictive"):
            assert_allclose(getattr(ours, method)(365 * years), getattr(expected, method)(365 * years), rtol=1e-9)
