"""Rounding is said: inputs that their dtype does not resolve, and standard deviations that are not far above it."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoDelta

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, online
from numpyro_orthgp.functions.rounding import rounding_of

X = np.linspace(0, 10, 40)
NEW = np.linspace(10.2, 16, 25)


def square_exponential(a, b):
    return np.exp(-0.5 * (a[:, None] - b) ** 2)


def exact_sd(noise, X, at):
    K = square_exponential(X, X) + noise**2 * np.eye(len(X))
    k = square_exponential(X, at)
    return np.sqrt(1 - np.einsum("ij,ij->j", k, np.linalg.solve(K, k)))


def fitted(dtype, noise, sets):
    points = [jnp.asarray(s[:, None], dtype) for s in sets]
    kernel = kernels.RBF(jnp.asarray(1.0, dtype))
    make = jax.jit(lambda X, y: ogp.CollapsedGP(kernel, X, points, jnp.asarray(noise, dtype)).posterior(y))
    return make(jnp.asarray(X[:, None], dtype), jnp.asarray(np.sin(X), dtype))


@pytest.mark.parametrize(
    "dtype, noise, says", [("float32", 0.03, True), ("float32", 1.0, False), ("float64", 0.03, False)]
)
def test_condition_says_that_rounding_is_in_standard_deviations(dtype, noise, says):
    """Beside an exact Gaussian process; in float32 they are off by a quarter at a noise of 0.03."""
    f = fitted(dtype, noise, [np.linspace(0, 10, 25)])
    given = jnp.asarray(NEW[:, None], dtype), jnp.asarray(np.sin(NEW), dtype)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        g = online.condition(f, *given, noise, num_steps=1)
    at = jnp.asarray(X[:, None], dtype)
    wrong = np.abs(np.sqrt(g(at).variance) / exact_sd(noise, np.r_[X, NEW], X) - 1).max()
    assert (wrong > 0.05) == says
    assert any("function's standard deviation at its points is rounding" in str(w.message) for w in said) == says


@pytest.mark.parametrize("noise", [0.3, 0.03, 0.01])
def test_the_estimate_of_rounding_follows_the_error(noise):
    """Of two sets in float32, beside the same in float64 with the same jitter: within a factor of ten."""
    f = fitted(jnp.float32, noise, [np.linspace(0, 10, 40), NEW])
    at = jnp.asarray(X[:, None], jnp.float32)
    found = np.asarray(rounding_of(f, at, f.project(at)))
    wrong = np.abs(np.sqrt(f(at).variance) / exact_sd(noise, X, X) - 1).max()
    assert 0.1 * wrong < found.max() < 10 * wrong
    double = fitted(jnp.float64, noise, [np.linspace(0, 10, 40), NEW])
    assert rounding_of(double, jnp.asarray(X[:, None]), double.project(jnp.asarray(X[:, None]))).max() < 1e-3


@pytest.mark.parametrize("dtype, says", [(jnp.float32, True), (jnp.float64, False)])
def test_check_says_that_rounding_is_in_standard_deviations(dtype, says):
    def model(X, y):
        noise = numpyro.sample("noise", dist.LogNormal(jnp.asarray(-7.0, dtype), 1.0))
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(jnp.asarray(1.0, dtype)), X, X[::2], noise), obs=y)

    data = jnp.asarray(X[:, None], dtype), jnp.asarray(np.sin(X), dtype)
    params = {"noise_auto_loc": jnp.asarray(0.001, dtype)}
    report = ogp.check(model, AutoDelta(model), params, *data, num_samples=25)
    assert any("of the standard deviation of y is rounding" in line for line in report.advice) == says
    assert (report.functions["y"].rounding > 0.02) == says


def test_inputs_far_from_zero_are_said_without_fit():
    """Northings in metres: a CollapsedGP alone was silent, and so were predictions."""
    far = jnp.asarray(5_000_000 + X[:, None], jnp.float32)
    near = jnp.asarray(X[:, None], jnp.float32)
    kernel, message = kernels.RBF(jnp.float32(1.0)), r"`X`: 40 rows hold 21 distinct values.*Subtract an offset"
    with pytest.warns(UserWarning, match=message):
        ogp.CollapsedGP(kernel, far, near[::4], jnp.float32(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = ogp.CollapsedGP(kernel, near, near[::4], jnp.float32(0.1)).posterior(jnp.sin(near[:, 0]))
        f(near), f(far[:1]), f(1e6 * near)
    with pytest.warns(UserWarning, match=message):
        f(far)
