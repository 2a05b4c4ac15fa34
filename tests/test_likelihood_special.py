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
from tests.oracles import largest_of_normals, legendre

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
    assert_allclose(value, log_normal_tail(exact), rtol=tol, atol=0)
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
    t, weights = legendre(400)
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
    s, weights = legendre(2000)
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


def test_log_gammaincc_of_large_shapes_in_the_tail():
    """In float32, where a log x and log Gamma(a) are off by more than what they leave."""
    a, z = (v.ravel().astype(np.float32) for v in np.meshgrid([1e2, 1e3, 1e4, 1e5], [2.1, 3.0, 5.0]))
    log_x = np.log(a + z * np.sqrt(a) + 1)
    expected, _ = log_survival(a.astype(float), np.exp(log_x.astype(float)))
    value, _ = evaluate(special.log_gammaincc, a, log_x)
    assert_allclose(value, expected, rtol=1e-3)


def test_log_gammaincc_is_finite_at_every_scale_of_time():
    log_x = np.array([-1e3, -80, 0, 40, 1e3], np.float32)
    for a in (0.1, 1.0, 30.0):
        value, slopes = evaluate(special.log_gammaincc, np.full(5, a, np.float32), log_x)
        assert np.isfinite(value).all() and all(np.isfinite(s).all() for s in slopes)


def gradients(make, y, mean, variance, parameter, dtype):
    """Of the expected log density: its value, and its derivatives by mean, variance and parameter, each for all rows."""

    def one(m, v, p):
        f = ogp.Marginals(m[None], v[None], jnp.zeros(1, dtype))
        return make(f, p).expected_log_density(jnp.asarray([y], dtype))[0]

    rows = (jnp.asarray(a, dtype) for a in np.broadcast_arrays(mean, variance, parameter))
    value, slopes = jax.jit(jax.vmap(jax.value_and_grad(one, (0, 1, 2))))(*rows)
    return (value, *slopes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gamma_by_its_concentration_beside_a_wide_q(dtype):
    """It is log y - m - digamma(k), whatever the variance; e^(v / 2) hid it, and made NaN of it in float32."""
    m, v, k = (
        a.ravel().astype(dtype) for a in np.meshgrid([-50.0, -8.0, 0.0, 8.0], [1e-6, 9.0, 900.0], [0.3, 1.0, 50.0, 1e4])
    )
    slope = gradients(likelihoods.Gamma, 30.0, m, v, k, dtype)[3]
    expected = np.log(30.0) - m.astype(float) - sp.digamma(k.astype(float))
    assert_allclose(slope, expected, rtol=1e-9 if dtype is np.float64 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_censored_gamma_far_in_the_tail(dtype):
    """Far above the mean log S is -x + (k - 1) log x - log Gamma(k) to rounding; in float32 it ended at x = 1e19."""
    m, k = (a.ravel() for a in np.meshgrid([-50.0, -30.0, -12.0], [0.3, 1.0, 2.5, 50.0]))

    def make(f, k):
        return likelihoods.Gamma(f, k, jnp.ones(1, bool))

    value, by_mean, _, by_k = gradients(make, 1e6, m, np.full_like(m, 1e-4), k, dtype)
    tol = 1e-6 if dtype is np.float64 else 2e-5
    x = 1e6 * np.exp(-m + 5e-5)
    assert_allclose(value, -x, rtol=tol)
    assert_allclose(by_mean, x, rtol=tol)
    assert_allclose(by_k, np.log(1e6) - m - sp.digamma(k), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "inner",
    [lambda f: likelihoods.Poisson(f), lambda f: likelihoods.Binomial(f, 10, "cloglog")],
    ids=["Poisson", "Binomial"],
)
def test_zeros_where_rates_at_nodes_overflow_have_derivatives(inner):
    """In float32 a rate of e^95 at a node made NaN of derivatives that the gate makes small."""

    def make(f, gate):
        return likelihoods.ZeroInflated(inner(f), gate)

    given = make, 0.0, np.array([33.0, 35.0]), 100.0, 0.3
    single, double = (gradients(*given, dtype) for dtype in (np.float32, np.float64))
    for one, two in zip(single, double, strict=True):
        assert_allclose(one, two, rtol=2e-4)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_stirlings_formula_leaves(dtype):
    z = np.append(np.logspace(-3, 8, 60), 16.0).astype(dtype)
    value, (slope, log_slope) = evaluate(special.stirling, z, np.log(z))
    x, single = z.astype(float), dtype is np.float32
    few = np.minimum(x, 300)
    exact = np.where(
        x < 300,
        sp.gammaln(few + 1) - (few + 0.5) * np.log(few) + few - np.log(2 * np.pi) / 2,
        1 / (12 * x) - 1 / (360 * x**3),
    )
    assert_allclose(value, exact, rtol=0, atol=6e-6 if single else 1e-12)
    exact_slope = np.where(x < 300, sp.digamma(few + 1) - np.log(few) - 0.5 / few, -1 / (12 * x**2) + 1 / (120 * x**4))
    assert_allclose(slope + log_slope / z, exact_slope, rtol=1e-4 if single else 1e-9, atol=2e-6 if single else 1e-12)


# Each with counts or a precision up to millions, near where its density is largest and some standard deviations beside it.
MANY = np.array([0.0, 1.0, 3.0, 15.0, 17.0, 40.0, 5000.0, 200_000.0, 500_000.0, 999_997.0, 1_000_000.0, 3_000_000.0])
EXPOSURE = np.linspace(0.5, 2.0, len(MANY))
SIDES = np.array([-8.0, -2.0, 0.0, 0.3, 6.0])[:, None]


def log_binomial(log_p, log_not_p, y, n):
    ways = sp.gammaln(n + 1) - sp.gammaln(y + 1) - sp.gammaln(n - y + 1)
    return ways + np.where(y > 0, y * log_p, 0) + np.where(y < n, (n - y) * log_not_p, 0)


def log_cloglog(f):
    return np.log(-np.expm1(-np.exp(f)))


def log_negative_binomial(f, y, k):
    odds = y * sp.log_expit(f - np.log(k)) + k * sp.log_expit(np.log(k) - f)
    return sp.gammaln(y + k) - sp.gammaln(k) - sp.gammaln(y + 1) + odds


def near_share(inverse, y, n):
    """f of the share of successes and some deviations beside it."""
    q = (y + 0.5) / (n + 1)
    width = np.abs(inverse(q + 1e-3 * q * (1 - q)) - inverse(q)) * 1e3 / np.sqrt((n + 1) * q * (1 - q))
    return inverse(q) + SIDES * width


TRIALS = {
    "logit": (sp.logit, sp.log_expit, lambda f: sp.log_expit(-f)),
    "cloglog": (lambda q: np.log(-np.log1p(-q)), log_cloglog, lambda f: -np.exp(f)),
}
# name -> (likelihood of marginals and a parameter, outputs, parameter, f, log density)
LARGE = {
    **{
        f"binomial {link} of {n:.0f}": (
            lambda m, n, link=link: likelihoods.Binomial(m, n, link),
            np.minimum(MANY, n),
            np.full(MANY.shape, n),
            near_share(inverse, np.minimum(MANY, n), n),
            lambda f, y, n, p=p, not_p=not_p: log_binomial(p(f), not_p(f), y, n),
        )
        for link, (inverse, p, not_p) in TRIALS.items()
        for n in (20.0, 1e6, 7e6)
    },
    **{
        f"poisson {link}": (
            lambda m, c, link=link: likelihoods.Poisson(m, c, link),
            MANY,
            EXPOSURE,
            np.log((MANY + 0.5) / EXPOSURE) + SIDES / np.sqrt(MANY + 1)
            if link == "exp"
            else (MANY + 0.7 + SIDES * np.sqrt(MANY + 1) / 8) / EXPOSURE,
            lambda f, y, c, rate=rate: y * np.log(c * rate(f)) - c * rate(f) - sp.gammaln(y + 1),
        )
        for link, rate in (("exp", np.exp), ("softplus", lambda f: np.logaddexp(0, f)))
    },
    **{
        f"negative binomial of {k:g}": (
            likelihoods.NegativeBinomial,
            MANY,
            np.full(MANY.shape, k),
            np.log(MANY + 0.5) + SIDES * np.minimum(np.sqrt(1 / (MANY + 1) + 1 / k), 3),
            log_negative_binomial,
        )
        for k in (0.01, 10.0, 1e6, 1e8)
    },
    "beta": (
        likelihoods.Beta,
        np.resize([0.5, 0.013, 0.96], len(MANY)),
        np.logspace(-2, 6, len(MANY)),
        sp.logit(np.resize([0.5, 0.013, 0.96], len(MANY))) + SIDES / np.sqrt(1 + np.logspace(-2, 6, len(MANY))),
        lambda f, y, c: stats.beta.logpdf(y, c * sp.expit(f), c * sp.expit(-f)),
    ),
    "gamma": (
        likelihoods.Gamma,
        np.resize([0.5, 1.3, 700.0], len(MANY)) * np.logspace(-2, 6, len(MANY)),
        np.logspace(-2, 6, len(MANY)),
        np.log(np.resize([0.5, 1.3, 700.0], len(MANY))) + SIDES / np.sqrt(1 + np.logspace(-2, 6, len(MANY))),
        lambda f, y, k: (k - 1) * np.log(y) - k * f - y * np.exp(-f) - sp.gammaln(k),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_densities_of_large_counts(name, dtype):
    """In float32 the terms of a million's density are off by more than its logarithm; and the derivatives are right too."""
    build, y, parameter, f, log_density = LARGE[name]
    y, parameter, f = y.astype(dtype), parameter.astype(dtype), f.astype(dtype)

    def density(f, parameter):
        zero = jnp.zeros_like(f)
        return build(ogp.Marginals(f, zero, zero), parameter).log_density(f, jnp.asarray(y))

    value, slope, second = jax.jit(
        jax.vmap(
            lambda f: (
                density(f, parameter),
                *jax.jvp(jax.grad(lambda f: density(f, parameter).sum()), (f,), (jnp.ones_like(f),)),
            )
        )
    )(f)
    by_parameter = jax.jit(jax.grad(lambda f, p: sum(density(row, p).sum() for row in f), 1))(f, parameter)
    f, y, parameter = (a.astype(float) for a in (f, y, parameter))
    exact, single = log_density(f, y, parameter), dtype is np.float32
    size = np.maximum(y, parameter)
    step = 1e-3 / np.sqrt(1 + (parameter if name == "beta" or ("binomial of" not in name and "of" in name) else y))
    up, down = (log_density(f + sign * step, y, parameter) for sign in (1, -1))
    exact_slope = (up - down) / (2 * step)
    # as right as f is: rounding it changes the density too; and log Gamma functions of scipy are rounded
    rounding = 4 * np.finfo(dtype).eps * (1 + np.abs(f)) * np.abs(exact_slope) + 1e-14 * size
    assert value.dtype == dtype
    assert (np.abs(value - exact) <= (1e-4 if single else 1e-12) * (1 + np.abs(exact)) + rounding).all()
    width = 1 + np.sqrt(size)
    assert_allclose(slope / width, exact_slope / width, rtol=5e-3, atol=2e-3)
    assert np.isfinite(second).all() and np.isfinite(by_parameter).all()


def test_expectations_of_large_counts_in_float32():
    """The closed forms, against the log density integrated in float64."""
    t, w = np.polynomial.hermite_e.hermegauss(60)
    w = w[:, None] / w.sum()
    y, v, n = np.float32(MANY), np.full(len(MANY), 1e-3, np.float32), np.float32(3e6)
    cloglog = TRIALS["cloglog"]
    cases = [
        (likelihoods.Poisson, np.log(y + np.float32(0.5)), LARGE["poisson exp"][4], np.float32(1)),
        (
            lambda m, n: likelihoods.Binomial(m, n, "cloglog"),
            cloglog[0](np.float32(0.999) * (y + np.float32(0.5)) / n),
            lambda f, y, n: log_binomial(cloglog[1](f), cloglog[2](f), y, n),
            n,
        ),
    ]
    for build, mean, log_density, parameter in cases:
        got = build(ogp.Marginals(*map(jnp.asarray, (mean, v, 0 * v))), parameter).log_prob(y)
        f = mean.astype(float) + np.sqrt(v.astype(float)) * t[:, None]
        exact = (w * log_density(f, y.astype(float), float(parameter))).sum(0)
        assert got.dtype == jnp.float32
        # E[log p] of "cloglog" is integrated by itself, so that rounding in it is times the number of successes
        atol = 1e-4 if build is likelihoods.Poisson else 1e-4 + 8 * np.finfo(np.float32).eps * y
        assert (np.abs(got - exact) <= 1e-4 * np.abs(exact) + atol).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_variance_of_weibull_times_does_not_cancel(dtype):
    k = np.append(np.logspace(-0.5, 4, 40), [5.0, 4.999, 200.0, 1000.0, 5000.0]).astype(dtype)
    value, (slope,) = evaluate(special.log_gamma_spread, 1 / k)
    x = 1 / k.astype(float)
    log_gamma = lambda x: sum(sp.zeta(n) * (-x) ** n / n for n in range(2, 30)) - np.euler_gamma * x  # noqa: E731
    small = np.minimum(x, 0.05)
    # a direct difference where that is precise, and the plain Taylor series of log Gamma(1 + x), without its linear term, else
    series = sum(sp.zeta(n) * (-small) ** n * (2.0**n - 2) / n for n in range(2, 30))
    assert_allclose(log_gamma(0.05), sp.gammaln(1.05), rtol=1e-13)
    exact = np.where(x < 0.05, series, sp.gammaln(1 + 2 * x) - 2 * sp.gammaln(1 + x))
    tol = 1e-12 if dtype is np.float64 else 2e-5
    assert_allclose(value, exact, rtol=tol)
    assert_allclose(slope, 2 * (sp.digamma(1 + 2 * x) - sp.digamma(1 + x)), rtol=10 * tol)
    zero = jnp.zeros(k.shape, dtype)
    variance = likelihoods.Weibull(ogp.Marginals(zero, zero, zero), k).variance
    assert_allclose(variance, np.exp(2 * sp.gammaln(1 + x)) * np.expm1(exact), rtol=2 * tol)
    assert variance.dtype == dtype


def test_student_t_noise_has_no_variance_up_to_two_degrees_of_freedom():
    df = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 30.0])
    m = ogp.Marginals(*(jnp.full(6, a) for a in (0.3, 0.2, 0.1)))
    d = likelihoods.StudentT(m, df, 0.7)
    assert_allclose(d.variance, [np.inf] * 4 + [0.3 + stats.t.var(n, scale=0.7) for n in df[4:]], rtol=1e-12)
    assert_allclose(d.mean, [np.inf] * 2 + [0.3] * 4, rtol=1e-12)


# ---------------------------------------------------------------- the largest of several functions


def functions_of_many_widths(rng, num, classes):
    """Means and standard deviations of which the largest may be 1e4 times the smallest, some far apart, some close."""
    scale = np.exp(rng.uniform(-1, 1, (num, classes)) * rng.choice([0, 0.5, 1, 2], (num, 1)) * np.log(10))
    spread = np.stack(
        [rng.choice([0, 1e-3, 1, 30], num), *[s * rng.choice([0.3, 3], num) for s in (scale.min(1), scale.max(1))]]
    )
    return rng.normal(size=(num, classes)) * spread[rng.integers(3, size=num), np.arange(num)][:, None], scale


def robustmax(mean, variance, y):
    d = likelihoods.Categorical(ogp.Marginals(mean, variance, jnp.zeros_like(mean)), "robustmax", 0.5)
    k = mean.shape[-1] - 1  # p from (1 - e) p + e / k (1 - p)
    p = lambda x: (x - 0.5 / k) / (0.5 - 0.5 / k)  # noqa: E731
    return p(jnp.exp(d.log_predictive(y))), p(d.probs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 10])
def test_robustmax_of_functions_of_any_width(rng, classes, dtype):
    mean, scale = (a.astype(dtype) for a in functions_of_many_widths(rng, 200, classes))
    y = rng.integers(classes, size=200)
    p, every = jax.jit(robustmax)(mean, scale**2, y)
    slope = jax.jit(jax.grad(lambda m: robustmax(m, scale**2, y)[0].sum()))(mean)
    exact, exact_slope = map(
        np.array, zip(*[largest_of_normals(*row) for row in zip(mean, scale, y, strict=True)], strict=True)
    )
    tol = 1e-9 if dtype is np.float64 else 1e-5
    assert p.dtype == slope.dtype == dtype
    assert_allclose(p, exact, rtol=0, atol=tol)
    assert_allclose(every.sum(-1), 1, rtol=0, atol=tol)
    assert_allclose(np.take_along_axis(every, y[:, None], 1)[:, 0], exact, rtol=0, atol=tol)
    width = scale[np.arange(200), y][:, None]
    assert_allclose(slope * width, exact_slope * width, rtol=0, atol=10 * tol)


def test_robustmax_of_two_functions_is_a_probit_of_any_width():
    """Value, and first and second derivatives, in closed form."""
    ratio = np.logspace(-4, 4, 17)
    z = np.resize([0.0, -0.7, 2.0, -5.0, 40.0], 17)
    scale = np.stack([np.ones(17), ratio], -1)
    mean = np.stack([z * np.sqrt(1 + ratio**2), np.zeros(17)], -1)

    def ours(m, s):
        m = ogp.Marginals(m[None], s[None] ** 2, jnp.zeros((1, 2)))
        return likelihoods.Categorical(m, "robustmax", 0.01).log_prob(jnp.zeros(1))[0]

    def closed(m, s):
        p = jax.scipy.special.ndtr((m[0] - m[1]) / jnp.sqrt((s**2).sum()))
        return p * jnp.log(0.99) + (1 - p) * jnp.log(0.01)

    def derivatives(fn):
        # in units of the functions' own widths, in which derivatives are about one
        def scaled(x, m, s):
            return fn(m + s * x[:2], s * jnp.exp(x[2:]))

        each = jax.vmap(lambda m, s: [d(scaled)(jnp.zeros(4), m, s) for d in (lambda f: f, jax.grad, jax.hessian)])
        return jax.jit(each)(mean, scale)

    for got, expected, tol in zip(derivatives(ours), derivatives(closed), (1e-9, 1e-8, 1e-7), strict=True):
        assert_allclose(got, expected, rtol=0, atol=tol)


def test_robustmax_takes_the_integrator_it_is_given():
    mean, scale, y = np.array([[0.3, 0.0, -0.2]] * 3), np.array([[1.0, 0.05, 0.3]] * 3), np.arange(3)
    m = ogp.Marginals(*map(jnp.asarray, (mean, scale**2, 0 * mean)))
    t, w = np.polynomial.hermite_e.hermegauss(20)
    by_nodes = [
        (w / w.sum())
        @ np.prod([sp.ndtr((mean[0, c] + scale[0, c] * t - mean[0, j]) / scale[0, j]) for j in range(3) if j != c], 0)
        for c in range(3)
    ]
    d = likelihoods.Categorical(m, "robustmax", 0.1, integrator=likelihoods.GaussHermite(20))
    assert_allclose(
        jnp.exp(d.log_predictive(y)), 0.9 * np.array(by_nodes) + 0.05 * (1 - np.array(by_nodes)), rtol=1e-12
    )
    assert np.abs(d.probs[0] - likelihoods.Categorical(m, "robustmax", 0.1).probs[0]).max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_robustmax_where_some_functions_are_known_exactly(dtype):
    """A function of variance zero is a step: which of them is the largest, and how often the others exceed that."""
    mean = np.array([[0.3, 0.0, -1.0], [1.0, 5.0, 4.0], [0.0, 0.0, -3e3], [2.0, 1.0, 1.0]], dtype)
    scale = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1e-3, 1e-3, 1e3], [0.0, 1.0, 1e-12]], dtype)
    run = jax.jit(
        jax.value_and_grad(lambda m, v: (robustmax(m, v, jnp.zeros(4))[1] * jnp.arange(3.0, dtype=dtype)).sum(), (0, 1))
    )
    _, slopes = run(mean, scale**2)
    _, p = robustmax(jnp.asarray(mean), jnp.asarray(scale**2), np.zeros(4))
    wide = sp.ndtr(-3.0)  # of the last in the third row; it is larger than the others by 1e6 of their widths or lower
    above = sp.ndtr(1.0)
    exact = [[sp.ndtr(0.3), sp.ndtr(-0.3), 0], [0, 1, 0], [(1 - wide) / 2, (1 - wide) / 2, wide], [above, 1 - above, 0]]
    assert_allclose(p, exact, rtol=0, atol=1e-6 if dtype is np.float64 else 1e-5)
    assert all(np.isfinite(s).all() for s in slopes)


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_predictive_density_under_an_uncertain_noise_level(link):
    """Twenty nodes of Gauss and Hermite pass beside the levels at which an outlier is likely."""
    mean, variance = (
        np.array([[0.0, -2.0], [0.0, 0.0], [0.3, -2.0], [0.0, -2.0]]),
        np.array([[1e-4, 1.0], [1e-4, 1.0], [0, 9.0], [1e-2, 0.3]]),
    )
    y = np.array([3.0, 10.0, 0.4, 3.0])
    m = ogp.Marginals(jnp.asarray(mean), jnp.asarray(variance), jnp.zeros((4, 2)))
    t = np.linspace(-12, 12, 40_001)[:, None]
    g = mean[:, 1] + np.sqrt(variance[:, 1]) * t
    scale = np.exp(g) if link == "exp" else np.logaddexp(0, g)
    given = stats.norm.logpdf(y, mean[:, 0], np.sqrt(variance[:, 0] + scale**2))
    expected = sp.logsumexp(stats.norm.logpdf(t) + given, axis=0) + np.log(t[1] - t[0])
    got = likelihoods.HeteroskedasticGaussian(m, link).log_predictive(y)
    assert_allclose(got, expected, rtol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_trials_of_a_rare_event(dtype):
    """log(1 - p) for p = 3e-6 counts ten million times: it must not be the logarithm of a number rounded to nearly one."""
    f, n = np.array([-4.9, -4.5, -4.0, -2.0], dtype), dtype(1e7)
    m = ogp.Marginals(jnp.asarray(f), jnp.zeros_like(f), jnp.zeros_like(f))
    none = likelihoods.Binomial(m, n, "probit")
    exact = n * np.log1p(-sp.ndtr(f.astype(float)))
    tol = 1e-10 if dtype is np.float64 else 2e-5  # rounding f is f times as much
    assert_allclose(none.log_prob(jnp.zeros(4)), exact, rtol=tol)
    assert_allclose(none.log_predictive(jnp.zeros(4)), exact, rtol=tol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("link", PROBABILITY_LINKS)
def test_spread_of_outputs_that_are_nearly_certain(link, dtype):
    """n p - n E[p] has no digits where p is nearly one, and n (1 - p) has all."""
    mean, v, n = np.array([-4.5, 1.0, 4.5] if link == "probit" else [-9.0, 1.0, 2.5], dtype), dtype(0.09), 1e7
    m = ogp.Marginals(jnp.asarray(mean), jnp.full(3, v), jnp.zeros(3, dtype))
    t, w = np.polynomial.hermite_e.hermegauss(20)
    f = mean.astype(float)[:, None] + 0.3 * t
    exact = {"logit": (sp.expit(f), sp.expit(-f)), "probit": (sp.ndtr(f), sp.ndtr(-f))}.get(link)
    p, q = exact or (-np.expm1(-np.exp(f)), np.exp(-np.exp(f)))
    small, w = np.where(mean[:, None] > 0, q, p), w / w.sum()
    variance = ((small - (small @ w)[:, None]) ** 2) @ w
    tol = 1e-4 if link == "probit" else 1e-5  # the mean of a probit is known without nodes
    assert_allclose(likelihoods.Binomial(m, n, link).variance, n * (p * q) @ w + n**2 * variance, rtol=tol)
    assert_allclose(likelihoods.Beta(m, n - 1, link).variance, (p * q) @ w / n + variance, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_of_predictive_densities_far_from_the_data(dtype):
    """Weights of nodes must sum to one, however large the log densities of which they are exponentials."""
    y, scale = np.array([0.0, 3.0, 1e6], dtype), dtype(0.01)
    mean, v = np.array([80.0, -20.0, 2.0], dtype), np.array([0.01, 0.01, 25.0], dtype)

    def laplace(mean, v):
        return likelihoods.Laplace(ogp.Marginals(mean, v, jnp.zeros_like(v)), scale).log_predictive(jnp.asarray(y))

    value, slopes = jax.jit(lambda *a: (laplace(*a), jax.grad(lambda *a: laplace(*a).sum(), (0, 1))(*a)))(mean, v)
    d, v, rate = np.abs(y.astype(float) - mean), v.astype(float), 1 / float(scale)
    # Either the noise's slope reaches y, or a Gaussian does and the noise is beside it.
    z = d / np.sqrt(v) - rate * np.sqrt(v)
    wanted = log_normal_tail(z) - d * rate + v * rate**2 / 2 + np.log(rate / 2)
    hazard = mills(z)
    tol = 1e-9 if dtype is np.float64 else 1e-4
    assert_allclose(value, wanted, rtol=tol)
    assert_allclose(slopes[0], np.sign(y - mean) * (rate - hazard / np.sqrt(v)), rtol=10 * tol)
    by_v = rate**2 / 2 - hazard * (d / v**1.5 + rate / np.sqrt(v)) / 2
    assert_allclose(slopes[1], by_v, rtol=10 * tol)

    def poisson(mean, v):
        return likelihoods.Poisson(ogp.Marginals(mean, v, jnp.zeros_like(v))).log_predictive(jnp.asarray(counts))

    # A function that is known: log p(y | f) itself, minus ten million.
    counts, mean, v = np.array([1e7, 0.0, 1e7], dtype), np.array([0.3, 12.0, 16.0], dtype), np.full(3, 0, dtype)
    slope = jax.jit(jax.grad(lambda *a: poisson(*a).sum()))(mean, v)
    assert_allclose(slope, counts - np.exp(mean.astype(float)), rtol=tol)


def test_zeros_in_excess_and_the_complementary_log_log_have_derivatives_where_rates_overflow():
    m = ogp.Marginals(jnp.full(2, 20.0), jnp.full(2, 400.0), jnp.zeros(2))
    slope = jax.grad(lambda f: likelihoods.Bernoulli(ogp.Marginals(f, m.explained, m.residual), "cloglog").mean.sum())
    assert jnp.isfinite(slope(m.mean)).all()


def test_the_slope_of_an_exponential_that_is_far_below_one() -> None:
    """JAX's derivative of expm1 adds one again: of rates e^-16 of the count it was off by 9 % in float32."""

    def log_prob(mean, variance):
        m = ogp.Marginals(mean, variance, jnp.zeros_like(mean))
        return likelihoods.Poisson(m).log_prob(jnp.full(4, 100)).sum()

    mean = np.log(100) - np.array([12.0, 14.0, 16.0, 17.0])
    found = jax.grad(log_prob, 1)(jnp.asarray(mean, jnp.float32), jnp.full(4, 0.1, jnp.float32))
    assert_allclose(found, -np.exp(mean + 0.05) / 2, rtol=1e-5)
    assert_allclose(jax.grad(special.expm1)(jnp.float32(-30.0)), np.exp(-30), rtol=1e-6)
    for x in (-1.0, -1e-3, 0.0, 2.0):
        assert_allclose(special.expm1(x + jnp.zeros(())), np.expm1(x), rtol=1e-15)
        assert_allclose(jax.grad(special.expm1)(x), np.exp(x), rtol=1e-15)
