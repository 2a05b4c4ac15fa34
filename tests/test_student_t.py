"""Student-t noise that is narrow beside the posterior of f, beside a dense trapezoidal rule in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import t as student

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.likelihoods.special import expected_log1p_square

SCALE = 0.7


def dense(df, d, v):
    """E[log p], and its derivatives in the mean and the standard deviation, for y - m = d."""
    x = np.linspace(-9, 9, 200_001)
    w = np.exp(-(x**2) / 2)
    w /= w.sum()
    z = d - np.sqrt(v) * x
    slope = (df + 1) * z / (df * SCALE**2 + z**2)
    return w @ student.logpdf(z, df, scale=SCALE), w @ slope, w @ (slope * x)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
@pytest.mark.parametrize("df", [1.0, 4.0, 1e6])
def test_expectations_and_gradients_however_narrow_the_noise(df, dtype):
    """Twenty Gauss-Hermite nodes were off by 5 %, and their derivatives by factors, where v is a hundred times scale^2 or more."""
    ratios, distances = np.meshgrid([1e-4, 0.01, 1.0, 100.0, 1e4], [0.0, 2.0, 70.0])
    v, d = ratios.ravel() * SCALE**2, distances.ravel()

    def log_prob(m, v):
        marginals = ogp.Marginals(m, v, jnp.zeros_like(v))
        fn = likelihoods.StudentT(marginals, jnp.asarray(df, dtype), jnp.asarray(SCALE, dtype))
        value = fn.log_prob(jnp.asarray(d, dtype))
        return value.sum(), value

    gradient = jax.jit(jax.grad(log_prob, (0, 1), has_aux=True))
    (by_mean, by_variance), found = gradient(jnp.zeros(len(v), dtype), jnp.asarray(v, dtype))
    value, of_mean, of_scale = np.array([dense(df, *pair) for pair in zip(d, v, strict=True)]).T
    tolerance = 1e-8 if dtype == jnp.float64 else 3e-6
    assert_allclose(found, value, rtol=tolerance, atol=tolerance)
    size = np.maximum(np.abs(of_mean), np.abs(of_scale))
    assert_allclose(by_mean / size, of_mean / size, atol=1e3 * tolerance)
    assert_allclose(by_variance * 2 * np.sqrt(v) / size, of_scale / size, atol=1e3 * tolerance)


def test_what_is_known_is_a_number():
    """Without a spread, and its derivatives are finite."""
    x = jnp.array([0.0, 0.3, -1e4])
    assert_allclose(expected_log1p_square(x, jnp.zeros(3)), np.log1p(np.asarray(x) ** 2), rtol=1e-9)

    def total(v):
        marginals = ogp.Marginals(jnp.zeros(3), v, jnp.zeros(3))
        return likelihoods.StudentT(marginals, 3.0, 1.0).log_prob(x).sum()

    assert np.isfinite(jax.grad(total)(jnp.zeros(3))).all()


def test_nodes_that_are_asked_for():
    m = ogp.Marginals(jnp.zeros(1), jnp.ones(1), jnp.zeros(1))
    few = likelihoods.StudentT(m, 3.0, 0.01, integrator=ogp.GaussHermite(5)).log_prob(jnp.zeros(1))
    assert abs(few - likelihoods.StudentT(m, 3.0, 0.01).log_prob(jnp.zeros(1))) > 0.1
