"""Averages over uncertain inputs of kernels without a closed form: right where inputs are uncertain by a lengthscale or a period,
and said where nodes are too few."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.kernels.expectations import psi1, psi2
from numpyro_orthgp.math.quadrature import dense_about_zero


def away(x, z, ell=1.0):
    return np.sqrt((((x - z) / ell) ** 2).sum(-1))


def matern12(x, z):
    return np.exp(-away(x, z))


def matern32(x, z):
    r = 3**0.5 * away(x, z)
    return (1 + r) * np.exp(-r)


def periodic(x, z):
    return np.exp(-2 * (np.sin(np.pi * (x - z)) ** 2).sum(-1))


KERNELS = {
    "Matern12": (kernels.Matern12(1.0), matern12),
    "Matern32": (kernels.Matern32(1.0), matern32),
    "Periodic": (kernels.Periodic(1.0, 1.0), periodic),
}


def line(num=20001, reach=8.5):
    t = np.linspace(-reach, reach, num)
    w = np.exp(-(t**2) / 2)
    return t, w / w.sum()


def fitted(kernel, formula, dtype, X, y, noise):
    """A posterior whose points are its data, and moments of f by the formulas of Rasmussen and Williams."""
    K = formula(X[:, None], X) + 1e-6 * np.eye(len(X))
    inverse = np.linalg.inv(K + noise**2 * np.eye(len(X)))

    def moments(at):
        k = formula(X[:, None], at)
        return k.T @ inverse @ y, 1 - np.einsum("ns,nm,ms->s", k, inverse, k)

    data, targets = (jnp.asarray(a, dtype) for a in (X, y))
    f = jax.jit(lambda X, y: ogp.CollapsedGP(kernel, X, X, jnp.asarray(noise, dtype), jitter=1e-6).posterior(y))(
        data, targets
    )
    return f, moments


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
@pytest.mark.parametrize("name", KERNELS)
def test_moments_where_inputs_are_known_to_a_lengthscale(name, dtype):
    """Twenty Gauss-Hermite nodes were off by up to half of a standard deviation (mean) and a fifth (of it)."""
    kernel, formula = KERNELS[name]
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12, 1)) * 1.5
    f, moments = fitted(kernel, formula, dtype, X, np.sin(2 * X[:, 0]), 0.3)
    loc = X[:4] + 0.1
    scale = np.array([[0.1], [0.3], [1.0], [1.5]])
    inputs = ogp.LatentInputs(*(jnp.asarray(a, dtype) for a in (loc, loc, scale)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = f.expected(inputs)
    t, w = line()
    for b in range(len(loc)):
        mean, variance = moments(loc[b] + scale[b] * t[:, None])
        average = w @ mean
        sd = np.sqrt(w @ (variance + mean**2) - average**2)
        assert_allclose(found.mean[b], average, atol=2e-3 * sd)
        assert_allclose(found.variance[b] ** 0.5, sd, rtol=2e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_expectations_in_two_columns(name):
    kernel, formula = KERNELS[name]
    Z, loc = np.array([[0.3, -0.4], [-1.2, 0.8]]), np.array([[0.3, -0.4], [0.9, -1.3]])
    scale = np.array([[0.5, 0.3], [0.4, 0.1]])
    t, w = line(601, 7.0)
    nodes, weights = np.stack(np.meshgrid(t, t, indexing="ij"), -1).reshape(-1, 2), np.outer(w, w).ravel()
    K = formula(Z[:, None, None], loc + scale * nodes[:, None])
    assert_allclose(psi1(kernel, Z, loc, scale), np.einsum("s,msb->mb", weights, K), atol=1e-4)
    assert_allclose(psi2(kernel, Z, loc, scale), np.einsum("s,msb,nsb->bmn", weights, K, K), atol=2e-4)


def test_nodes_dense_in_the_middle():
    t, w = dense_about_zero(128, 8.0)
    assert_allclose([(w * t[:, 0] ** n).sum() for n in (0, 1, 2, 4)], [1, 0, 1, 3], atol=1e-11)
    assert np.diff(t[:, 0]).min() < 0.05


def known_badly(dtype=float):
    loc = jnp.linspace(0, 1, 6, dtype=dtype)[:, None]
    return ogp.LatentInputs(loc, loc, jnp.full_like(loc, 40))


def test_what_nodes_miss_is_said_in_predictions():
    kernel, formula = KERNELS["Periodic"]
    X = np.linspace(0, 1, 8)[:, None]
    f, _ = fitted(kernel, formula, jnp.float64, X, X[:, 0], 0.3)
    message = (
        r"average f.expected\(X\) over uncertain inputs are too few: with many more it moves by 0\.\d+ of the prior"
    )
    with pytest.warns(UserWarning, match=message):
        f.expected(known_badly())
    near = ogp.LatentInputs(jnp.asarray(X), jnp.asarray(X), jnp.full((8, 1), 0.1))
    with pytest.warns(UserWarning, match="more nodes"):
        f.expected(near, num_points=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f.expected(near)
        jax.jit(f.expected)(known_badly())  # values are not known


@pytest.mark.parametrize("collapsed", [False, True])
def test_check_says_what_nodes_miss(collapsed):
    y = jnp.linspace(-1, 1, 6)
    Z = jnp.linspace(0, 0.8, 4)[:, None]

    def model(y, period):
        X = ogp.latent_inputs("X", 6, 1)
        kernel = kernels.Periodic(1.0, period)
        if collapsed:
            numpyro.sample("y", ogp.CollapsedGP(kernel, X, Z, 0.3), obs=y)
        else:
            f = ogp.gp("f", kernel, Z, jitter=1e-6)
            with numpyro.plate("rows", 6):
                numpyro.sample("y", likelihoods.Gaussian(f.expected(X), 0.3), obs=y)

    guide = ogp.AutoSparseGP(model)
    with numpyro.handlers.seed(rng_seed=0):
        guide(y, 5.0)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(0.1), numpyro.infer.TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), y, 5.0))
    few = ogp.check(model, guide, params, y, 0.01, num_samples=25)
    enough = ogp.check(model, guide, params, y, 5.0, num_samples=25)
    assert few.averaging["y"] > 0.01 > 1e-3 > enough.averaging["y"]
    said = "Nodes that average y over uncertain inputs are too few"
    assert [said in line for line in few.advice].count(True) == 1
    assert not any(said in line for line in enough.advice)
    assert "nodes over uncertain inputs of y miss" in str(enough)
