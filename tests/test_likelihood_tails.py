"""NumPyro's censored and truncated distributions as likelihoods: right where f is far from y, in both precisions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats as stats
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.likelihoods.tails import log_prob
from tests import oracles

DTYPES = [np.float64, np.float32]
F = np.array([-20.0, -3.0, -0.4, 0.3, 2.0, 20.0])
LOW, Y = 0.4, 1.3
# each family given f, and SciPy's
FAMILIES = {
    "Normal": (lambda f: dist.Normal(f, 0.5), lambda f: stats.norm(f, 0.5)),
    "LogNormal": (lambda f: dist.LogNormal(f, 0.5), lambda f: stats.lognorm(0.5, scale=np.exp(f))),
    "Logistic": (lambda f: dist.Logistic(f, 0.5), lambda f: stats.logistic(f, 0.5)),
    "Laplace": (lambda f: dist.Laplace(f, 0.5), lambda f: stats.laplace(f, 0.5)),
    "Cauchy": (lambda f: dist.Cauchy(f, 0.5), lambda f: stats.cauchy(f, 0.5)),
    "StudentT": (lambda f: dist.StudentT(4.0, f, 0.5), lambda f: stats.t(4, f, 0.5)),
    "SoftLaplace": (lambda f: dist.SoftLaplace(f, 0.5), lambda f: stats.hypsecant(f, 0.5)),
    "Gumbel": (lambda f: dist.Gumbel(f / 5, 0.5), lambda f: stats.gumbel_r(f / 5, 0.5)),
    "Weibull": (lambda f: dist.Weibull(jnp.exp(f / 4), 1.5), lambda f: stats.weibull_min(1.5, scale=np.exp(f / 4))),
    "Exponential": (lambda f: dist.Exponential(jnp.exp(-f / 4)), lambda f: stats.expon(scale=np.exp(f / 4))),
    "Gamma": (lambda f: dist.Gamma(2.0, jnp.exp(-f / 4)), lambda f: stats.gamma(2, scale=np.exp(f / 4))),
}
SYMMETRIC = ["Normal", "Logistic", "Laplace", "Cauchy", "StudentT", "SoftLaplace"]


def log_between(law, low, high):
    """log P(low < y < high) from the side where the two probabilities are small."""
    with np.errstate(all="ignore"):
        below = law.logcdf(high) + np.log1p(-np.exp(law.logcdf(low) - law.logcdf(high)))
        above = law.logsf(low) + np.log1p(-np.exp(law.logsf(high) - law.logsf(low)))
    return np.where(law.sf(low) < law.cdf(high), above, below)


def intervals(law):
    """Kinds of rows: marks of left and right, both ends, what is expected at each f."""
    start = 0.0 if law.dist.a == 0 else -np.inf
    return [
        (False, False, LOW, Y, log_between(law, LOW, Y)),
        (True, True, LOW, Y, np.logaddexp(law.logcdf(LOW), law.logsf(Y))),
        (True, False, np.nan, Y, law.logcdf(Y)),
        (False, True, Y, np.nan, law.logsf(Y)),
        (False, False, Y, Y, law.logpdf(Y)),
        (False, False, start, Y, law.logcdf(Y)),
        (False, False, Y, np.inf, law.logsf(Y)),
    ]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(name, np.float64) for name in FAMILIES]
    + [(name, np.float32) for name in ("Normal", "Logistic", "StudentT", "Weibull")],
)
def test_log_densities_far_from_the_bulk(family, dtype):
    make, law = FAMILIES[family][0], FAMILIES[family][1](F)
    left, right, low, high, expected = (np.stack(part) for part in zip(*intervals(law), strict=True))
    rows, ends = lambda marks: np.repeat(marks[:, None], len(F), 1), np.stack([low, high], -1)[:, None].astype(dtype)
    seen = np.arange(2)[:, None] > 0  # a row that is not censored, beside one that is

    def values(f):
        yield log_prob(dist.IntervalCensoredDistribution(make(f), rows(left), rows(right)), jnp.asarray(ends))
        yield log_prob(dist.LeftCensoredDistribution(make(f), ~seen), jnp.asarray(Y, dtype))
        yield log_prob(dist.RightCensoredDistribution(make(f), ~seen), jnp.asarray(Y, dtype))
        for bounds in ({"low": LOW}, {"high": 2.0}, {"low": LOW, "high": 2.0}) if family in SYMMETRIC else ():
            yield log_prob(dist.TruncatedDistribution(make(f), **bounds), jnp.asarray(Y, dtype))

    @jax.jit
    def evaluate(f):
        found, back = jax.vjp(lambda f: tuple(values(f)), f)
        return found, back(jax.tree.map(jnp.ones_like, found))[0]

    found, slopes = evaluate(jnp.asarray(F, dtype))
    density = law.logpdf(Y)
    truncated = [density - law.logsf(LOW), density - law.logcdf(2), density - log_between(law, LOW, 2.0)]
    wanted = [expected, np.stack([law.logcdf(Y), density]), np.stack([law.logsf(Y), density]), *truncated]
    tolerance = 1e-9 if dtype == np.float64 else 2e-5
    for one, other in zip(found, wanted, strict=family in SYMMETRIC):
        known = np.isfinite(other)  # SciPy's own logarithms are infinite in some tails
        assert known.mean() > 0.8
        assert_allclose(one[known], other[known], tolerance, tolerance)
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_expectations_of_censored_and_truncated_outputs(dtype):
    """Where q is wide, or far from y, NumPyro's were -15.9 instead of -39.1 (float32), -32.7 instead of -75.3, or infinite."""
    mean, sd, scale = np.array([-2.0, 0.0, 2.0]), 0.5, 0.3
    f = ogp.Marginals(jnp.asarray(mean, dtype), jnp.full(3, sd**2, dtype), jnp.zeros(3, dtype))
    true, y = jnp.ones(3, bool), jnp.full(3, 0.5, dtype)
    ends = jnp.stack([y, y + 1], -1)

    def law(f):
        return stats.norm(f, scale)

    cases = [
        (lambda f: dist.RightCensoredDistribution(dist.Normal(f, scale), true), y, lambda y, f: law(f).logsf(y)),
        (lambda f: dist.LeftCensoredDistribution(dist.Normal(f, scale), true), y, lambda y, f: law(f).logcdf(y)),
        (
            lambda f: dist.IntervalCensoredDistribution(dist.Normal(f, scale), ~true, ~true),
            ends,
            lambda y, f: log_between(law(f), 0.5, 1.5),
        ),
        (
            lambda f: dist.TruncatedNormal(f, scale, low=0.0, high=1.0),
            y,
            lambda y, f: law(f).logpdf(y) - log_between(law(f), 0.0, 1.0),
        ),
    ]
    for fn, value, log_density in cases:
        found = jax.jit(lambda m, fn=fn, value=value: ogp.Likelihood(m, fn).log_prob(value))(f)
        expected = oracles.expected_log_density(log_density, np.full(3, 0.5), mean, np.full(3, sd**2))
        assert_allclose(found, expected, 2e-5, 2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_as_the_likelihoods_with_censored(dtype):
    f = ogp.Marginals(jnp.asarray([-2.0, 0.0, 1.0], dtype), jnp.full(3, 0.25, dtype), jnp.zeros(3, dtype))
    y, censored = jnp.asarray([1.5, 0.7, 2.0], dtype), jnp.array([True, False, True])

    def wrapped(make):
        return ogp.Likelihood(f, lambda f: dist.RightCensoredDistribution(make(f), censored)).log_prob(y)

    tolerance = 1e-6 if dtype == np.float64 else 1e-4
    for own, make in [
        (likelihoods.LogNormal(f, 0.3, censored=censored), lambda f: dist.LogNormal(f, 0.3)),
        (likelihoods.Weibull(f, 1.5, censored=censored), lambda f: dist.Weibull(jnp.exp(f), 1.5)),
        (likelihoods.Exponential(f, censored=censored), lambda f: dist.Exponential(jnp.exp(-f))),
        (likelihoods.Gamma(f, 2.0, censored=censored), lambda f: dist.Gamma(2.0, jnp.exp(-f))),
    ]:
        assert_allclose(wrapped(make), own.log_prob(y), tolerance, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordered_logistic(dtype):
    """They were infinite at a mean of -8 and a spread of 3 in float32, and of -30 in float64."""
    cutpoints, mean, sd = np.array([-1.0, 0.5, 2.0]), np.repeat([0.0, -8.0, -30.0, 9.0], 4), 3.0
    y = np.tile(np.arange(4), 4)
    f = ogp.Marginals(jnp.asarray(mean, dtype), jnp.full(16, sd**2, dtype), jnp.zeros(16, dtype))
    ends = np.concatenate([[-np.inf], cutpoints, [np.inf]])

    @jax.jit
    def evaluate(f):
        fn = lambda h: dist.OrderedLogistic(h, jnp.asarray(cutpoints, dtype))  # noqa: E731
        each = jax.grad(lambda h: log_prob(fn(h), jnp.asarray(y)).sum())(f.mean)
        return (
            ogp.Likelihood(f, fn).log_prob(jnp.asarray(y)),
            likelihoods.Ordinal(f, cutpoints, "logit").log_prob(y),
            each,
        )

    def log_density(k, _, f):
        return log_between(stats.logistic(f), ends[k], ends[k + 1])

    found, own, slopes = evaluate(f)
    of = [(partial(log_density, k), 0.0, np.array([m]), np.array([sd**2])) for k, m in zip(y, mean, strict=True)]
    expected = [oracles.expected_log_density(*arguments) for arguments in of]
    assert_allclose(found, np.ravel(expected), 2e-4, 2e-4)
    assert_allclose(found, own, 2e-4, 2e-4)
    assert np.isfinite(slopes).all()


def test_outputs_of_several_columns_and_unknown_bases():
    f = jnp.array([[-4.0, 0.0], [1.0, 2.0]])
    censored, y = jnp.array([[True, False], [True, True]]), jnp.full((2, 2), 0.5)
    given = dist.RightCensoredDistribution(dist.Normal(f, 0.3), censored)
    expected = np.where(censored, stats.norm(f, 0.3).logsf(0.5), stats.norm(f, 0.3).logpdf(0.5))
    assert_allclose(log_prob(given.to_event(1), y), expected.sum(-1), 1e-4)

    class Own(dist.Normal):
        """A base of which nothing is known here."""

    own = dist.RightCensoredDistribution(Own(f, 0.3), censored)
    assert_allclose(log_prob(own, y), own.log_prob(y))
