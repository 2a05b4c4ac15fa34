"""What integration by nodes does: predictions of a row whatever stands beside it, and how far expectations are off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from scipy.special import ndtri, softmax
from scipy.stats import qmc

import numpyro_orthgp as ogp
from numpyro_orthgp import MonteCarlo, QuasiMonteCarlo, likelihoods

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
