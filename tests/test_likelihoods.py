"""Likelihoods: every expectation against integrals that share no code with the package, in both precisions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose
from scipy import stats
from scipy.optimize import minimize_scalar
from scipy.special import expit, gammaln, log_ndtr, log_softmax, logsumexp

import numpyro_orthgp as ogp
from numpyro_orthgp import GaussHermite, MonteCarlo, QuasiMonteCarlo, likelihoods
from numpyro_orthgp.likelihoods import ExpectedLikelihood

B = 4


@dataclass(frozen=True)
class Case:
    """A likelihood, its parameters, some outputs, and log p(y | f) in numpy for f of shape (S, B) or (S, B, P)."""

    name: str
    build: Callable[..., ExpectedLikelihood]
    y: Any
    log_density: Callable[..., np.ndarray]
    params: dict[str, Any] = field(default_factory=dict)
    num_latents: int | None = None
    mixes: bool = False
    nodes: int = 100
    rtol: float = 1e-9

    def __call__(self, m: ogp.Marginals, integrator: Any = None, **params: Any) -> ExpectedLikelihood:
        options = {} if integrator is None or self.name.startswith("gaussian") else {"integrator": integrator}
        return self.build(m, **{**self.params, **params}, **options)


def log_negative_binomial(f, y, c):
    return gammaln(y + c) - gammaln(c) - gammaln(y + 1) + c * np.log(c) + y * f - (c + y) * np.logaddexp(np.log(c), f)


SCALES = np.array([0.3, 0.5, 0.8, 1.1])
REAL = np.array([0.4, -1.2, 2.0, 0.1])
REAL2 = np.stack([REAL, REAL[::-1] - 0.3], -1)
COUNTS = np.array([0, 3, 1, 6])
LABELS = np.array([0, 1, 1, 0])

CASES = [
    Case("gaussian", likelihoods.Gaussian, REAL, lambda f, y, scale: stats.norm.logpdf(y, f, scale), {"scale": 0.4}),
    Case(
        "gaussian per point",
        likelihoods.Gaussian,
        REAL,
        lambda f, y, scale: stats.norm.logpdf(y, f, scale),
        {"scale": SCALES},
    ),
    Case(
        "gaussian (B, P)",
        likelihoods.Gaussian,
        REAL2,
        lambda f, y, scale: stats.norm.logpdf(y, f, scale),
        {"scale": np.array([0.3, 0.7])},
        num_latents=2,
    ),
    Case("logit", likelihoods.Bernoulli, LABELS, lambda f, y: np.log(expit((2 * y - 1) * f))),
    Case(
        "probit", lambda m, **k: likelihoods.Bernoulli(m, "probit", **k), LABELS, lambda f, y: log_ndtr((2 * y - 1) * f)
    ),
    Case(
        "poisson",
        likelihoods.Poisson,
        COUNTS,
        lambda f, y, exposure: stats.poisson.logpmf(y, exposure * np.exp(f)),
        {"exposure": np.array([0.5, 1.0, 2.0, 3.0])},
    ),
    Case(
        "student t",
        likelihoods.StudentT,
        REAL,
        lambda f, y, df, scale: stats.t.logpdf(y, df, f, scale),
        {"df": 6.0, "scale": 0.9},
        rtol=1e-5,
    ),
    Case(
        "categorical",
        likelihoods.Categorical,
        np.array([0, 2, 1, 2]),
        lambda f, y: np.take_along_axis(log_softmax(f, -1), np.broadcast_to(y[:, None], (*f.shape[:-1], 1)), -1)[
            ..., 0
        ],
        num_latents=3,
        mixes=True,
        nodes=40,
    ),
    Case(
        "negative binomial",
        lambda m, c, **k: ogp.Likelihood(m, lambda f: dist.NegativeBinomial2(jnp.exp(f), c), **k),
        COUNTS,
        log_negative_binomial,
        {"c": 2.5},
        rtol=1e-7,
    ),
    Case(
        "heteroskedastic",
        lambda m, floor, **k: ogp.Likelihood(m, lambda f: dist.Normal(f[..., 0], jnp.exp(f[..., 1]) + floor), **k),
        REAL,
        lambda f, y, floor: stats.norm.logpdf(y, f[..., 0], np.exp(f[..., 1]) + floor),
        {"floor": 0.3},
        num_latents=2,
        mixes=True,
        rtol=1e-7,
    ),
    Case(
        "elementwise exponential",
        lambda m, rate, **k: ogp.Likelihood(m, lambda f: dist.Exponential(rate * jnp.exp(f)), **k),
        np.exp(REAL2),
        lambda f, y, rate: np.log(rate) + f - rate * np.exp(f) * y,
        {"rate": np.array([0.7, 1.6])},
        num_latents=2,
    ),
]
BY_NAME = {case.name: case for case in CASES}
NON_GAUSSIAN = [case for case in CASES if not case.name.startswith("gaussian")]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
non_gaussian = pytest.mark.parametrize("case", NON_GAUSSIAN, ids=lambda c: c.name)


def marginals(num_latents: int | None = None, dtype: Any = float, **fields: Any) -> ogp.Marginals:
    rng = np.random.default_rng(1)
    shape = (B,) if num_latents is None else (B, num_latents)
    if num_latents == 2:  # two functions, put side by side
        parts = [(rng.normal(size=B), rng.uniform(0.05, 0.3, B), rng.uniform(0.05, 0.3, B)) for _ in range(2)]
        v = fields.pop("residual_scale", None)
        v = [None, None] if v is None else np.broadcast_to(v, (2,))
        return ogp.stack(
            [
                ogp.Marginals(
                    *(jnp.asarray(a, dtype) for a in part), residual_scale=None if s is None else jnp.asarray(s, dtype)
                )
                for part, s in zip(parts, v, strict=True)
            ]
        )
    mean, explained, residual = rng.normal(size=shape), rng.uniform(0.1, 0.6, shape), rng.uniform(0.1, 0.6, shape)
    return ogp.Marginals(*(jnp.asarray(a, dtype) for a in (mean, explained, residual)), **fields)


def integrate(case: Case, mean, variance, fn) -> np.ndarray:
    """E[fn(f)], f independent normal, by the trapezoid rule on +-8 standard deviations (a tensor grid where y mixes)."""
    dim = case.num_latents if case.mixes else 1
    t = np.linspace(-8, 8, {1: 2001, 2: 161, 3: 41}[dim])
    log_w = stats.norm.logpdf(t) + np.log(t[1] - t[0])
    grid = np.stack(np.meshgrid(*[t] * dim, indexing="ij"), -1).reshape(-1, dim)
    log_weights = sum(np.meshgrid(*[log_w] * dim, indexing="ij")).ravel()
    nodes = grid[:, None, :] if case.mixes else grid.reshape(-1, *(1,) * np.ndim(mean))
    values = fn(np.asarray(mean) + np.sqrt(variance) * nodes)
    return np.tensordot(np.exp(log_weights), values, 1), logsumexp(
        log_weights.reshape(-1, *(1,) * (values.ndim - 1)) + values, axis=0
    )


@functools.cache
def truth(name: str) -> tuple[np.ndarray, np.ndarray]:
    """E[log p(y | f)] and log E[p(y | f)] of a case."""
    case = BY_NAME[name]
    m = marginals(case.num_latents)
    return integrate(case, m.mean, np.asarray(m.variance), lambda f: case.log_density(f, case.y, **case.params))


# ---------------------------------------------------------------- expectations


@every_case
def test_expectation_equals_integral_quadrature_and_monte_carlo(case):
    m = marginals(case.num_latents)
    expected, _ = truth(case.name)
    d = case(m, GaussHermite(case.nodes))
    assert_allclose(d.log_prob(case.y), expected, rtol=case.rtol)
    by_quadrature = jax.jit(lambda: ExpectedLikelihood.expected_log_density(d, jnp.asarray(case.y)))()
    if case.name.startswith("gaussian"):  # its own integrator is the default one, exact for polynomials
        assert d.integrator == GaussHermite(20)
    assert_allclose(by_quadrature, expected, rtol=case.rtol)

    f = np.asarray(m.draw(jax.random.PRNGKey(2), (100_000,)))
    draws = case.log_density(f, case.y, **case.params)
    z = (d.log_prob(case.y) - draws.mean(0)) / (draws.std(0) / np.sqrt(len(draws)))
    assert np.abs(z).max() < 4


@every_case
def test_default_integrator_is_close(case):
    m = marginals(case.num_latents)
    expected, predictive = truth(case.name)
    tol = {"student t": 5e-3, "categorical": 2e-2, "negative binomial": 1e-4, "poisson": 1e-4}.get(case.name, 1e-5)
    assert_allclose(case(m).log_prob(case.y), expected, rtol=tol)
    assert_allclose(case(m).log_predictive(case.y), predictive, rtol=tol)


@every_case
def test_log_predictive_equals_integral(case):
    m = marginals(case.num_latents)
    got = case(m, GaussHermite(case.nodes)).log_predictive(case.y)
    assert_allclose(got, truth(case.name)[1], rtol=max(case.rtol, 1e-7))


@every_case
def test_moments_of_y_equal_those_of_its_samples(case):
    d = case(marginals(case.num_latents), GaussHermite(case.nodes))
    draws = np.asarray(jax.jit(lambda d, key: d.sample(key, (100_000,)))(d, jax.random.PRNGKey(3)))
    if case.name == "categorical":  # NumPyro's categorical has no moments; the classes have probabilities
        draws = (draws[..., None] == np.arange(3)).astype(float)
        mean, variance = d.probs, d.probs * (1 - d.probs)
    else:
        mean, variance = d.mean, d.variance
    centred = draws - draws.mean(0)
    stderr = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - mean) < 4 * stderr).all()
    stderr_var = np.sqrt(((centred**4).mean(0) - draws.var(0) ** 2) / len(draws))
    # for a Bernoulli with p near 1/2 the sample variance p (1 - p) has a standard error of second order
    assert (np.abs(draws.var(0) - variance) < 4 * stderr_var + 16 * stderr**2).all()


@pytest.mark.parametrize("integrator", [QuasiMonteCarlo(1024), MonteCarlo(4096)], ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("name", ["logit", "categorical", "elementwise exponential"])
def test_random_integrators_are_unbiased(name, integrator):
    import numpyro

    case, m = BY_NAME[name], marginals(BY_NAME[name].num_latents)

    def estimate(key):
        with numpyro.handlers.seed(rng_seed=key):
            return case(m, integrator).log_prob(case.y)

    draws = np.asarray(jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.PRNGKey(4), 40)))
    stderr = draws.std(0, ddof=1) / np.sqrt(len(draws))
    assert (stderr > 0).all() and (np.abs(draws.mean(0) - truth(case.name)[0]) < 4 * stderr).all()
    assert (stderr < 1e-2 * np.abs(draws.mean(0))).all()


def test_random_integrators_without_a_key_are_deterministic():
    m = marginals(3)
    first, second = (likelihoods.Categorical(m).log_prob(np.array([0, 2, 1, 2])) for _ in range(2))
    assert_allclose(first, second, rtol=0)


# ---------------------------------------------------------------- gradients


@every_case
def test_gradients_equal_finite_differences(case):
    v = None if case.name == "gaussian" else jnp.asarray(0.7)
    m = marginals(case.num_latents, residual_scale=v)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, np.shape(case.y))
    fields = [name for name in ("mean", "explained", "residual", "residual_scale") if getattr(m, name) is not None]
    start, unravel = ravel_pytree(({name: getattr(m, name) for name in fields}, case.params))

    def objective(flat):
        changed, params = unravel(flat)
        return jnp.sum(weights * case(replace(m, **changed), GaussHermite(12), **params).log_prob(case.y))

    value, gradient = jax.jit(jax.vmap(objective)), jax.jit(jax.grad(objective))(start)
    steps = 1e-5 * np.eye(len(start))
    differences = (value(start + steps) - value(start - steps)) / 2e-5
    assert_allclose(gradient, differences, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- float32, and the ends of the range


def single(case: Case) -> Case:
    """The same in float32, scalar parameters as Python floats."""
    params = {k: float(p) if np.ndim(p) == 0 else np.asarray(p, np.float32) for k, p in case.params.items()}
    y = np.asarray(case.y)
    return replace(case, params=params, y=y.astype(np.float32) if y.dtype.kind == "f" else y)


@every_case
def test_float32_stays_float32_and_close_to_float64(case):
    moments = ("probs",) if case.name == "categorical" else ("mean", "variance")
    low = single(case)

    @jax.jit
    def run(m):
        d = low(m)
        densities = d.log_prob(low.y), d.log_predictive(low.y)
        gradient = jax.grad(lambda m: low(m).log_prob(low.y).sum())(m)
        return densities, [getattr(d, name) for name in moments], d.sample(jax.random.PRNGKey(0)), gradient

    densities, *rest = run(marginals(case.num_latents, jnp.float32))
    assert {a.dtype.name for a in jax.tree.leaves((densities, rest))} - {"int64"} == {"float32"}
    if case.name != "categorical":  # its nodes are drawn, in the dtype of f
        exact = case(marginals(case.num_latents))
        for got, expected in zip(densities, (exact.log_prob(case.y), exact.log_predictive(case.y)), strict=True):
            assert_allclose(got, expected, rtol=1e-4)


def value_and_gradient(case: Case, m: ogp.Marginals):
    @jax.jit
    def run(m):
        d = case(m)
        return (d.log_prob(case.y), d.log_predictive(case.y)), jax.grad(lambda m: case(m).log_prob(case.y).sum())(m)

    return run(m)


@every_case
def test_zero_variance_is_the_density_itself(case):
    m = marginals(case.num_latents, jnp.float32)
    m = replace(m, explained=jnp.zeros_like(m.explained), residual=jnp.zeros_like(m.residual))
    values, gradient = value_and_gradient(single(case), m)
    expected = case.log_density(np.asarray(m.mean, float)[None], case.y, **case.params)[0]
    for value in values:
        assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", ["gaussian", "gaussian per point", "logit", "probit", "student t"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_huge_means_are_finite_in_float32(name, sign):
    case = BY_NAME[name]
    m = replace(marginals(), mean=jnp.full(B, sign * 1e3))
    m32 = jax.tree.map(lambda a: a.astype(jnp.float32), m)
    values, gradient = value_and_gradient(single(case), m32)
    exact, exact_gradient = value_and_gradient(case, m)
    for value, reference in zip(values, exact, strict=True):
        assert np.isfinite(value).all()
        assert_allclose(value, reference, rtol=1e-3, atol=1e-6)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    # the probit's derivative is the ratio of two tiny numbers, taken by the difference of their logarithms
    assert_allclose(gradient.mean, exact_gradient.mean, rtol=0.1 if name == "probit" else 1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["gaussian", "logit", "probit", "student t", "categorical"])
def test_large_variances_are_finite_in_float32(name):
    case = BY_NAME[name]
    m = marginals(case.num_latents)
    m = replace(m, explained=1e4 * m.explained, residual=1e4 * m.residual)
    values, gradient = value_and_gradient(single(case), jax.tree.map(lambda a: a.astype(jnp.float32), m))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((values, gradient)))


@pytest.mark.parametrize("name", ["logit", "probit", "poisson", "categorical", "negative binomial"])
def test_outputs_may_have_any_dtype(name):
    case = BY_NAME[name]
    d = case(marginals(case.num_latents))
    for dtype in (np.uint8, np.int8, np.int64, np.float32, *([bool] if name in ("logit", "probit") else [])):
        for method in (d.log_prob, d.log_predictive):
            assert_allclose(method(case.y.astype(dtype)), method(case.y.astype(float)), rtol=1e-6)


def test_the_largest_unsigned_count_does_not_wrap():
    d, y = likelihoods.Poisson(marginals()), np.full(B, 255)
    assert_allclose(d.log_prob(y.astype(np.uint8)), d.log_prob(y), rtol=1e-12)


# ---------------------------------------------------------------- tightening


@non_gaussian
def test_tight_expectation_scales_the_residual_and_pays_for_it(case):
    v = np.array([0.6, 1.7, 0.3])[: case.num_latents] if case.num_latents else np.array(0.6)
    m = marginals(case.num_latents, residual_scale=jnp.asarray(v))
    variance = np.asarray(m.explained) + v * np.asarray(m.residual)
    expected, _ = integrate(case, m.mean, variance, lambda f: case.log_density(f, case.y, **case.params))
    cost = np.broadcast_to((v - np.log(v) - 1) / 2, m.shape)
    cost = cost.sum(-1) if case.mixes else cost
    assert_allclose(case(m, GaussHermite(case.nodes)).log_prob(case.y), expected - cost, rtol=max(case.rtol, 1e-8))


@non_gaussian
def test_tight_at_one_is_the_prior_residual(case):
    ones = jnp.ones(() if case.num_latents is None else case.num_latents)
    tight, plain = marginals(case.num_latents, residual_scale=ones), marginals(case.num_latents)
    assert_allclose(case(tight).log_prob(case.y), case(plain).log_prob(case.y), rtol=1e-13)


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


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: likelihoods.Gaussian(jnp.zeros(4), 1.0), TypeError, r"needs the marginals of a function, f\(X\)"),
        (
            lambda: likelihoods.Gaussian(marginals(), jnp.ones((B, 1))),
            ValueError,
            r"batch shape \(4, 4\); expected \(4,\)",
        ),
        (
            lambda: likelihoods.Bernoulli(marginals(), "cloglog"),
            ValueError,
            r"Unknown `link` 'cloglog'; known are 'logit'",
        ),
        (lambda: likelihoods.Poisson(marginals(), -1.0), ValueError, r"`exposure` must be positive; got .* -1.0"),
        (lambda: likelihoods.Categorical(marginals()), ValueError, r"Categorical needs f\(X\) of shape \(B, P\)"),
        (lambda: ogp.Likelihood(marginals(), jnp.exp), TypeError, r"`fn` must return a numpyro distribution"),
    ],
)
def test_bad_arguments_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_concrete_exposure_is_checked_and_usable_inside_jit():
    exposure = jnp.arange(1.0, 5.0)
    m = marginals()
    got = jax.jit(lambda m: likelihoods.Poisson(m, exposure).log_prob(COUNTS))(m)
    assert_allclose(got, likelihoods.Poisson(m, exposure).log_prob(COUNTS), rtol=1e-12)


def test_concrete_outputs_meet_a_support_made_inside_jit():
    total = jnp.array([5, 6, 7, 8])
    m, y = marginals(), jnp.asarray(COUNTS)

    def log_prob(m):
        return ogp.Likelihood(m, lambda f: dist.Binomial(total, logits=f)).log_prob(y)

    assert_allclose(jax.jit(log_prob)(m), log_prob(m), rtol=1e-12)
