"""Likelihoods: every expectation against integrals that share no code with the package, in both precisions."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose
from numpyro.distributions.transforms import ComposeTransform, ExpTransform, StickBreakingTransform
from scipy import stats
from scipy.optimize import minimize_scalar

import numpyro_orthgp as ogp
from numpyro_orthgp import GaussHermite, MonteCarlo, QuasiMonteCarlo, likelihoods
from numpyro_orthgp.likelihoods import ExpectedLikelihood
from numpyro_orthgp.likelihoods.base import check_observed, log_predictive
from tests.likelihood_cases import (
    BY_NAME,
    CASES,
    CENSORED,
    CLASSES,
    COUNTS,
    CUTS,
    GRADES,
    LABELS,
    REAL,
    TIMES,
    TOTALS,
    B,
    Case,
    integrate,
    largest_of_three,
    marginals,
    tightened,
    warped,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
WITHOUT_MOMENTS = ("categorical", "robustmax", "exponentiated student t")
# Moments that the base class, which asks NumPyro's conditional distributions, does not have.
NOT_IN_BASE = (*WITHOUT_MOMENTS, "ordinal", "ordinal logit", "warped gaussian")
# Compiling is most of what these tests cost; what runs in float32, at the ends of the range, is compiled as users do.
L, FINE = likelihoods, GaussHermite(60)
QUICK = {"xla_backend_optimization_level": 0}
quick = functools.partial(jax.jit, compiler_options=QUICK)


@functools.cache
def truth(name: str) -> tuple[np.ndarray, np.ndarray]:
    """E[log p(y | f)] less what tightening costs, and log E[p(y | f)], of a case."""
    case = BY_NAME[name]
    m, variance, cost = tightened(case)
    if name == "robustmax":
        expectation, predictive = largest_of_three(np.asarray(m.mean), variance, **case.params, y=case.y)
    else:
        expectation, predictive = integrate(
            case, m.mean, variance, lambda f: case.log_density(f, case.y, **case.params)
        )
    return expectation - cost, predictive


def in_closed_form(case: Case) -> bool:
    own = type(case(marginals(case.num_latents))).expected_log_density
    return own is not ExpectedLikelihood.expected_log_density and case.name != "robustmax"


@functools.cache
def evaluator(name: str, single: bool = False):
    """Values and gradients at marginals and parameters, and what the base class integrates; compiled once per precision."""
    case, closed = BY_NAME[name], in_closed_form(BY_NAME[name])
    y = np.asarray(case.y)
    y = y.astype(np.float32) if single and y.dtype.kind == "f" else y
    weights = np.random.default_rng(0).uniform(0.5, 1.5, y.shape).astype(np.float32 if single else float)

    def run(m, params):
        d = case(m, GaussHermite(case.nodes), **params)
        values = d.log_prob(y), d.log_predictive(y)
        base = {}
        if closed and not single:
            base["expectation"] = ExpectedLikelihood.expected_log_density(d, jnp.asarray(y))
        if case.name not in NOT_IN_BASE and not single:
            for moment in ("mean", "variance"):
                base[moment] = getattr(d, moment), getattr(ExpectedLikelihood, moment).fget(d)
        total = lambda m, params: (weights * case(m, GaussHermite(case.nodes), **params).log_prob(y)).sum()  # noqa: E731
        return values, jax.grad(total, (0, 1))(m, params), base

    return jax.jit(run) if single else quick(run)


def parameters(case: Case, dtype: Any = float) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, dtype) for name, value in case.params.items()}


@functools.cache
def evaluated(name: str):
    """:func:`evaluator` in float64, at the marginals of :func:`tightened`."""
    case = BY_NAME[name]
    return evaluator(name)(tightened(case)[0], parameters(case))


# ---------------------------------------------------------------- expectations


@every_case
def test_expectation_equals_integral_quadrature_and_monte_carlo(case):
    m, _, cost = tightened(case)
    expected, _ = truth(case.name)
    (log_prob, _), _, base = evaluated(case.name)
    assert_allclose(log_prob, expected, rtol=case.rtol)
    if "expectation" in base:
        assert_allclose(log_prob + cost, base["expectation"], rtol=case.quadrature_rtol)

    nodes = jax.random.normal(jax.random.PRNGKey(2), (100_000, *m.shape))
    draws = case.log_density(np.asarray(m.at(nodes)), case.y, **case.params)
    z = (log_prob + cost - draws.mean(0)) / (draws.std(0) / np.sqrt(len(draws)))
    assert np.abs(z).max() < 4


@every_case
def test_log_predictive_equals_integral(case):
    assert_allclose(evaluated(case.name)[0][1], truth(case.name)[1], rtol=case.predictive_rtol)


@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in NOT_IN_BASE])
def test_moments_of_y_equal_those_that_the_base_class_integrates(name):
    base = evaluated(name)[2]
    for moment in ("mean", "variance"):
        assert_allclose(*base[moment], rtol=1e-7, err_msg=moment)


DEFAULT = (
    "heteroskedastic exp", "heteroskedastic softplus", "student t", "beta", "cloglog", "binomial", "poisson", "negative binomial",
    "weibull", "gamma", "ordinal", "categorical", "robustmax", "general heteroskedastic",
)  # fmt: skip


@pytest.mark.parametrize("name", DEFAULT)
def test_default_integrator_is_close(name):
    case = BY_NAME[name]
    d = case(tightened(case)[0])
    run = quick(lambda d: (d.log_prob(case.y), d.log_predictive(case.y)))
    for got, expected in zip(run(d), truth(case.name), strict=True):
        assert_allclose(got, expected, rtol=case.default_rtol)


SAMPLED = (
    "gaussian (B, P)", "heteroskedastic softplus", "student t", "laplace", "beta", "logit", "cloglog", "binomial cloglog",
    "poisson", "negative binomial", "zero-inflated poisson", "exponential", "weibull", "gamma", "log-normal", "ordinal",
    "ordinal logit", "categorical", "robustmax", "warped gaussian", "exponentiated student t", "elementwise exponential",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_moments_of_y_equal_those_of_its_samples(name):
    case = BY_NAME[name]
    m = tightened(case)[0]
    discrete = case.name in ("categorical", "robustmax", "ordinal", "ordinal logit")

    def moments(m, key):
        d = case(m, GaussHermite(case.nodes))
        draws = d.sample(key, (10_000,))
        if discrete:
            return draws, d.probs, d.probs * (1 - d.probs), d.support(draws)
        if case.name in WITHOUT_MOMENTS:  # its predictive density is all there is
            log_y = jnp.linspace(-15.0, 0.5, 2001)[:, None] * jnp.ones(B)
            p = jnp.trapezoid(jnp.exp(d.log_predictive(jnp.exp(log_y)) + log_y), log_y, axis=0)
            return jnp.log(draws) < 0.5, p, p * (1 - p), d.support(draws)
        return draws, d.mean, d.variance, d.support(draws)

    draws, mean, variance, inside = quick(moments)(m, jax.random.PRNGKey(3))
    assert inside.all()
    draws = np.asarray(draws, float)
    if discrete:
        draws = (draws[..., None] == np.arange(mean.shape[-1])).astype(float)
        assert_allclose(mean.sum(-1), 1, rtol=1e-4)
    centred = draws - draws.mean(0)
    stderr = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - mean) < 4 * stderr).all()
    if case.y is TIMES:  # too heavy a tail for the variance of draws
        return
    stderr_var = np.sqrt(((centred**4).mean(0) - draws.var(0) ** 2) / len(draws))
    # for a Bernoulli with p near 1/2 the sample variance p (1 - p) has a standard error of second order
    assert (np.abs(draws.var(0) - variance) < 4 * stderr_var + 16 * stderr**2).all()


@pytest.mark.parametrize("link", ["probit", "logit"])
def test_moments_of_ordered_classes_are_those_of_their_numbers(link):
    d = likelihoods.Ordinal(marginals(), CUTS, link)
    p, mean, variance = quick(lambda d: (d.probs, d.mean, d.variance))(d)
    p, k = np.asarray(p), np.arange(4)
    assert_allclose(mean, p @ k, rtol=1e-12)
    assert_allclose(variance, p @ k**2 - (p @ k) ** 2, rtol=1e-10)


@pytest.mark.parametrize("integrator", [QuasiMonteCarlo(1024), MonteCarlo(4096)], ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("name", ["logit", "categorical", "elementwise exponential"])
def test_random_integrators_are_unbiased(name, integrator):
    case, m = BY_NAME[name], tightened(BY_NAME[name])[0]

    def estimate(key):
        with numpyro.handlers.seed(rng_seed=key):
            return case(m, integrator).log_prob(case.y)

    draws = np.asarray(quick(jax.vmap(estimate))(jax.random.split(jax.random.PRNGKey(4), 40)))
    stderr = draws.std(0, ddof=1) / np.sqrt(len(draws))
    assert (stderr > 0).all() and (np.abs(draws.mean(0) - truth(case.name)[0]) < 4 * stderr).all()
    assert (stderr < 1e-2 * np.abs(draws.mean(0))).all()


def test_random_integrators_without_a_key_are_deterministic():
    first, second = quick(lambda m: [likelihoods.Categorical(m).log_prob(CLASSES) for _ in range(2)])(marginals(3))
    assert_allclose(first, second, rtol=0)


def test_classes_share_the_nodes_of_predictions():
    every = jnp.broadcast_to(jnp.arange(3)[:, None], (3, B))

    @quick
    def run(m):
        with numpyro.handlers.seed(rng_seed=0):
            first, second = (likelihoods.Categorical(m) for _ in range(2))
        return jnp.exp(first.log_predictive(every)), first.probs, second.probs

    p, first, second = run(marginals(3))
    assert_allclose(p.T, first, rtol=1e-12)
    assert_allclose(p.sum(0), 1, rtol=1e-12)  # with nodes of their own, by about 1e-3 only
    assert_allclose(first, second, rtol=1e-12)


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_noise_that_shares_latent_functions_with_the_mean(rng, link):
    m = marginals(3) @ rng.normal(size=(3, 2))
    integrator = GaussHermite(24)
    d = likelihoods.HeteroskedasticGaussian(m, link, integrator=GaussHermite(100))
    general = likelihoods.HeteroskedasticGaussian(
        m, link, integrator=integrator
    )  # in three dimensions, by the base class

    @quick
    def base(y):
        f, weights = ExpectedLikelihood._values(general)
        draw = general.conditional(f)
        return (
            ExpectedLikelihood.expected_log_density(general, y),
            ExpectedLikelihood.log_predictive(general, y),
            jnp.tensordot(weights, draw.mean, 1),
            jnp.tensordot(weights, draw.variance + draw.mean**2, 1),
        )

    expectation, predictive, mean, second = base(jnp.asarray(REAL))
    got = quick(lambda y: (d.log_prob(y), d.log_predictive(y), d.mean, d.variance))(REAL)
    assert_allclose(got[0], expectation, rtol=1e-6)
    assert_allclose(got[1], predictive, rtol=1e-3)
    assert_allclose(got[2], mean, rtol=1e-10)
    assert_allclose(got[3], second - mean**2, rtol=1e-6)


# ---------------------------------------------------------------- gradients


@every_case
def test_gradients_equal_finite_differences(case):
    at = tightened(case)[0], parameters(case)
    flat, unravel = ravel_pytree(at)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, np.shape(case.y))
    gradient, _ = ravel_pytree(evaluated(case.name)[1])
    for direction in np.random.default_rng(1).normal(size=(4, len(flat))):
        up, down = (evaluator(case.name)(*unravel(flat + step * direction))[0][0] for step in (1e-5, -1e-5))
        assert_allclose(gradient @ direction, (weights * (up - down)).sum() / 2e-5, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- float32, and the ends of the range


@every_case
def test_float32_stays_float32_and_close_to_float64(case):
    m, params = tightened(case, jnp.float32)[0], parameters(case, jnp.float32)
    moments = () if case.name in WITHOUT_MOMENTS else ("mean", "variance")

    def shapes(m):
        d = case(m, **params)
        y = np.asarray(case.y, np.float32) if np.asarray(case.y).dtype.kind == "f" else case.y
        return (
            d.log_prob(y),
            d.log_predictive(y),
            [getattr(d, name) for name in moments],
            d.sample(jax.random.PRNGKey(0)),
        )

    leaves = jax.tree.leaves(jax.eval_shape(shapes, m))
    assert {a.dtype.name for a in leaves} - {"int64", "int32"} == {"float32"}
    values, gradient, _ = evaluator(case.name, single=True)(m, params)
    assert {a.dtype.name for a in jax.tree.leaves((values, gradient))} == {"float32"}
    exact, exact_gradient, _ = evaluated(case.name)
    for got, expected in zip(values, exact, strict=True):
        assert_allclose(got, expected, rtol=1e-4)
    size = np.abs(ravel_pytree(exact_gradient)[0]).max()
    assert_allclose(ravel_pytree(gradient)[0], ravel_pytree(exact_gradient)[0], rtol=1e-3, atol=1e-4 * size)


@every_case
def test_zero_variance_is_the_density_itself(case):
    m, _, cost = tightened(case, jnp.float32)
    m = replace(m, explained=jnp.zeros_like(m.explained), residual=jnp.zeros_like(m.residual))
    (log_prob, predictive), gradient, _ = evaluator(case.name, single=True)(m, parameters(case, jnp.float32))
    expected = case.log_density(np.asarray(m.mean, float)[None], case.y, **case.params)[0]
    assert_allclose(log_prob + cost, expected, rtol=1e-4, atol=1e-6)
    assert_allclose(predictive, expected, rtol=1e-4, atol=1e-6)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


HUGE = [(case.name, sign) for case in CASES for sign in case.huge]


@pytest.mark.parametrize(("name", "sign"), HUGE)
def test_huge_means_are_finite_in_float32(name, sign):
    case = BY_NAME[name]
    m = tightened(case)[0]
    m = replace(m, mean=m.mean + sign * 1e3)
    values, gradient, _ = evaluator(name, single=True)(
        jax.tree.map(lambda a: a.astype(jnp.float32), m), parameters(case, jnp.float32)
    )
    exact, exact_gradient, _ = evaluator(name)(m, parameters(case))
    for value, reference, rtol in zip(values, exact, (1e-3, 0.03), strict=True):
        assert np.isfinite(value).all()
        # the outermost nodes, which an integral of so small a density rests on, have weights that are zero in float32
        assert_allclose(value, reference, rtol=1e-3 if case.predictive_rtol < 1e-6 else rtol, atol=1e-6)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert_allclose(gradient[0].mean, exact_gradient[0].mean, rtol=1e-3, atol=1e-4)


LARGE = (
    "gaussian", "student t", "laplace", "beta", "logit", "probit", "binomial", "poisson softplus", "negative binomial",
    "log-normal", "ordinal", "ordinal logit", "categorical", "robustmax", "warped gaussian",
)  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_variances_are_finite_in_float32(name):
    case = BY_NAME[name]
    m = tightened(case, jnp.float32)[0]
    m = replace(m, explained=1e4 * m.explained, residual=1e4 * m.residual)
    values, gradient, _ = evaluator(name, single=True)(m, parameters(case, jnp.float32))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((values, gradient)))


def test_zero_variance_on_the_point_itself_is_finite():
    zero = jnp.zeros(B, jnp.float32)
    tied = jnp.ones((B, 3), jnp.float32)  # which of equal functions is the largest?

    def losses(m, m3):
        laplace = likelihoods.Laplace(m, 0.5)
        robust = likelihoods.Categorical(m3, "robustmax")
        return laplace.log_prob(zero).sum() + laplace.log_predictive(zero).sum() + robust.log_prob(CLASSES).sum()

    exact = ogp.Marginals(zero, zero, zero), ogp.Marginals(tied, 0 * tied, 0 * tied)
    value, gradient = quick(jax.value_and_grad(losses, (0, 1)))(*exact)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("ratio", [1e-3, 1.0, 30.0, 1e3])
def test_predictive_density_of_laplace_noise_beside_a_wide_function(ratio):
    m, scale = np.array([-100.0, -2.0, 0.1, 40.0]), 0.7
    s = np.full(B, ratio * scale)
    single = ogp.Marginals(*(jnp.asarray(a, jnp.float32) for a in (m, s**2, 0 * s)))
    got = quick(lambda m: likelihoods.Laplace(m, np.float32(scale)).log_predictive(np.zeros(B, np.float32)))(single)
    assert got.dtype == jnp.float32
    t = np.linspace(-300, 300, 1_000_001) * scale  # the noise, exactly Laplace, times the normal density of the rest
    terms = stats.laplace.logpdf(t[:, None], 0, scale) + stats.norm.logpdf(t[:, None], m, s)
    if ratio >= 1:
        assert_allclose(got, np.logaddexp.reduce(terms, 0) + np.log(t[1] - t[0]), rtol=1e-4)
    else:
        assert_allclose(got, stats.laplace.logpdf(m, 0, scale), rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["logit", "cloglog", "binomial", "poisson", "zero-inflated poisson", "ordinal", "categorical", "robustmax"]
)
def test_outputs_may_have_any_dtype(name):
    case = BY_NAME[name]
    d = case(marginals(case.num_latents))
    dtypes = (float, np.uint8, np.float32, *([bool] if name in ("logit", "cloglog") else []))
    outputs = [case.y.astype(dtype) for dtype in dtypes]
    expected, *rest = quick(lambda d: [(d.log_prob(y), d.log_predictive(y)) for y in outputs])(d)
    for got in rest:
        assert_allclose(got, expected, rtol=1e-6)


def test_the_largest_unsigned_count_does_not_wrap():
    d, y = likelihoods.Poisson(marginals()), np.full(B, 255)
    assert_allclose(d.log_prob(y.astype(np.uint8)), d.log_prob(y), rtol=1e-12)


# ---------------------------------------------------------------- what equals what


EQUAL = {
    "weibull 1": (lambda m: L.Weibull(m, 1.0, CENSORED), lambda m: L.Exponential(m, CENSORED), TIMES),
    "gamma 1": (lambda m: L.Gamma(m, 1.0, CENSORED, integrator=FINE), lambda m: L.Exponential(m, CENSORED), TIMES),
    "log-normal": (lambda m: L.LogNormal(m, 0.4), lambda m: L.Transformed(L.Gaussian(m, 0.4), ExpTransform()), TIMES),
    "binomial 1 probit": (lambda m: L.Binomial(m, 1, "probit"), lambda m: L.Bernoulli(m, "probit"), LABELS),
    "binomial 1 cloglog": (lambda m: L.Binomial(m, 1, "cloglog"), lambda m: L.Bernoulli(m, "cloglog"), LABELS),
    "ordinal probit": (lambda m: L.Ordinal(m, [0.0]), lambda m: L.Bernoulli(m, "probit"), LABELS),
    "ordinal logit": (lambda m: L.Ordinal(m, [0.0], "logit"), lambda m: L.Bernoulli(m), LABELS),
    "gate 0": (lambda m: L.ZeroInflated(L.Poisson(m, integrator=FINE), 0.0), lambda m: L.Poisson(m), COUNTS),
    "concentration 1e9": (lambda m: L.NegativeBinomial(m, 1e9), lambda m: L.Poisson(m), COUNTS),
}


@pytest.mark.parametrize("name", EQUAL)
def test_special_cases_agree(name):
    """Likelihoods that are each other's special cases, by code that differs."""
    one, other, y = EQUAL[name]
    m = marginals()

    def run(m):
        return [(d.log_prob(y), d.mean, d.variance) for d in (one(m), other(m))]

    for got, expected in zip(*quick(run)(m), strict=True):
        assert_allclose(got, expected, rtol=1e-5 if "concentration" in name or "log-normal" in name else 1e-8)


def test_two_classes_of_robustmax_are_a_probit():
    m = marginals(2)
    d = likelihoods.Categorical(m, "robustmax", 0.01, integrator=GaussHermite(100))
    p = stats.norm.cdf((m.mean[:, 1] - m.mean[:, 0]) / np.sqrt(m.variance.sum(-1)))
    assert_allclose(quick(lambda d: d.probs)(d)[:, 1], 0.99 * p + 0.01 * (1 - p), rtol=1e-5)


# ---------------------------------------------------------------- tightening


@pytest.mark.parametrize("name", ["student t", "cloglog", "gamma", "zero-inflated poisson", "categorical", "robustmax"])
def test_tight_at_one_is_the_prior_residual(name):
    case = BY_NAME[name]
    ones = jnp.ones(() if case.num_latents is None else case.num_latents)
    tight, plain = marginals(case.num_latents, residual_scale=ones), marginals(case.num_latents)
    assert_allclose(*quick(lambda *ms: [case(m).log_prob(case.y) for m in ms])(tight, plain), rtol=1e-12)


def test_likelihoods_of_a_transformed_gaussian_use_its_best_tightening():
    m = marginals(residual_scale=jnp.asarray(0.37))  # the guide's v is not used
    gaussian = likelihoods.Gaussian(m, 0.4).log_prob(np.log(TIMES))
    for d in (
        likelihoods.LogNormal(m, 0.4),
        likelihoods.Transformed(likelihoods.Gaussian(m, 0.4), [ExpTransform()]),
    ):
        assert_allclose(d.log_prob(TIMES), gaussian - np.log(TIMES), rtol=1e-12)
    learned = likelihoods.LogNormal(m, 0.4, np.zeros(B, bool)).log_prob(TIMES)
    assert (learned < gaussian - np.log(TIMES)).all()


@pytest.mark.parametrize("name", ["gaussian", "gaussian per point", "gaussian (B, P)"])
def test_tight_gaussian_is_the_maximum_over_v_of_each_point(name):
    case = BY_NAME[name]
    m = marginals(case.num_latents, residual_scale=jnp.asarray(0.37))  # the guide's v is not used
    mean, e, r, y, s2 = np.broadcast_arrays(
        *map(np.asarray, (m.mean, m.explained, m.residual, case.y)), case.params["scale"] ** 2
    )

    def bound(v, i):
        fit = stats.norm.logpdf(y[i], mean[i], np.sqrt(s2[i])) - (e[i] + v * r[i]) / (2 * s2[i])
        return fit - (v - np.log(v) - 1) / 2

    best = np.zeros(mean.shape)
    for i in np.ndindex(mean.shape):
        best[i] = -minimize_scalar(
            lambda v, i=i: -bound(v, i), bounds=(1e-6, 1), method="bounded", options={"xatol": 1e-10}
        ).fun
    assert_allclose(case(m).log_prob(case.y), best, rtol=1e-9)


@given(
    values=st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3), st.floats(0, 1e3)), min_size=B, max_size=B),
    scale=st.floats(1e-3, 1e3),
)
@settings(max_examples=50, deadline=None)
def test_tight_gaussian_is_never_below(values, scale):
    mean, explained, residual = jnp.asarray(values).T
    plain, tight = (
        likelihoods.Gaussian(ogp.Marginals(mean, explained, residual, residual_scale=v), scale).log_prob(REAL)
        for v in (None, jnp.asarray(1.0))
    )
    assert (tight >= plain - 1e-12 * jnp.abs(plain)).all()


@pytest.mark.parametrize("per_point", [False, True], ids=["W", "W per point"])
def test_tight_gaussian_of_mixed_outputs_uses_the_learned_v(rng, per_point):
    v, W, s = np.array([0.6, 1.7]), rng.normal(size=(2, 3)), np.array([0.4, 0.6, 0.9])
    factor = rng.uniform(0.5, 2.0, (B, 3)) if per_point else np.ones((B, 3))
    latent = marginals(2, residual_scale=v)
    y = rng.normal(size=(B, 3))
    variance = (np.asarray(latent.explained) + v * np.asarray(latent.residual)) @ W**2 * factor**2
    fit = stats.norm.logpdf(y, np.asarray(latent.mean) @ W * factor, s) - variance / (2 * s**2)
    m = latent @ W
    got = likelihoods.Gaussian(m * factor if per_point else m, s).log_prob(y)
    assert_allclose(got, fit - ((v - np.log(v) - 1) / 2).sum(), rtol=1e-12)


# ---------------------------------------------------------------- what is refused


def of(cls, *args, latents=None, **kwargs):
    return lambda: cls(marginals(latents), *args, **kwargs)


VECTOR = ComposeTransform([StickBreakingTransform()])


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: L.Gaussian(jnp.zeros(4), 1.0), TypeError, r"Gaussian needs the marginals of a function, f\(X\)"),
        (
            lambda: L.Bernoulli(ogp.Marginals(*jnp.ones((3, 4), int))),
            TypeError,
            r"marginals of a floating dtype; .* int",
        ),
        (lambda: L.Weibull(jnp.zeros(4), 1.0), TypeError, r"Weibull needs the marginals of a function, f\(X\)"),
        (
            of(L.Likelihood, lambda f: dist.Normal(f, jnp.ones((B, 1)))),
            ValueError,
            r"batch shape \(4, 4\); expected \(4,\)",
        ),
        (
            of(L.Likelihood, lambda f: dist.Normal(f[..., 0], 1.0)),
            ValueError,
            r"batch shape \(\); expected \(4,\)\. Do .*several functions, .* shape \(B, P\): gp\(..., num_latents=P\)",
        ),
        (of(L.Gaussian, 0.0), ValueError, r"`scale` must be positive; got a value of 0.0"),
        (of(L.Gaussian, [0.1, np.nan, 1, 1]), ValueError, r"`scale` must be positive; got a value of nan"),
        (of(L.StudentT, -1, 1.0), ValueError, r"`df` must be positive; got .* -1.0"),
        (of(L.Laplace, -0.5), ValueError, r"`scale` must be positive; got .* -0.5"),
        (of(L.Beta, 0), ValueError, r"`concentration` must be positive; got .* 0.0"),
        (of(L.Beta, 1.0, "tanh"), ValueError, r"Unknown `link` 'tanh'; known are 'logit', 'probit', 'cloglog'"),
        (of(L.Bernoulli, "loglog"), ValueError, r"Unknown `link` 'loglog'; known are 'logit', 'probit', 'cloglog'"),
        (of(L.Binomial, [1, 2, -3, 4]), ValueError, r"`total_count` must be whole and not negative; got .* -3"),
        (of(L.Binomial, 2.5), ValueError, r"`total_count` must be whole and not negative; got .* 2.5"),
        (of(L.Poisson, -1.0), ValueError, r"`exposure` must be positive; got .* -1.0"),
        (of(L.Poisson, link="log"), ValueError, r"Unknown `link` 'log'; known are 'exp', 'softplus'"),
        (of(L.NegativeBinomial, 0.0), ValueError, r"`concentration` must be positive; got .* 0.0"),
        (of(L.NegativeBinomial, 1.0, -2.0), ValueError, r"`exposure` must be positive; got .* -2.0"),
        (
            lambda: L.ZeroInflated(L.Poisson(marginals()), 1.0),
            ValueError,
            r"`gate` must be at least 0 and less than 1; got .* 1.0",
        ),
        (
            lambda: L.ZeroInflated(L.Gaussian(marginals(), 1.0), 0.1),
            TypeError,
            r"ZeroInflated wraps Poisson, NegativeBinomial or Binomial; got Gaussian",
        ),
        (of(L.HeteroskedasticGaussian), ValueError, r"needs f\(X\) of shape \(B, 2\).*got \(4,\)"),
        (of(L.HeteroskedasticGaussian, latents=3), ValueError, r"needs f\(X\) of shape \(B, 2\).*got \(4, 3\)"),
        (of(L.HeteroskedasticGaussian, "log", latents=2), ValueError, r"Unknown `link` 'log'; known are 'exp'"),
        (of(L.Weibull, 0.0), ValueError, r"`concentration` must be positive; got .* 0.0"),
        (of(L.Gamma, -1.0), ValueError, r"`concentration` must be positive; got .* -1.0"),
        (of(L.LogNormal, 0.0), ValueError, r"`scale` must be positive; got .* 0.0"),
        (of(L.Exponential, [1, 0, 1, 0]), TypeError, r"`censored` must be boolean.*got int64.*`event == 0`"),
        (of(L.Gamma, 1.0, np.ones(3, bool)), ValueError, r"`censored` must broadcast .* \(4,\) .* got \(3,\)"),
        (of(L.Gamma, 1.0, np.ones((2, B), bool)), ValueError, r"`censored` must broadcast .* got \(2, 4\)"),
        (of(L.Gaussian, np.ones(3)), ValueError, r"`scale` must broadcast .* \(4,\) .* got \(3,\)"),
        (of(L.Gaussian, np.ones((B, 1))), ValueError, r"`scale` must broadcast .* got \(4, 1\)"),
        (of(L.StudentT, 4.0, np.ones(B), latents=2), ValueError, r"`scale` .* One for each point has shape \(4, 1\)"),
        (of(L.Binomial, np.ones(3)), ValueError, r"`total_count` must broadcast .* got \(3,\)"),
        (of(L.Ordinal, [0.0, 2.0, 1.0]), ValueError, r"`cutpoints` must be finite and increasing; got .* 1.0"),
        (of(L.Ordinal, [0.0, 0.0]), ValueError, r"`cutpoints` must be finite and increasing; got .* 0.0"),
        (of(L.Ordinal, [-np.inf, 0.0]), ValueError, r"`cutpoints` must be finite and increasing; got .* -inf"),
        (of(L.Ordinal, 1.0), ValueError, r"`cutpoints` must have shape \(K,\).*got \(\)"),
        (of(L.Ordinal, []), ValueError, r"`cutpoints` must have shape \(K,\).*got \(0,\)"),
        (of(L.Ordinal, [0.0], "cloglog"), ValueError, r"Unknown `link` 'cloglog'; known are 'probit', 'logit'"),
        (of(L.Categorical), ValueError, r"Categorical needs f\(X\) of shape \(B, P\)"),
        (of(L.Categorical, "max", latents=3), ValueError, r"Unknown `link` 'max'; known are 'softmax', 'robustmax'"),
        (of(L.Categorical, "robustmax", 1.0, latents=3), ValueError, r"`epsilon` must be between 0 and 1; got .* 1.0"),
        (of(L.Categorical, "robustmax", latents=1), ValueError, r"Categorical of one latent function has one class"),
        (
            lambda: L.Categorical(marginals(3) @ np.eye(3), "robustmax"),
            ValueError,
            r"needs independent latent functions.*Use link=\"softmax\"",
        ),
        (lambda: L.Transformed(dist.Normal(0, 1), ExpTransform()), TypeError, r"wraps a likelihood .* got Normal"),
        (lambda: L.Transformed(L.Gaussian(marginals(), 1.0), []), TypeError, r"`transforms` must be one or more"),
        (
            lambda: L.Transformed(L.Gaussian(marginals(), 1.0), [jnp.exp]),
            TypeError,
            r"`transforms` must be one or more",
        ),
        (
            lambda: L.Transformed(L.Gaussian(marginals(3), 1.0), VECTOR),
            ValueError,
            r"event dimension 0; got 0 for the likelihood, and transforms from 1 to 1",
        ),
        (
            lambda: L.Transformed(L.Poisson(marginals()), ExpTransform()),
            ValueError,
            r"changes the density of real outputs; those of Poisson are discrete",
        ),
        (of(ogp.Likelihood, jnp.exp), TypeError, r"`fn` must return a numpyro distribution"),
    ],
)
def test_bad_arguments_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("name", WITHOUT_MOMENTS)
def test_moments_that_do_not_exist_point_elsewhere(name):
    d = BY_NAME[name](marginals(BY_NAME[name].num_latents))
    for moment in ("mean", "variance"):
        with pytest.raises(NotImplementedError, match=r"average draws" if "student" in name else r"use `.probs`"):
            getattr(d, moment)


def test_concrete_exposure_is_checked_and_usable_inside_jit():
    exposure = jnp.arange(1.0, 5.0)
    m = marginals()
    got = jax.jit(lambda m: likelihoods.Poisson(m, exposure).log_prob(COUNTS))(m)
    assert_allclose(got, likelihoods.Poisson(m, exposure).log_prob(COUNTS), rtol=1e-12)


def test_traced_parameters_are_not_checked():
    m = marginals()

    @jax.jit
    def run(x):
        d = likelihoods.ZeroInflated(likelihoods.NegativeBinomial(m, x, x), x - 1)
        return d.log_prob(COUNTS), likelihoods.Ordinal(m, x * CUTS).log_prob(GRADES)

    assert all(np.isnan(values).all() or not np.isfinite(values).all() for values in run(-1.0))


def test_concrete_outputs_meet_a_support_made_inside_jit():
    total = jnp.array([5, 6, 7, 8])
    m, y = marginals(), jnp.asarray(COUNTS)

    def log_prob(m):
        return ogp.Likelihood(m, lambda f: dist.Binomial(total, logits=f)).log_prob(y)

    assert_allclose(jax.jit(log_prob)(m), log_prob(m), rtol=1e-12)


def test_counts_above_their_total_are_refused():
    with pytest.raises(ValueError, match=r"support of Binomial .* got 7 at \(3,\)"):
        likelihoods.Binomial(marginals(), TOTALS).log_prob(np.array([0, 3, 1, 7]))


def test_moments_of_a_warped_gaussian():
    d = warped(marginals(), 0.4, 0.3)
    mean, variance = np.asarray(d.likelihood.mean), np.asarray(d.likelihood.variance)
    log_y = stats.lognorm(s=np.sqrt(variance) / 2, scale=np.exp(0.3 + mean / 2))
    assert_allclose(d.mean, log_y.mean(), rtol=1e-10)
    assert_allclose(d.variance, log_y.var(), rtol=1e-8)


# ---------------------------------------------------------------- draws, and what wraps a likelihood


@pytest.mark.parametrize("name", ["beta", "gamma"])
def test_draws_are_outputs_that_may_be_observed(name):
    """In float32 they round to the edge of the support, where there is no density."""
    m = ogp.Marginals(
        *(jnp.asarray([a, b, c], jnp.float32) for a, b, c in [(-9.0, 0.3, 4.0), (1.0, 0.1, 2.0), (0.5, 0.0, 1.0)])
    )
    d = L.Beta(m, 0.1) if name == "beta" else L.Gamma(m, 0.01)
    y = d.sample(jax.random.PRNGKey(0), (2000,))
    assert y.dtype == jnp.float32 and d.support(y).all()
    assert np.isfinite(d.log_prob(y)).all()


def test_predictive_density_of_what_is_expanded_and_masked():
    m = marginals()
    d, keep = L.Weibull(m, 2.0), np.array([True, False, True, True])
    y, expected = jnp.asarray(TIMES), L.Weibull(m, 2.0).log_predictive(TIMES)
    several = jnp.broadcast_to(y, (3, 2, B))
    assert_allclose(log_predictive(d.expand((2, B)), several), np.broadcast_to(expected, (3, 2, B)), rtol=1e-12)
    missing = jnp.where(keep, y, -1.0)  # no time at all
    for fn in (d.mask(keep), d.expand((2, B)).mask(keep)):
        assert_allclose(
            log_predictive(fn, missing), np.broadcast_to(np.where(keep, expected, 0), fn.batch_shape), rtol=1e-12
        )
    assert_allclose(log_predictive(d.mask(False), y), np.zeros(B))
    assert_allclose(log_predictive(d.mask(True), y), expected)
    slope = jax.jit(jax.grad(lambda shift: log_predictive(L.Weibull(m + shift, 2.0).mask(keep), missing).sum()))(0.0)
    assert np.isfinite(slope)


def test_what_any_mask_hides_is_not_checked():
    d = L.Gaussian(marginals(2), 0.5)
    inner, outer = np.array([[True, False]] * B), np.array([True, False, True, True])
    y = np.where(inner & outer[:, None], REAL[:, None], np.nan)
    for fn in (d.mask(inner).mask(outer[:, None]), d.mask(inner).to_event(1).mask(outer)):
        check_observed("y", fn, y)
        with pytest.raises(ValueError, match=r"`y` must lie in the support .* got nan at \(0, 0\), 1 in all"):
            check_observed("y", fn, np.where(np.arange(2 * B).reshape(B, 2) == 0, np.nan, y))


def test_stacked_likelihoods_are_not_drawn_along_the_wrong_axis():
    stacked = jax.vmap(lambda scale: L.Gaussian(marginals(), scale))(jnp.arange(1.0, B + 1))
    for use in (lambda: stacked.sample(jax.random.PRNGKey(0)), lambda: stacked.log_prob(REAL)):
        with pytest.raises(ValueError, match=r"its arrays were stacked, as by jax.vmap"):
            use()


@pytest.mark.parametrize("law", ["covariance_matrix", "scale_tril", "precision_matrix"])
def test_vectors_whose_correlation_is_a_function(law):
    """NumPyro's MultivariateNormal divided by zero where it has more axes of nodes than y."""
    m, v, y = np.array([0.3, -0.5, 1.0]), np.array([0.2, 0.4, 0.1]), np.array([[0.5, 0.2], [-1.0, 0.7], [0.1, 0.1]])

    def matrix(f):
        r, one = jnp.tanh(f), jnp.full(f.shape, 1.1)
        C = jnp.stack([jnp.stack([one, r], -1), jnp.stack([r, one], -1)], -2)
        return {"covariance_matrix": C, "scale_tril": jnp.linalg.cholesky(C), "precision_matrix": jnp.linalg.inv(C)}[
            law
        ]

    likelihood = ogp.Likelihood(
        ogp.Marginals(jnp.asarray(m), jnp.asarray(v), jnp.zeros(3)),
        lambda f: dist.MultivariateNormal(jnp.zeros(2), **{law: matrix(f)}),
    )
    x, w = np.polynomial.hermite_e.hermegauss(20)
    r = np.tanh(m + np.sqrt(v) * x[:, None])
    a, b, det = y[:, 0], y[:, 1], 1.1**2 - r**2
    log_density = -np.log(2 * np.pi) - np.log(det) / 2 - (1.1 * (a**2 + b**2) - 2 * r * a * b) / (2 * det)
    w = w / w.sum()
    assert_allclose(likelihood.log_prob(jnp.asarray(y)), w @ log_density, rtol=1e-5)
    assert np.isfinite(likelihood.log_predictive(jnp.asarray(y))).all()
    assert likelihood.sample(jax.random.PRNGKey(0), (4,)).shape == (4, 3, 2)


class Shifted(likelihoods.ExpectedLikelihood):
    """A user's class, which names none of its attributes for programs."""

    def __init__(self, marginals, shift):
        self.shift = shift
        super().__init__(marginals)

    def conditional(self, f):
        return dist.Normal(f + self.shift, 0.5)


def test_predictions_at_a_prompt_are_those_of_a_program():
    """Outside of models they are one program, in which a likelihood is a pytree; a user's stays what it is."""
    f = ogp.Marginals(mean=jnp.array([0.3, -1.0]), explained=jnp.array([0.4, 0.1]), residual=jnp.array([0.1, 0.2]))
    variance, y = f.explained + f.residual, np.array([0.5, 2.0])
    for own in (Shifted(f, 1.5), likelihoods.Transformed(Shifted(f, 1.5), dist.transforms.AffineTransform(0.0, 1.0))):
        assert_allclose(
            own.log_predictive(y), dist.Normal(f.mean + 1.5, jnp.sqrt(variance + 0.25)).log_prob(y), rtol=1e-9
        )
    counts = likelihoods.ZeroInflated(likelihoods.NegativeBinomial(f, 3.0), jnp.array([0.2, 0.1]))
    names = ("mean", "variance")
    within = jax.jit(lambda d: [getattr(d, name) for name in names] + [d.log_predictive(jnp.array([2, 0]))])(counts)
    at_prompt = [getattr(counts, name) for name in names] + [counts.log_predictive([2, 0])]
    for a, b in zip(at_prompt, within, strict=True):
        assert_allclose(a, b, rtol=1e-12)
    with pytest.raises(TypeError, match="mask"):
        counts.log_predictive(np.ma.masked_equal([2, 0], 0))
    with pytest.raises(ValueError, match="support of ZeroInflated"):
        counts.log_predictive([2, -1])
    assert_allclose(counts.log_predictive(value=[2, 0]), at_prompt[-1], rtol=1e-12)
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        counts.log_predictive(obs=[2, 0])
