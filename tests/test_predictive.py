"""Predictive densities where p(y | f) is narrow beside q(f), or far from its middle: fixed nodes would pass between it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.distributions.transforms import AffineTransform
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, logsumexp, ndtr

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.math.peaks import log_normal_expectation
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


@pytest.mark.parametrize("log_concave", [False, True])
def test_a_gaussian_of_any_width_anywhere(log_concave):
    # p(t) = N(c; t, s^2) integrates to N(c; 0, 1 + s^2).
    center = np.array([0.0, 0.3, -2.0, 10.0, 30.0])
    of = functools.partial(log_normal_expectation, shape=center.shape, dtype=jnp.dtype(float), log_concave=log_concave)
    for width in (1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3):
        log_density = lambda t, width=width: jax.scipy.stats.norm.logpdf(center, t, width)  # noqa: E731
        got = jax.jit(lambda f=log_density: of(f))()
        # Of a general density two places are looked at, which share the integrand. Widths near 1e-6 lose digits of t itself.
        rtol = 1e-11 if log_concave and width >= 0.1 else 1e-8
        assert_allclose(got, stats.norm.logpdf(center, 0, np.sqrt(1 + width**2)), rtol=rtol, atol=1e-10)


NUM = 2001
# Likelihoods that say of themselves that log p(y | f) is concave in f, and outputs.
LOG_CONCAVE = {
    "Poisson": (likelihoods.Poisson, (0.0, 1.0, 300.0)),
    "Poisson, softplus": (lambda m: likelihoods.Poisson(m, link="softplus"), (0.0, 1.0, 300.0)),
    "NegativeBinomial": (lambda m: likelihoods.NegativeBinomial(m, 0.3), (0.0, 1.0, 300.0)),
    "Bernoulli": (likelihoods.Bernoulli, (0.0, 1.0)),
    "Binomial": (lambda m: likelihoods.Binomial(m, 50), (0.0, 1.0, 50.0)),
    "Binomial, probit": (lambda m: likelihoods.Binomial(m, 50, link="probit"), (0.0, 7.0, 50.0)),
    "Ordinal": (lambda m: likelihoods.Ordinal(m, CUTS), (0, 1, 2, 3)),
    "Ordinal, logit": (lambda m: likelihoods.Ordinal(m, CUTS, link="logit"), (0, 1, 2, 3)),
    "Weibull": (lambda m: likelihoods.Weibull(m, 8.0), (0.1, 1.0, 20.0)),
    "Weibull, censored": (lambda m: likelihoods.Weibull(m, 8.0, censored=np.ones(NUM, bool)), (0.1, 1.0, 20.0)),
    "Exponential": (likelihoods.Exponential, (0.1, 1.0, 20.0)),
    "Gamma": (lambda m: likelihoods.Gamma(m, 0.2), (0.1, 1.0, 20.0)),
    "Gamma, censored": (lambda m: likelihoods.Gamma(m, 30.0, censored=np.ones(NUM, bool)), (0.1, 1.0, 20.0)),
    "LogNormal": (lambda m: likelihoods.LogNormal(m, 0.3), (0.1, 1.0, 20.0)),
    "LogNormal, censored": (lambda m: likelihoods.LogNormal(m, 0.3, censored=np.ones(NUM, bool)), (0.1, 1.0, 20.0)),
}


def of_log_concave(name):
    f = np.linspace(-12, 12, NUM)
    return LOG_CONCAVE[name][0](ogp.Marginals(f, np.full(NUM, 1.0), np.zeros(NUM)))


@pytest.mark.parametrize("name", LOG_CONCAVE)
def test_what_is_said_to_be_log_concave_is(name):
    likelihood, y = of_log_concave(name), np.asarray(LOG_CONCAVE[name][1])
    f = likelihood.marginals.mean
    log_p = np.asarray(jax.jit(jax.vmap(lambda y: likelihood.log_density(f, jnp.broadcast_to(y, NUM))))(y))
    rounding = 1e-12 * (1 + np.abs(log_p[:, 1:-1]))
    assert (np.diff(log_p, 2) <= rounding).all()


def test_all_that_say_so_are_tested():
    say_so = {of for of in vars(likelihoods).values() if getattr(of, "_log_concave", False)}
    assert say_so == {type(of_log_concave(name)) for name in LOG_CONCAVE}


# Outputs that q excludes: mean, standard deviation and output, which put the peak of p(y | f) q(f) 15 to 400 deviations away.
FAR = {
    "poisson 0": [(10.0, 0.01, 0.0), (10.0, 0.01, 5000.0), (2.0, 0.03, 1e6), (8.0, 0.05, 500.0)],
    "binomial": [(5.0, 0.02, 0.0), (-7.0, 0.1, 9000.0)],
    "gamma": [(-2.0, 0.02, 2000.0), (10.0, 0.02, 800.0)],
}


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_outputs_that_q_excludes(name, dtype):
    """A count of 1e6 where 7.4 was expected, within 3 %, had the log density -7.5e6, for -7.7e4."""
    build, _, log_density = NARROW[name]
    mean, sd, y = np.array(FAR[name]).T
    t = np.linspace(-14, 14, 200_001)
    exact = []
    for m, s, of in zip(mean, sd, y, strict=True):
        joint = lambda t, m=m, s=s, of=of: log_density(of, m + s * t) - t**2 / 2  # noqa: E731
        at = minimize_scalar(lambda t, joint=joint: -joint(t)).x
        assert 15 < abs(at) < 400
        exact.append(logsumexp(joint(at + t)) + np.log((t[1] - t[0]) / np.sqrt(2 * np.pi)))
    m = ogp.Marginals(*(v.astype(dtype) for v in (mean, sd**2, 0 * sd)))
    found = jax.jit(lambda y: build(m).log_predictive(y))(y.astype(dtype))
    assert found.dtype == dtype
    assert_allclose(found, exact, rtol=1e-11 if dtype == np.float64 else 1e-5)


# What a user writes of f, and its log density: y does not tell f, or only up to a sign.
SEVERAL_PEAKS = {
    "f^2": (lambda f: dist.Normal(f**2, 0.03), lambda y, f: stats.norm.logpdf(y, f**2, 0.03), [-0.1, 0.2, 1.0, 4.0]),
    "|f|": (lambda f: dist.Normal(abs(f), 0.03), lambda y, f: stats.norm.logpdf(y, abs(f), 0.03), [0.2, 1.0, 4.0]),
    "sin f": (lambda f: dist.Normal(jnp.sin(f), 0.1), lambda y, f: stats.norm.logpdf(y, np.sin(f), 0.1), [-0.5, 0.9]),
    "rate f^2": (lambda f: dist.Poisson(f**2), lambda y, f: stats.poisson.logpmf(y, f**2), [0.0, 3.0, 40.0]),
}


@pytest.mark.parametrize("name", SEVERAL_PEAKS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_densities_of_several_peaks_equal_their_integral(name, dtype):
    fn, log_density, y = SEVERAL_PEAKS[name]
    y = np.asarray(y)

    @jax.jit
    def found(mean, variance, y):
        m = ogp.Marginals(mean, variance, 0 * variance)
        return ogp.Likelihood(m, fn).log_predictive(y), ogp.Likelihood(-m, fn).log_predictive(y)

    with np.errstate(divide="ignore"):
        expected = [
            oracles.log_predictive(log_density, value, 0.3, 4.0, num_nodes=400_001, width=14.0)[0] for value in y
        ]
    values, mirrored = found(*(np.full(len(y), a, dtype) for a in (0.3, 4.0)), y.astype(dtype))
    assert_allclose(values, expected, rtol=1e-5, atol=1e-3)
    if name != "sin f":  # the same density of -f, from other nodes
        assert_allclose(mirrored, values, rtol=1e-5, atol=1e-3)


TWO = {  # two functions; with Gaussian noise one of them has a closed form, and the other 400,000 nodes
    "noise": lambda f: dist.Normal(f[..., 0], jnp.exp(f[..., 1])),
    "noise first": lambda f: dist.Normal(f[..., 1], jnp.exp(f[..., 0])),
    "difference": lambda f: dist.Normal(f[..., 0] - f[..., 1], 0.03),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_densities_of_two_functions_equal_their_integral(name, dtype):
    """20 Gauss-Hermite nodes were off by 0.8 nats where q is wide beside the noise, and 200 by 0.5."""
    y = np.array([0.0, 1.0, 3.0, 15.0, 0.0, 0.5])
    mean = np.array([[0.3, -0.5]] * 4 + [[0.2, -3.0]] * 2)
    variance = np.array([[9.0, 4.0], [1.0, 1.0], [9.0, 4.0], [9.0, 4.0], [4.0, 0.1], [1e-4, 1e-2]])
    t, step = np.linspace(-12, 12, 400_001, retstep=True)
    mean_g, variance_g = mean[:, 1:], variance[:, 1:]
    if name == "difference":
        expected = stats.norm.logpdf(y, mean[:, 0] - mean[:, 1], np.sqrt(variance.sum(1) + 0.03**2))
    else:
        scale = np.sqrt(variance[:, :1] + np.exp(2 * (mean_g + np.sqrt(variance_g) * t)))
        expected = logsumexp(stats.norm.logpdf(y[:, None], mean[:, :1], scale) + stats.norm.logpdf(t), axis=1)
        expected += np.log(step)
    turned = -1 if name == "noise first" else 1

    @jax.jit
    def found(mean, variance, y):
        return ogp.Likelihood(ogp.Marginals(mean, variance, 0 * variance), TWO[name]).log_predictive(y)

    values = found(mean[:, ::turned].astype(dtype), variance[:, ::turned].astype(dtype), y.astype(dtype))
    assert_allclose(values, expected, rtol=1e-4, atol=1e-3)
    if name == "noise":
        m = ogp.Marginals(mean, variance, 0 * variance)
        assert_allclose(values, likelihoods.HeteroskedasticGaussian(m).log_predictive(y), rtol=1e-4, atol=1e-3)


def test_gradients_of_densities_of_two_functions_and_many_draws_of_them():
    y, mean = np.array([0.0, 3.0]), np.array([[0.3, -0.5]] * 2)
    m = ogp.Marginals(mean, np.array([[9.0, 4.0]] * 2), np.zeros((2, 2)))

    def density(m, y=y, integrator=None):
        return ogp.Likelihood(m, TWO["noise"], integrator=integrator).log_predictive(y)

    found = jax.jit(jax.grad(lambda m: density(m).sum()))(m)
    exact = jax.jit(jax.grad(lambda m: likelihoods.HeteroskedasticGaussian(m).log_predictive(y).sum()))(m)
    assert_allclose(found.mean, exact.mean, rtol=1e-4, atol=1e-5)
    assert_allclose(found.explained, exact.explained, rtol=1e-4, atol=1e-5)
    # Within `vmap` draws cost little.
    of_draws = jax.jit(jax.vmap(lambda y: density(m, y)))(np.stack([y, y + 1]))
    assert_allclose(of_draws[0], density(m, integrator=ogp.GaussHermite(31)), rtol=1e-9)


def test_rounding_of_large_factorials_far_from_q_is_no_density():
    # A difference of logarithms of factorials of exp(60), which NumPyro rounds to thousands.
    m = ogp.Marginals(np.full(1, 1.0), np.full(1, 9.0), np.zeros(1))
    fn = lambda g: dist.NegativeBinomial2(5.0, jnp.exp(g))  # noqa: E731
    values = ogp.Likelihood(m, fn).log_predictive(np.full(1, 4.0))
    t = np.linspace(-6, 6, 20_001)
    r = np.exp(1 + 3 * t)
    log_p = gammaln(4 + r) - gammaln(r) - gammaln(5) + r * np.log(r / (r + 5)) + 4 * np.log(5 / (r + 5))
    assert_allclose(values, logsumexp(log_p + stats.norm.logpdf(t)) + np.log(t[1] - t[0]), atol=1e-3)


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_impossible_output_has_no_density(dtype):
    """Under jit, where supports are not checked; the largest finite number stood for minus infinity in the search for peaks."""
    mean, variance, zero = (jnp.array([a, b], dtype) for a, b in ((0.0, 1.0), (0.5, 0.5), (0.0, 0.0)))
    f = ogp.Marginals(mean=mean, explained=variance, residual=zero)
    found = jax.jit(lambda y: ogp.Likelihood(f, lambda f: dist.Uniform(f - 1, f + 1)).log_predictive(y))
    densities = found(jnp.array([1e6, 1.2], dtype))
    normal = stats.norm(1.0, 0.5**0.5)
    assert densities[0] == -np.inf and densities.dtype == dtype
    np.testing.assert_allclose(densities[1], np.log((normal.cdf(2.2) - normal.cdf(0.2)) / 2), atol=0.05)
