"""The logarithms that likelihoods are made of, in the tails, in both precisions, and in their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as sp
import scipy.stats as stats
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.likelihoods import special
from numpyro_orthgp.likelihoods.links import POSITIVE_LINKS, PROBABILITY_LINKS

# -9 and -18: where the formula changes in float32 and in float64
X = np.concatenate([-np.logspace(3, -3, 40), [-20.0, -18.0, -9.0, 0.0], np.logspace(-3, 1, 20)])
DTYPES = [np.float64, np.float32]


def log_normal_tail(x):
    """log Phi by the scaled complementary error function."""
    return np.where(x < 0, np.log(sp.erfcx(-np.minimum(x, 0) / np.sqrt(2)) / 2) - x**2 / 2, sp.log_ndtr(x))


def mills(x):
    """d log Phi / dx."""
    return np.where(x < 0, np.sqrt(2 / np.pi) / sp.erfcx(-np.minimum(x, 0) / np.sqrt(2)), 0) + np.where(
        x < 0, 0, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) / sp.ndtr(np.maximum(x, 0))
    )


def evaluate(fn, *arguments):
    """Values and derivatives with respect to each argument."""
    derivatives = jax.vmap(jax.grad(fn, tuple(range(len(arguments)))))
    options = {"xla_backend_optimization_level": 0}  # compiling is most of the cost
    return jax.jit(lambda *a: (fn(*a), derivatives(*a)), compiler_options=options)(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_ndtr_and_its_derivative(dtype):
    x = X.astype(dtype)
    value, (slope,) = evaluate(special.log_ndtr, x)
    exact = x.astype(float)
    tol = 1e-12 if dtype is np.float64 else 3e-6
    assert_allclose(value, log_normal_tail(exact), rtol=tol, atol=tol / 30)
    assert_allclose(slope, mills(exact), rtol=10 * tol)
    scaled, _ = evaluate(special.log_ndtr_scaled, x[x <= 0])
    assert_allclose(scaled, (log_normal_tail(exact) + exact**2 / 2)[x <= 0], rtol=100 * tol, atol=tol)
    assert value.dtype == slope.dtype == scaled.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_difference_of_normal_distribution_functions(dtype):
    high, width = (a.ravel() for a in np.meshgrid(X[::3], np.array([1e-6, 0.01, 0.3, 2.0, 50.0])))
    high, width = high.astype(dtype), width.astype(dtype)
    value, (slope, width_slope) = evaluate(
        lambda h, w: special.log_ndtr_difference(h, w, jnp.zeros(jnp.shape(h), bool)), high, width
    )
    # the integral of the density over the interval, relative to its larger end, by Gauss-Legendre
    t, weights = np.polynomial.legendre.leggauss(400)
    low = high.astype(float) - width.astype(float)
    peak = np.clip(0.0, low, high.astype(float))
    reach = np.minimum(width.astype(float), 40 / np.maximum(1, np.abs(peak)))
    start, stop = np.maximum(low, peak - reach), np.minimum(high.astype(float), peak + reach)
    half = np.where(
        reach < width, (stop - start) / 2, width.astype(float) / 2
    )  # the width itself where all of it counts
    nodes = (start + stop) / 2 + half * t[:, None]
    relative = (half * np.exp((peak**2 - nodes**2) / 2) * weights[:, None]).sum(0)
    expected = np.log(relative) - peak**2 / 2 - np.log(2 * np.pi) / 2
    tol = 1e-11 if dtype is np.float64 else 1e-5
    assert_allclose(value, expected, rtol=tol, atol=tol)
    density = lambda x: np.exp(-(x**2) / 2 - np.log(2 * np.pi) / 2 - expected)  # noqa: E731
    scale = 1 + np.abs(high.astype(float))
    assert_allclose(
        slope / scale, (density(high.astype(float)) - density(low)) / scale, atol=1e-8 if tol < 1e-6 else 1e-3
    )
    assert_allclose(width_slope * width, density(low) * width, rtol=1e-7 if tol < 1e-6 else 5e-3, atol=1e-7)
    half_open = special.log_ndtr_difference(jnp.asarray(high), jnp.asarray(width), jnp.ones(high.shape, bool))
    assert_allclose(half_open, log_normal_tail(high.astype(float)), rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log1mexp(dtype):
    x = np.append(np.logspace(-6, 2, 50), np.log(2)).astype(dtype)
    value, (slope,) = evaluate(special.log1mexp, x)
    exact = x.astype(float)
    assert_allclose(
        value,
        np.where(exact < 1, np.log(-np.expm1(-exact)), np.log1p(-np.exp(-exact))),
        rtol=1e-12 if dtype is np.float64 else 1e-5,
        atol=1e-37,
    )
    assert_allclose(slope, 1 / np.expm1(exact), rtol=1e-12 if dtype is np.float64 else 1e-5, atol=1e-38)


def log_survival(a, x):
    """log Q(a, x) and its derivative with respect to a, from the integral over t = x + s of t^(a - 1) e^-t."""
    s, weights = np.polynomial.legendre.leggauss(2000)
    s = (s + 1) / 2 * (80 + 20 * np.sqrt(x) + 10 * a)[:, None]
    weights = weights * (80 + 20 * np.sqrt(x) + 10 * a)[:, None] / 2
    log_t = np.log(x[:, None] + s)
    log_terms = (a - 1)[:, None] * (log_t - np.log(x)[:, None]) - s
    terms = np.exp(log_terms - log_terms.max(1, keepdims=True)) * weights
    log_q = (a - 1) * np.log(x) - x + np.log(terms.sum(1)) + log_terms.max(1) - sp.gammaln(a)
    return log_q, (terms * log_t).sum(1) / terms.sum(1) - sp.digamma(a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_gammaincc_in_and_out_of_the_tail(dtype):
    a, z = (v.ravel() for v in np.meshgrid([0.1, 0.7, 1.0, 2.3, 10.0, 60.0], [-1.0, 0.0, 1.5, 2.5, 5, 20, 300, 1e4]))
    a = a.astype(dtype)
    log_x = np.log(np.maximum(a + z * np.sqrt(a) + (z > 0), 0.3 * a + 0.3)).astype(dtype)
    value, (slope_a, slope_x) = evaluate(special.log_gammaincc, a, log_x)
    a, x = a.astype(float), np.exp(log_x.astype(float))
    expected, expected_a = log_survival(a, x)
    tol = 1e-9 if dtype is np.float64 else 1e-4
    assert value.dtype == slope_a.dtype == dtype
    assert_allclose(value, expected, rtol=tol, atol=tol)
    assert_allclose(slope_a, expected_a, rtol=10 * tol, atol=10 * tol)
    hazard = np.exp(a * np.log(x) - x - sp.gammaln(a) - expected)
    assert_allclose(slope_x, -hazard, rtol=10 * tol, atol=10 * tol)


def test_log_gammaincc_is_finite_at_every_scale_of_time():
    log_x = np.array([-1e3, -80, 0, 40, 1e3], np.float32)
    for a in (0.1, 1.0, 30.0):
        value, slopes = evaluate(special.log_gammaincc, np.full(5, a, np.float32), log_x)
        assert np.isfinite(value).all() and all(np.isfinite(s).all() for s in slopes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_rising_does_not_cancel(dtype):
    a, n = (v.ravel() for v in np.meshgrid(np.append(np.logspace(-2, 7, 30), 30.0), [0.0, 1.0, 2.0, 7.0, 40.0]))
    a = a.astype(dtype)
    value, (slope, _) = evaluate(special.log_rising, a, n.astype(dtype))
    factors = a.astype(float)[:, None] + np.arange(40)
    used = np.arange(40) < n[:, None]
    tol = 1e-12 if dtype is np.float64 else 1e-5
    assert_allclose(value, np.where(used, np.log(factors), 0).sum(1), rtol=tol, atol=tol)
    assert_allclose(slope, np.where(used, 1 / factors, 0).sum(1), rtol=10 * tol, atol=tol)


def test_folded_mean():
    m, v = (a.ravel() for a in np.meshgrid([-1e3, -2.0, -1e-3, 0.0, 0.3, 1e10], [0.0, 1e-12, 1e-2, 1.0, 1e4]))
    value, (slope, variance_slope) = evaluate(special.folded_mean, m, v)
    s = np.sqrt(np.where(v > 0, v, 1))
    expected = np.where(
        v > 0, m * (2 * sp.ndtr(m / s) - 1) + 2 * s * np.exp(-((m / s) ** 2) / 2) / np.sqrt(2 * np.pi), np.abs(m)
    )
    assert_allclose(value, expected, rtol=1e-12)
    assert_allclose(slope, np.where(v > 0, 2 * sp.ndtr(m / s) - 1, np.sign(m)), rtol=1e-9, atol=1e-12)
    density = np.where(v > 0, np.exp(-((m / s) ** 2) / 2) / np.sqrt(2 * np.pi) / s, 0)
    assert_allclose(variance_slope, density, rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBABILITY_LINKS)
def test_probability_links(name, dtype):
    link = PROBABILITY_LINKS[name]
    f = np.linspace(-60, 4 if name == "cloglog" else 60, 121).astype(dtype)
    exact = f.astype(float)
    log_p, log_not_p = {
        "logit": (sp.log_expit(exact), sp.log_expit(-exact)),
        "probit": (log_normal_tail(exact), log_normal_tail(-exact)),
        "cloglog": (
            np.where(exact < 0, np.log(-np.expm1(-np.exp(exact))), np.log1p(-np.exp(-np.exp(np.maximum(exact, 0))))),
            -np.exp(exact),
        ),
    }[name]
    tol = 1e-12 if dtype is np.float64 else 5e-6
    for fn, expected in ((link.log_p, log_p), (link.log_not_p, log_not_p)):
        value, (slope,) = evaluate(fn, f)
        assert_allclose(value, expected, rtol=tol, atol=tol / 50)
        assert np.isfinite(slope).all()
    for fn, expected in ((link.p, log_p), (link.not_p, log_not_p)):
        assert_allclose(
            fn(jnp.asarray(f)), np.exp(expected), rtol=100 * tol, atol=1e-30 if dtype is np.float64 else 1e-7
        )
    value, (slope,) = evaluate(link.log_p, np.array([-1e3, 1e3], dtype))
    assert np.isfinite(value).all() and np.isfinite(slope).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POSITIVE_LINKS)
def test_positive_links(name, dtype):
    link = POSITIVE_LINKS[name]
    f = np.linspace(-80, 80, 161).astype(dtype)
    log_value, (slope,) = evaluate(link.log, f)
    exact = f.astype(float)
    expected = (
        exact
        if name == "exp"
        else np.where(exact < -30, exact, np.log(np.log1p(np.exp(-np.abs(exact))) + np.maximum(exact, 0)))
    )
    tol = 1e-12 if dtype is np.float64 else 1e-6
    assert_allclose(log_value, expected, rtol=tol, atol=tol)
    assert_allclose(link.value(jnp.asarray(f)), np.exp(expected), rtol=1e-4 if dtype is np.float32 else 1e-12)
    reference = np.ones(f.shape) if name == "exp" else sp.expit(exact) / np.exp(expected)
    assert_allclose(slope, reference, rtol=10 * tol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_student_t_of_many_degrees_of_freedom(dtype):
    """It becomes a Gaussian, smoothly: in float32 log Gamma functions of 1e6 differ by noise of 0.3."""
    df = np.array([0.5, 3.0, 58.0, 62.0, 300.0, 1e4, 1e6, 1e8], dtype)
    y, scale = dtype(1.0), dtype(0.5)

    def density(df):
        zero = jnp.zeros(1, dtype)
        m = ogp.Marginals(jnp.full(1, 0.3, dtype), zero, zero)
        return likelihoods.StudentT(m, df, scale).log_density(m.mean, y)[0]

    value, (slope,) = evaluate(jnp.vectorize(density), df)
    n, z2 = df.astype(float), (0.7 / 0.5) ** 2
    exact = stats.t.logpdf(1.0, n, 0.3, 0.5)
    exact_slope = (
        sp.digamma((n + 1) / 2) - sp.digamma(n / 2) - 1 / n - np.log1p(z2 / n) + (n + 1) * z2 / (n * (n + z2))
    ) / 2
    assert_allclose(value, exact, rtol=1e-9 if dtype is np.float64 else 1e-5)
    small = n < 1e4  # beyond, digamma functions cancel in the truth
    assert_allclose(np.asarray(slope)[small], exact_slope[small], rtol=1e-6 if dtype is np.float64 else 2e-2, atol=1e-7)
    assert np.abs(np.asarray(slope)[~small]).max() < 1e-8 and value.dtype == dtype


def test_robustmax_with_an_error_rate_for_each_point():
    m = ogp.Marginals(*(jnp.asarray(np.random.default_rng(i).uniform(0.2, 1.0, (4, 3))) for i in range(3)))
    rates, y = jnp.array([0.01, 0.2, 0.05, 0.4]), jnp.array([0, 2, 1, 1])
    together = likelihoods.Categorical(m, "robustmax", rates)
    for i, rate in enumerate(rates):
        alone = likelihoods.Categorical(m, "robustmax", rate)
        for name in ("log_prob", "log_predictive"):
            assert_allclose(getattr(together, name)(y)[i], getattr(alone, name)(y)[i], rtol=1e-12)
        assert_allclose(together.probs[i], alone.probs[i], rtol=1e-12)
        assert_allclose(together.conditional(m.mean).probs[i], alone.conditional(m.mean).probs[i], rtol=1e-12)
    for shape in ((4, 1), (3,), (4, 3), (1,)):
        with pytest.raises(ValueError, match=r"`epsilon` must have shape \(\) or \(4,\), one for each point; got"):
            likelihoods.Categorical(m, "robustmax", jnp.full(shape, 0.1))
