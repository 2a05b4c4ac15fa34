"""Expectations where q(f) is many times as wide as the likelihood's own scale, beside dense trapezoidal rules in NumPy.

Twenty Gauss-Hermite nodes pass over the bends of log p(y | f) there, and were off by some per cent, their derivatives by more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.special import expit, gammaln, log_expit, log_ndtr, ndtr

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.diagnostics import integration
from numpyro_orthgp.likelihoods.softplus import expected_sigmoid, softplus_gap
from numpyro_orthgp.math.quadrature import NUM_ABOUT_BENDS

DTYPES = [jnp.float64, jnp.float32]
WIDTHS = (0.1, 1.0, 3.0, 10.0, 30.0)
PLACES = (-2.0, -0.7, 0.0, 0.4, 1.5)  # of the mean, in standard deviations


def softplus(f):
    return np.maximum(f, 0) + np.log1p(np.exp(-np.abs(f)))


def expm1_log(x):
    """log(1 - exp(-x))."""
    return np.log(-np.expm1(-np.minimum(x, 700)))


def beta(f):
    p, q = np.maximum(9 * expit(f), 1e-290), np.maximum(9 * expit(-f), 1e-290)
    return gammaln(9.0) - gammaln(p) - gammaln(q) + (p - 1) * np.log(0.3) + (q - 1) * np.log(0.7)


def interval(f, half=3):
    """log(Phi(half - f) - Phi(-half - f))."""
    x = np.abs(f)
    far = log_ndtr(half - x)
    return far + expm1_log(far - log_ndtr(-half - x))


CLOSED = {  # name: likelihood, y, log p(y | f) up to a constant
    "Bernoulli": (likelihoods.Bernoulli, 1, log_expit),
    "Binomial": (lambda m: likelihoods.Binomial(m, 20), 7, lambda f: 7 * f - 20 * softplus(f)),
    "many trials": (lambda m: likelihoods.Binomial(m, 10**6), 10, lambda f: 10 * f - 1e6 * softplus(f)),
    "NegativeBinomial": (
        lambda m: likelihoods.NegativeBinomial(m, 2.0, 3.0),
        5,
        lambda f: 5 * f - 7 * softplus(f + np.log(1.5)),
    ),
    "Ordinal": (lambda m: likelihoods.Ordinal(m, jnp.array([-3.0, 3.0], m.mean.dtype), "logit"), 1, None),
    "lowest grade": (
        lambda m: likelihoods.Ordinal(m, jnp.array([-3.0, 3.0], m.mean.dtype), "logit"),
        0,
        lambda f: log_expit(-3 - f),
    ),
}
CLOSED["Ordinal"] = (*CLOSED["Ordinal"][:2], lambda f: log_expit(3 - f) + log_expit(f + 3))
NODES = {
    "probit": (lambda m: likelihoods.Bernoulli(m, "probit"), 0, lambda f: log_ndtr(-f)),
    "cloglog": (lambda m: likelihoods.Bernoulli(m, "cloglog"), 1, lambda f: expm1_log(np.exp(np.minimum(f, 6)))),
    "Poisson": (lambda m: likelihoods.Poisson(m, 1.0, "softplus"), 5, lambda f: 5 * np.log(softplus(f)) - softplus(f)),
    "NegativeBinomial": (
        lambda m: likelihoods.NegativeBinomial(m, 0.1, 1.0, "softplus"),
        5,
        lambda f: 5 * np.log(softplus(f)) - 5.1 * np.log(0.1 + softplus(f)),
    ),
    "Beta": (lambda m: likelihoods.Beta(m, 9.0), 0.3, beta),
    "Ordinal": (lambda m: likelihoods.Ordinal(m, jnp.array([-3.0, 3.0], m.mean.dtype)), 1, interval),
    "censored": (
        lambda m: likelihoods.LogNormal(m, 0.5, jnp.ones(m.shape, bool)),
        2.0,
        lambda f: log_ndtr((f - np.log(2)) / 0.5),
    ),
    "inflated": (
        lambda m: likelihoods.ZeroInflated(likelihoods.NegativeBinomial(m, 2.0), 0.1),
        0,
        lambda f: np.logaddexp(np.log(0.1), np.log(0.9) - 2 * softplus(f - np.log(2))),
    ),
}  # fmt: skip


def dense(log_density, mean, sd):
    """E[log p], and its derivatives by mean and standard deviation, by Stein's lemma."""
    t = np.linspace(-9, 9, 30_001)
    w = np.exp(-(t**2) / 2)
    w /= w.sum()
    values = np.stack([log_density(m + sd * t) for m in mean])
    about = values - values[:, len(t) // 2, None]
    return values @ w, about @ (w * t) / sd, about @ (w * (t**2 - 1)) / sd


def found(build, y, mean, sd, dtype):
    """The same of a likelihood, with a constant."""
    y = jnp.full(mean.shape, y, dtype if isinstance(y, float) else int)

    @jax.jit
    def of(mean, v):
        def total(m, v):
            value = build(ogp.Marginals(m, v, jnp.zeros_like(v))).log_prob(y)
            return value.sum(), value

        (_, value), (by_mean, by_variance) = jax.value_and_grad(total, (0, 1), has_aux=True)(mean, v)
        return value, by_mean, by_variance * 2 * jnp.sqrt(v)

    return [np.asarray(a, float) for a in of(jnp.asarray(mean, dtype), jnp.asarray(sd**2, dtype))]


def errors(case, dtype):
    """Of value and derivatives for each width, as shares of how much log p varies over q."""
    build, y, log_density = case
    sd, places = (a.ravel() for a in np.meshgrid(WIDTHS, PLACES, indexing="ij"))
    truth = np.concatenate([dense(log_density, s * np.array(PLACES), s) for s in WIDTHS], 1)
    constant = found(build, y, np.zeros(1), np.full(1, 1e-6), jnp.float64)[0] - log_density(np.zeros(1))
    value, by_mean, by_scale = found(build, y, sd * places, sd, dtype)
    size = 1 + np.abs(truth[0])
    off = [(value - truth[0] - constant) / size, (by_mean - truth[1]) * sd / size, (by_scale - truth[2]) * sd / size]
    return np.abs(off).reshape(3, len(WIDTHS), len(PLACES)).max(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLOSED)
def test_the_logistic_family_has_all_digits_at_every_width(name, dtype):
    value, *slopes = errors(CLOSED[name], dtype)
    tolerance = 3e-11 if dtype == jnp.float64 else 3e-6
    assert_allclose(value, 0, atol=tolerance)
    assert_allclose(slopes, 0, atol=20 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NODES)
def test_nodes_about_the_bends_of_other_likelihoods(name, dtype):
    """Off by up to 15 % at thirty before."""
    least = 1e-9 if dtype == jnp.float64 else 3e-6
    tolerance = np.maximum([1e-9, 4e-6, 4e-6, 3e-5, 5e-4], least)
    value, *slopes = errors(NODES[name], dtype)
    assert (value < tolerance).all(), value
    assert (slopes < 20 * tolerance).all(), slopes


@pytest.mark.parametrize("half", [3, 6])
def test_ordinal_with_cut_points_far_apart(half):
    """At a spread of one nodes about both cut points were off by 3e-5 and 1e-3: few were where q is."""
    mean, sd = (a.ravel() for a in np.meshgrid(np.linspace(-7, 7, 15), [1.0, 1.5]))
    cuts = jnp.array([-half, half], float)
    value, by_mean, _ = found(lambda m: likelihoods.Ordinal(m, cuts), 1, mean, sd, jnp.float64)
    truth = np.array([dense(lambda f: interval(f, half), [m], s) for m, s in zip(mean, sd, strict=True)])[..., 0]
    tolerance = np.where(sd == 1, 1e-9, 5e-6) * (1 + np.abs(truth[:, 0]))
    assert (np.abs(value - truth[:, 0]) < tolerance).all()
    assert (np.abs(by_mean - truth[:, 1]) < 20 * tolerance).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softplus_has_relative_digits_and_second_derivatives(dtype):
    """Values and derivatives, also where they are tiny, where nothing is uncertain, and a thousand away."""
    exact = dtype == jnp.float64
    every = jax.jit(
        jax.vmap(
            lambda m, v: (
                softplus_gap(m, v),
                jax.grad(softplus_gap)(m, v),
                jax.grad(softplus_gap, 1)(m, v),
                jax.grad(jax.grad(softplus_gap, 1), 1)(m, v),
                expected_sigmoid(m, v),
            )
        )
    )
    t = np.linspace(-12, 12, 60_001)
    w = np.exp(-(t**2) / 2) / np.exp(-(t**2) / 2).sum()
    for sd in (1e-3, 0.1, 0.45, 0.55, 1.0, 4.0, 30.0):
        mean = np.array([-4 * sd, -20.0, -3.0, 0.0, 0.7, 5.0])
        v = float(jnp.asarray(sd**2, dtype))
        gap, by_mean, by_variance, second, p = (
            np.asarray(a, float) for a in every(jnp.asarray(mean, dtype), jnp.full(6, v, dtype))
        )
        mean = np.asarray(jnp.asarray(mean, dtype), float)
        f = mean[:, None] + np.sqrt(v) * t
        a, x = np.abs(np.sqrt(v) * t), -np.abs(mean)[:, None]
        ratio = np.log(np.maximum(-np.expm1(-a), 1e-300) / (1 + np.exp(x)))
        truth = np.logaddexp(0, 2 * ratio + a + x) @ w / 2
        s1 = expit(f) * expit(-f)
        s3 = s1 * (1 - 6 * s1)
        assert_allclose(gap, truth, rtol=1e-10 if exact else 3e-5)
        assert_allclose(by_variance, s1 @ w / 2, rtol=1e-10 if exact else 1e-5)
        assert_allclose(by_mean, expit(f) @ w - expit(mean), rtol=0, atol=1e-11 if exact else 1e-6)
        assert_allclose(p, expit(f) @ w, rtol=1e-10 if exact else 1e-5)
        assert_allclose(second, s3 @ w / 4, rtol=0, atol=1e-9 if exact else 3e-5)
    m = jnp.array([-1e3, 1e3, 0.0, 2.0], dtype)
    for v in (0.0, 1e-12, 1e6):
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(every(m, jnp.full(4, v, dtype))))
    assert_allclose(every(m, jnp.zeros(4, dtype))[4], expit(np.asarray(m)), rtol=1e-10 if exact else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_classes_are_one_difference(dtype):
    """Their two-dimensional rule of 20 x 20 nodes was off by 3 % where the functions' scale is 20."""
    mean, sd = np.array([[1.0, -3.0], [20.0, 5.0]]), np.array([[20.0, 15.0], [2.0, 0.3]])
    mix = np.array([[1.0, 0.5], [-0.3, 2.0]])
    for mixing in (None, mix):
        m = ogp.Marginals(jnp.asarray(mean, dtype), jnp.asarray(sd**2, dtype), jnp.zeros((2, 2), dtype))
        m = m if mixing is None else m @ jnp.asarray(mixing, dtype)
        W = np.eye(2) if mixing is None else mixing
        d = (mean @ W) @ [1, -1]
        spread = np.sqrt(sd**2 @ (W @ [1, -1]) ** 2)
        t = np.linspace(-9, 9, 20_001)
        w = np.exp(-(t**2) / 2) / np.exp(-(t**2) / 2).sum()
        f = d[:, None] + spread[:, None] * t
        fn = likelihoods.Categorical(m)
        tolerance = 1e-10 if dtype == jnp.float64 else 1e-5
        for label, sign in ((0, 1), (1, -1)):
            y = jnp.full(2, label)
            assert_allclose(fn.log_prob(y), log_expit(sign * f) @ w, rtol=tolerance)
            assert_allclose(fn.probs[:, label], expit(sign * f) @ w, rtol=tolerance)
            # A probability near one has the rounding of one.
            atol = 1e-9 if dtype == jnp.float64 else 1e-6
            assert_allclose(fn.log_predictive(y), np.log(expit(sign * f) @ w), rtol=1e-6, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sd", [0.1, 1.0, 3.0, 5.0])
def test_a_noise_level_that_is_little_known(sd, dtype):
    """Of "softplus" noise: all of E[1 / softplus(g)^2] came from beyond the nodes, and was lost at 5."""
    t = np.linspace(-12 - 2 * sd, 10, 200_001)
    w = np.exp(-(t**2) / 2)
    w /= w.sum()
    for level in (-3.0, 0.0, 2.0):
        s = softplus(level + sd * t)
        mean, v = jnp.asarray([[0.3, level]], dtype), jnp.asarray([[0.5, sd**2]], dtype)
        fn = likelihoods.HeteroskedasticGaussian(ogp.Marginals(mean, v, jnp.zeros_like(v)), "softplus")
        truth = -np.log(2 * np.pi) / 2 - w @ np.log(s) - (0.7**2 + 0.5) / 2 * (w @ s**-2.0)
        assert_allclose(fn.log_prob(jnp.ones(1, dtype)), truth, rtol=1e-8 if dtype == jnp.float64 else 3e-6)


@pytest.mark.parametrize("k", [0.5, 3.0])
def test_censored_gamma_times_of_a_wide_q(k):
    """What falls as -y exp(-f) came from beyond the nodes: half of it was lost at ten, and more beyond."""
    sd, y = 10.0, 2.0
    m = ogp.Marginals(jnp.zeros(1), jnp.full(1, sd**2), jnp.zeros(1))
    found = likelihoods.Gamma(m, k, jnp.ones(1, bool)).log_prob(jnp.full(1, y))
    assert_allclose(found, -y * np.exp(sd**2 / 2), rtol=1e-9)  # the rest is smaller by twenty digits


@pytest.mark.parametrize("link, mean", [("logit", expit), ("probit", ndtr)])
def test_predictions_of_a_wide_q(link, mean):
    t = np.linspace(-9, 9, 20_001)
    w = np.exp(-(t**2) / 2) / np.exp(-(t**2) / 2).sum()
    f = np.array([-30.0, 0.0, 12.0])[:, None] + 30 * t
    m = ogp.Marginals(jnp.asarray([-30.0, 0.0, 12.0]), jnp.full(3, 900.0), jnp.zeros(3))
    assert_allclose(likelihoods.Bernoulli(m, link).mean, mean(f) @ w, rtol=1e-9)
    n = likelihoods.Binomial(m, 9, link)
    assert_allclose(n.variance, 9 * (mean(f) * mean(-f)) @ w + 81 * (mean(f) ** 2 @ w - (mean(f) @ w) ** 2), rtol=1e-3)
    assert_allclose(likelihoods.Poisson(m, 2.0, "softplus").mean, 2 * softplus(f) @ w, rtol=1e-5)


def test_nodes_that_are_asked_for_are_taken_and_the_report_knows_those_that_are_not():
    m = ogp.Marginals(jnp.zeros(2), jnp.full(2, 400.0), jnp.zeros(2))
    y = jnp.array([0, 1])
    x, w = np.polynomial.hermite_e.hermegauss(20)
    asked = likelihoods.Bernoulli(m, integrator=ogp.GaussHermite(20))
    assert_allclose(asked.log_prob(y), log_expit(20 * x) @ w / w.sum(), rtol=1e-9)
    assert abs(asked.log_prob(y) - likelihoods.Bernoulli(m).log_prob(y)).max() > 0.01
    probit = likelihoods.Bernoulli(m, "probit")
    assert integration._probe(asked, y).num_points == 20
    assert integration._probe(likelihoods.Bernoulli(m), y).dim is None  # in closed form
    assert integration._probe(probit, y).num_points == NUM_ABOUT_BENDS
    dense = jax.jit(lambda fn, y: integration.dense_expectation(fn, y, 1))(probit, y)
    assert_allclose(probit.log_prob(y), dense, rtol=1e-4)


def test_derivatives_of_a_compiled_expectation_add_no_axes():
    """Of those who refuse it: the rule of the derivative runs after the likelihood has returned."""
    with jax.numpy_rank_promotion("raise"):
        gradient = jax.grad(lambda v: jax.jit(softplus_gap)(jnp.ones(3), v).sum())(jnp.ones(3))
    assert_allclose(gradient, jax.grad(lambda v: softplus_gap(jnp.ones(3), v).sum())(jnp.ones(3)))


@pytest.mark.parametrize("num", [3, NUM_ABOUT_BENDS])
@pytest.mark.parametrize(
    "build, y",
    [
        (lambda m: likelihoods.Beta(m, 5.0), [0.2, 0.7]),
        (lambda m: likelihoods.Bernoulli(m, "probit"), [0, 1]),
        (lambda m: likelihoods.Poisson(m, link="softplus"), [0, 4]),
        (lambda m: likelihoods.ZeroInflated(likelihoods.Poisson(m), 0.3), [0, 4]),
    ],
    ids=["beta", "probit", "softplus", "zeros"],
)
def test_draws_of_outputs_have_nodes_in_an_axis_of_their_own(build, y, num):
    """Also where there are as many rows as nodes, so that another alignment would not fail."""
    m = ogp.Marginals(jnp.linspace(-3, 3, num), jnp.full(num, 9.0), jnp.zeros(num))
    likelihood, draws = build(m), jnp.resize(jnp.asarray(y), (2, 1, num))
    for density in (jax.jit(likelihood.log_prob), jax.jit(likelihood.log_predictive)):
        assert_allclose(density(draws), [[density(draw) for draw in pair] for pair in draws], rtol=1e-5)


# ---------------------------------------------------------------- classes of users


@pytest.mark.parametrize(
    "base", [likelihoods.Bernoulli, likelihoods.Poisson, likelihoods.StudentT, likelihoods.ZeroInflated]
)
@pytest.mark.parametrize("name", ["log_density", "conditional"])
def test_a_class_with_another_density_does_not_inherit_formulas(base, name):
    with pytest.raises(
        TypeError, match=rf"Mine changes `{name}` of {base.__name__}, whose expectations.*Derive the class"
    ):
        type("Mine", (base,), {name: lambda self, f, *y: f})
    kept = type("Mine", (base,), {name: lambda self, f, *y: f, "expected_log_density": lambda self, y: y})
    assert issubclass(kept, base) and issubclass(type("Other", (base,), {}), base)
    type("General", (likelihoods.Likelihood,), {name: lambda self, f, *y: f})


@pytest.mark.parametrize("base", [likelihoods.Gaussian, likelihoods.LogNormal, likelihoods.Transformed])
def test_an_expectation_that_the_bound_would_not_use(base):
    """A user's expectation was left out without a word: `log_prob` of these classes has a formula of its own."""
    own = {"expected_log_density": lambda self, y: y}
    with pytest.raises(
        TypeError, match=rf"Mine changes `expected_log_density` of {base.__name__}, .*`log_prob` too, or"
    ):
        type("Mine", (base,), own)
    assert issubclass(type("Mine", (base,), own | {"log_prob": lambda self, y: y}), base)
