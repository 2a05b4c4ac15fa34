"""Rounding is said: inputs that their dtype does not resolve, and standard deviations that are not far above it."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, online
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
    """Northings in metres: a CollapsedGP alone was silent, and so was a model in ``svi.run``."""
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
        numpyro.handlers.seed(lambda X: ogp.gp("f", kernel, near[::4])(X), 0)(far)


def test_outputs_far_from_the_mean_of_the_prior_are_said():
    """The posterior mean was off by a standard deviation at an offset of 1000, without a word."""
    near, kernel = jnp.asarray(X[:, None], jnp.float32), kernels.RBF(jnp.float32(1.0))
    y = np.sin(X) + 1000

    def posterior(y, **options):
        return ogp.CollapsedGP(kernel, near, near[::4], jnp.float32(0.1), **options).posterior(
            jnp.asarray(y, jnp.float32)
        )

    with pytest.warns(
        UserWarning, match=r"`y`: the mean is 1e\+03 from that of the prior, .* in float32 rounding may move"
    ):
        posterior(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior(y - 1000 + 3)
        posterior(np.full(40, 1000.0))
        posterior(y, loc=jnp.float32(1000))
        posterior(np.where(X > X[3], 0, y), observed=jnp.asarray((X > X[3])[:, None]))
        jax.jit(posterior)(jnp.asarray(y, jnp.float32))
        ogp.CollapsedGP(kernels.RBF(1.0), jnp.asarray(X[:, None]), jnp.asarray(X[::4, None]), 0.1).posterior(
            jnp.asarray(y)
        )


def test_check_says_that_a_function_is_far_from_the_mean_of_its_prior():
    """Outputs at 10,000: only `CollapsedGP` said it. A constant beside f(X) takes the offset off f."""
    dtype = jnp.float32

    def model(X, y, constant):
        f = ogp.gp("f", kernels.RBF(jnp.asarray(1.0, dtype)), X[::3])
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + constant, jnp.asarray(0.1, dtype)), obs=y)

    guide = ogp.AutoSparseGP(model, natural=True)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(0.01), 1.0), TraceMeanField_ELBO())

    def advice(constant):
        data = jnp.asarray(X[:, None], dtype), jnp.asarray(np.sin(X) + 1e4, dtype), jnp.asarray(constant, dtype)
        params = svi.run(jax.random.PRNGKey(0), 2, *data, progress_bar=False).params
        return ogp.check(model, guide, params, *data, num_samples=25).advice

    assert any(line.startswith("f is 9.99e+03 from the mean of its prior at the data") for line in advice(0.0))
    assert not any("from the mean of its prior" in line for line in advice(1e4))


@pytest.mark.parametrize("collapsed", [True, False])
def test_a_point_is_not_said_to_be_without_problems(collapsed):
    """Nothing compares it with the posterior; and where q(u) is a point, intervals of f are too narrow."""

    def model(X, y):
        noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        if collapsed:
            numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(1.0), X, X[::3], noise), obs=y)
        else:
            f = ogp.gp("f", kernels.RBF(1.0), X[::3])
            with numpyro.plate("rows", len(X)):
                numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)

    y = jnp.asarray(np.sin(X) + 0.3 * np.random.default_rng(0).normal(size=40))
    params = {"noise_auto_loc": jnp.asarray(0.3)} | ({} if collapsed else {"f.u0_auto_loc": jnp.zeros(14)})
    report = ogp.check(model, AutoDelta(model), params, jnp.asarray(X[:, None]), y, num_samples=25)
    said = any(
        "Of f.u0 the guide gives one value, not a Gaussian, so standard deviations of f lack" in a
        for a in report.advice
    )
    assert said != collapsed
    if not report.advice:
        last = " ".join(str(report).split())
        assert last.endswith("nothing here compares the guide with the posterior (nuts=200 does)")
    assert collapsed == (not report.advice)


@pytest.mark.parametrize("num", [12, 200])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_joint_distributions_are_as_wide_as_the_posterior(dtype, num):
    """Beside an exact Gaussian process. In float32 the factor took so much jitter that standard deviations were three and ten times
    as large, beside marginals that were right."""
    noise, data = 0.01, np.linspace(0, 5, 40)
    at = np.linspace(-1, 6, num) if num == 12 else np.linspace(2, 3, num)
    c = functools.partial(jnp.asarray, dtype=dtype)

    def make(X, y, Z):
        return ogp.CollapsedGP(kernels.RBF(c(1.0)), X, Z, c(noise)).posterior(y)

    f = jax.jit(make)(c(data[:, None]), c(np.sin(2 * data)), c(data[::3, None]))
    joint = f.joint(c(at[:, None]))
    K = square_exponential(data, data) + noise**2 * np.eye(40)
    k = square_exponential(data, at)
    exact = square_exponential(at, at) - k.T @ np.linalg.solve(K, k)
    sd = np.sqrt(np.diag(exact))
    L = np.asarray(joint.scale_tril, float)
    np.testing.assert_allclose(L @ L.T / sd / sd[:, None], exact / sd / sd[:, None], atol=0.2)
    np.testing.assert_allclose(np.sqrt(joint.variance), np.sqrt(f(c(at[:, None])).variance), rtol=0.05)
    assert (np.diag(L) > 0).all() and joint.scale_tril.dtype == dtype


def test_derivatives_of_joint_distributions_in_float32():
    """By inputs and by the lengthscale, beside those of float64."""
    at, y = np.linspace(0.3, 4, 5)[:, None], np.sin(np.linspace(0.3, 4, 5))

    def log_density(lengthscale, at, dtype):
        Z = jnp.asarray(np.linspace(0, 5, 4)[:, None], dtype)
        q = ogp.CollapsedGP(kernels.RBF(lengthscale), Z, Z, jnp.asarray(0.3, dtype), jitter=1e-6)
        joint = q.posterior(jnp.asarray([0.3, -0.4, 1.0, 0.1], dtype)).joint(at)
        root = joint.scale_tril
        C = root @ root.T + 0.1 * jnp.eye(5, dtype=dtype)
        return dist.MultivariateNormal(joint.loc, C).log_prob(jnp.asarray(y, dtype))

    def gradient(dtype):
        return jax.jit(jax.grad(lambda *a: log_density(*a, dtype), (0, 1)))(
            jnp.asarray(0.8, dtype), jnp.asarray(at, dtype)
        )

    for one, two in zip(gradient(jnp.float32), gradient(jnp.float64), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)
