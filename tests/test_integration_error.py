"""What integration by nodes does: predictions of a row whatever stands beside it, and how far expectations are off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.contrib.control_flow import scan
from scipy.special import ndtri, softmax
from scipy.stats import qmc

import numpyro_orthgp as ogp
from numpyro_orthgp import GaussHermite, MonteCarlo, QuasiMonteCarlo, kernels, likelihoods
from numpyro_orthgp.diagnostics import integration
from numpyro_orthgp.math.quadrature import gauss_hermite

P = 3
MIX = jnp.asarray([[1.0, 0.4, -0.2], [0.1, 0.8, 0.5]])


def rows(order, num_latents: int | None = P, dtype=float) -> ogp.Marginals:
    """Some of five rows of f(X), in this order."""
    rng = np.random.default_rng(0)
    shape = (5,) if num_latents is None else (5, num_latents)
    mean, explained, residual = rng.normal(size=shape), rng.uniform(0.1, 1.5, shape), rng.uniform(0.1, 0.5, shape)
    return ogp.Marginals(*(jnp.asarray(a[np.asarray(order)], dtype) for a in (mean, explained, residual)))


PREDICTED = {
    "softmax": (likelihoods.Categorical, P, ("probs",)),
    "softmax, mixed": (lambda m: likelihoods.Categorical(m @ jnp.asarray(MIX, m.mean.dtype)), 2, ("probs",)),
    "softmax, many points": (lambda m: likelihoods.Categorical(m, integrator=QuasiMonteCarlo(1000)), P, ("probs",)),
    "softmax, draws": (lambda m: likelihoods.Categorical(m, integrator=MonteCarlo(600)), P, ("probs",)),
    "robustmax, draws": (lambda m: likelihoods.Categorical(m, "robustmax", integrator=MonteCarlo(64)), P, ("probs",)),
    "three functions": (
        lambda m: ogp.Likelihood(m, lambda f: dist.Poisson(jnp.exp(f[..., 0]) + f[..., 1] ** 2 + f[..., 2] ** 2)),
        P,
        ("mean", "variance"),
    ),
    "each of three": (
        lambda m: ogp.Likelihood(m, lambda f: dist.Poisson(jnp.exp(f)), integrator=QuasiMonteCarlo(64)),
        P,
        ("mean", "variance"),
    ),
    "ordinal, draws": (
        lambda m: likelihoods.Ordinal(m, jnp.array([-0.5, 1.0], m.mean.dtype), "logit", integrator=QuasiMonteCarlo(64)),
        None,
        ("probs", "mean", "variance"),
    ),
    "beta, draws": (lambda m: likelihoods.Beta(m, 3.0, integrator=MonteCarlo(64)), None, ("mean", "variance")),
    "binomial, draws": (lambda m: likelihoods.Binomial(m, 2, integrator=MonteCarlo(64)), None, ("mean", "variance")),
    "noise level, draws": (
        lambda m: likelihoods.HeteroskedasticGaussian(m, "softplus", integrator=QuasiMonteCarlo(64)),
        2,
        ("mean", "variance"),
    ),
    "inflated, draws": (
        lambda m: likelihoods.ZeroInflated(likelihoods.NegativeBinomial(m, 2.0, 1.0, "softplus", integrator=MonteCarlo(64)), 0.1),
        None,
        ("mean", "variance"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", [*((n, jnp.float64) for n in PREDICTED), ("softmax, mixed", jnp.float32)])
def test_a_prediction_does_not_depend_on_the_rows_beside_it(name, dtype):
    build, num_latents, moments = PREDICTED[name]

    @jax.jit
    def predict(m, seed):
        with numpyro.handlers.seed(rng_seed=seed):
            d = build(m)
        y = jnp.full(d.batch_shape, 0.5 if name == "beta, draws" else 1)
        return [d.log_predictive(y), *(getattr(d, moment) for moment in moments)]

    first, second = (
        predict(rows(order, num_latents, dtype), jax.random.PRNGKey(len(order))) for order in ([0, 1, 2], [2, 4])
    )
    tolerance = 1e-12 if dtype == jnp.float64 else 2e-6
    for three, two in zip(first, second, strict=True):
        assert three.dtype == dtype
        assert_allclose(two[0], three[2], rtol=tolerance, atol=tolerance)


def test_a_prediction_does_not_depend_on_the_points_beside_it_in_a_mixture_of_draws():
    @jax.jit
    def predict(m, y):
        return likelihoods.Mixture(likelihoods.Categorical(m), jnp.zeros((2, 2))).log_predictive(y)

    first, second = predict(rows([0, 0, 2, 2]), jnp.array([0, 1])), predict(rows([2, 2, 1, 1]), jnp.array([1, 0]))
    assert_allclose(first[1], second[0], rtol=1e-12)


def test_expectations_of_a_fit_are_random_and_differ_from_row_to_row():
    m = rows([0, 0])
    y = jnp.zeros(2, int)

    @jax.jit
    def log_prob(seed):
        with numpyro.handlers.seed(rng_seed=seed):
            return likelihoods.Categorical(m).log_prob(y)

    first, second = log_prob(jax.random.PRNGKey(0)), log_prob(jax.random.PRNGKey(1))
    assert np.abs(first - second).min() > 1e-7 and np.abs(first[0] - first[1]) > 1e-7


def test_few_points_of_many_classes_add_little_noise_to_a_minibatch() -> None:
    """Under 5 % of the spread between rows, of which a minibatch has its noise; and the mean is right."""
    rng = np.random.default_rng(0)
    shape = (200, 26)
    mean, labels = jnp.asarray(2 * rng.normal(size=shape)), jnp.asarray(rng.integers(0, 26, 200))

    def estimate(key, rule=None):
        with numpyro.handlers.seed(rng_seed=key):
            d = likelihoods.Categorical(ogp.Marginals(mean, jnp.ones(shape), jnp.zeros(shape)), integrator=rule)
            return d.log_prob(labels)

    found = np.asarray(jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.PRNGKey(0), 30)))
    assert found.std(0).mean() < 0.05 * found.mean(0).std()
    exact = jax.jit(lambda key: estimate(key, QuasiMonteCarlo(4096)))(jax.random.PRNGKey(1))
    assert_allclose(found.mean(), exact.mean(), atol=5 * found.std(0).mean() / (30 * 200) ** 0.5)


@pytest.mark.parametrize("num_classes", [3, 10])
def test_probabilities_of_classes_are_right_to_a_thousandth(num_classes):
    rng = np.random.default_rng(num_classes)
    B = 12
    mean = rng.normal(size=(B, num_classes)) * rng.choice([0.3, 1, 3], (B, 1))
    scale = rng.uniform(0.1, 1, (B, num_classes)) * rng.choice([0.5, 1, 2], (B, 1))
    t = ndtri(qmc.Sobol(num_classes, seed=1).random_base2(15))
    dense = np.stack([softmax(m + s * t, -1).mean(0) for m, s in zip(mean, scale, strict=True)])
    every = jnp.broadcast_to(jnp.arange(num_classes)[:, None], (num_classes, B))
    for dtype in (jnp.float64, jnp.float32):
        m, variance = jnp.asarray(mean, dtype), jnp.asarray(scale**2, dtype)
        d = likelihoods.Categorical(ogp.Marginals(m, variance, jnp.zeros_like(m)))
        probs, densities = jax.jit(lambda d: (d.probs, jnp.exp(d.log_predictive(every))))(d)
        assert_allclose(probs, dense, atol=1e-3)
        assert_allclose(densities.T, probs, rtol=1e-5, atol=1e-7)
        assert_allclose(probs.sum(-1), 1, rtol=1e-5)


# ---- what nodes miss


def line(sd, B=40):
    """Marginals of B points, and outputs about their means."""
    rng = np.random.default_rng(1)
    mean = rng.normal(size=B)
    m = ogp.Marginals(*(jnp.asarray(a) for a in (mean, np.full(B, sd**2), np.zeros(B))))
    return m, jnp.asarray(mean + sd * rng.normal(size=B))


def student(m, scale, **options):
    """By nodes: `likelihoods.StudentT` has a formula."""
    return ogp.Likelihood(m, lambda f: dist.StudentT(3.0, f, scale), **options)


def dense(fn, y, dim):
    assert integration._probe(fn, y).dim == dim
    return jax.jit(lambda fn, y: integration.dense_expectation(fn, y, dim))(fn, y)


@pytest.mark.parametrize("scale, tolerance", [(0.02, 1e-5), (0.001, 2e-4)])
def test_the_dense_rule_is_right_about_kinks(scale, tolerance):
    m, y = line(0.2)
    fn = ogp.Likelihood(m, lambda f: dist.AsymmetricLaplaceQuantile(f, scale, 0.9))
    exact = likelihoods.AsymmetricLaplace(m, scale, 0.9).log_prob(y)
    assert np.abs(fn.log_prob(y) - exact).max() > 0.1  # 20 nodes are not
    assert_allclose(dense(fn, y, 1), exact, atol=tolerance)


def test_the_dense_rule_of_two_functions():
    m, y = line(0.2)
    both = ogp.stack([m, m])
    fn = ogp.Likelihood(both, lambda f: dist.Laplace(f[..., 0], 0.05 + 0 * f[..., 1]))
    exact = likelihoods.Laplace(m, 0.05).log_prob(y)
    got = dense(fn, y, 2)
    assert_allclose(got, exact, atol=5e-3)
    assert abs((got - exact).mean()) < 2e-4
    noise = ogp.Likelihood(both, lambda f: dist.Normal(f[..., 0], jnp.exp(f[..., 1])))
    assert_allclose(dense(noise, y, 2), likelihoods.HeteroskedasticGaussian(both).log_prob(y), rtol=1e-7)


def test_the_dense_rule_of_wrapped_and_of_mixed_likelihoods():
    m, y = line(0.5)
    inflated = likelihoods.ZeroInflated(likelihoods.NegativeBinomial(m, 2.0), 0.1)
    counts = jnp.arange(40) % 3
    exact = likelihoods.ZeroInflated(likelihoods.NegativeBinomial(m, 2.0), 0.1, integrator=GaussHermite(100))
    exact.likelihood.integrator = GaussHermite(100)
    assert_allclose(dense(inflated, counts, 1), exact.log_prob(counts), rtol=1e-7)
    particles = likelihoods.Mixture(student(m, 1.0), jnp.zeros((20, 2)))
    of_each = student(m, 1.0, integrator=GaussHermite(100)).log_prob(jnp.repeat(y[:20], 2))
    assert_allclose(dense(particles, y[:20], 1), of_each.reshape(20, 2).mean(1), rtol=1e-6)
    three = ogp.stack([m, m, m])
    softmax_ = likelihoods.Categorical(three, integrator=GaussHermite(6))
    assert_allclose(dense(softmax_, counts, 3), softmax_.log_prob(counts), atol=2e-4)


def test_what_is_in_closed_form_or_random_is_not_looked_at():
    m, y = line(0.2)
    three = ogp.stack([m, m, m])
    labels = jnp.zeros(40, int)
    for fn, value in (
        (likelihoods.Gaussian(m, 0.1), y),
        (likelihoods.AsymmetricLaplace(m, 0.1, 0.3), y),
        (likelihoods.StudentT(m, 3.0, 0.1), y),
        (likelihoods.Categorical(three), labels),
        (likelihoods.Categorical(three, "robustmax"), labels),
        (likelihoods.StudentT(m, 3.0, 0.1, integrator=MonteCarlo(4)), y),
    ):
        assert integration._probe(fn, value).dim is None


def test_check_says_what_nodes_miss():
    X = jnp.linspace(0, 1, 12)[:, None]
    y = jnp.where(jnp.arange(12) < 10, 0.0, jnp.nan)
    both, seen = jnp.stack([y, y], -1), jnp.stack([y == 0, jnp.arange(12) < 5], -1)

    def model(X, y, both):
        f = ogp.gp("f", 0.04 * kernels.RBF(0.3), X[::3])
        g = ogp.gp("g", 0.04 * kernels.RBF(0.3), X[::3], num_latents=2)
        with numpyro.plate("data", len(X)):
            with numpyro.handlers.mask(mask=~jnp.isnan(y)):
                kinked = ogp.Likelihood(f(X), lambda f: dist.AsymmetricLaplaceQuantile(f, 0.02, 0.5))
                numpyro.sample("kinked", kinked, obs=y)
            numpyro.sample("closed", likelihoods.AsymmetricLaplace(f(X), 0.02), obs=jnp.zeros(12))
            pair = student(g(X), 1.0).mask(seen).to_event(1)
            numpyro.sample("smooth", pair, obs=both)

        def step(carry, shift):
            with numpyro.plate("again", len(X)):
                numpyro.sample("steps", student(f(X) + shift, 0.01), obs=jnp.zeros(12))
            return carry, None

        scan(step, 0, jnp.zeros(2))

    guide = ogp.AutoSparseGP(model)
    params = {"f.u0_loc": jnp.zeros(4), "f.u0_scale_tril": jnp.eye(4)}
    params |= {"g.u0_loc": jnp.zeros((2, 4)), "g.u0_scale_tril": jnp.stack([jnp.eye(4)] * 2)}
    report = ogp.check(model, guide, params, X, y, both, num_samples=25)
    found = report.integration
    assert set(found) == {"kinked", "smooth", "steps"}
    # At f's mean, with sd 0.2: E|f| / 0.04 = 3.989, of which the nodes know less.
    nodes, weights = gauss_hermite(20)
    missed = -(weights * np.abs(0.2 * nodes[:, 0])).sum() / 0.04 + 0.2 * np.sqrt(2 / np.pi) / 0.04
    assert_allclose(found["kinked"].error, missed, rtol=1e-2)
    assert found["kinked"].num_points == 20 and found["kinked"].error.shape == (10,)
    assert found["smooth"].error.shape == (15,) and found["smooth"].most < 1e-4
    assert found["steps"].error.shape == (24,) and found["steps"].size > 0.01
    assert f"quadrature error of kinked, 20 nodes: {missed:+.1g} nats per point" in str(report)
    advice = [line for line in report.advice if "nodes are too few" in line]
    assert (
        len(advice) == 2
        and "20 quadrature nodes are too few for kinked" in advice[0]
        and "GaussHermite(100)" in advice[0]
    )


def test_many_nodes_have_finite_weights():
    nodes, weights = gauss_hermite(500)
    assert_allclose(weights.sum(), 1, rtol=1e-12)
    assert_allclose((weights * nodes[:, 0] ** 4).sum(), 3, rtol=1e-10)
