"""Natural steps that lead to where nothing is finite are taken back, and all others stay as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.gaussians.constraints import Natural
from numpyro_orthgp.gaussians.family import Full
from tests import oracles

X = np.linspace(0, 10, 40)[:, None]
Z = X[::6]


def poisson_optimum(y):
    """Mean of q at the inducing points by Newton steps on the exact bound, whose covariance follows from its mean."""
    k = oracles.rbf(1.0, 1.5)
    L = np.linalg.cholesky(k(Z, Z) + 1e-6 * np.eye(len(Z)))
    A = np.linalg.solve(L, k(Z, X))
    residual = 1 - np.sum(A**2, 0)
    m, S = np.linalg.lstsq(A.T, np.log(y), rcond=None)[0], np.zeros((len(Z), len(Z)))
    for _ in range(200):
        rate = np.exp(A.T @ m + (np.sum(A * (S @ A), 0) + residual) / 2)
        S = np.linalg.inv(np.eye(len(Z)) + (A * rate) @ A.T)
        m = m - 0.5 * S @ (A @ (rate - y) + m)
    return A.T @ m


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_counts_of_a_million_converge_from_zero(dtype, covariance):
    y = np.random.default_rng(0).poisson(1e6 * np.exp(0.5 * np.sin(X[:, 0]))).astype(float)
    inputs, counts, points = (jnp.asarray(a, dtype) for a in (X, y, Z))

    def model():
        f = ogp.gp("f", kernels.RBF(jnp.asarray(1.5, dtype)), points)
        numpyro.param("unused", jnp.ones((), dtype))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Poisson(f(inputs)), obs=counts)

    guide = ogp.AutoSparseGP(model, natural=True, covariance=covariance)
    # A diagonal covariance wants shorter steps, as the docstring says.
    rate, steps = (0.5, 80) if covariance == "full" else (0.1, 80)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(1e-2), rate), TraceMeanField_ELBO())
    run = svi.run(jax.random.PRNGKey(0), steps, progress_bar=False)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves(run.params))
    assert run.params["f.u0_loc"].dtype == dtype
    if covariance == "full":
        mean = ogp.posterior(model, guide, run.params)["f"](inputs).mean
        np.testing.assert_allclose(mean, poisson_optimum(y), atol=2e-3)


def problem(rng, size=1.0):
    loc, scale = size * rng.normal(size=4), np.tril(rng.normal(size=(4, 4))) / 5 + np.eye(4)
    return {name: Natural(jnp.asarray(v), Full, name[2:]) for name, v in (("u_loc", loc), ("u_scale_tril", scale))} | {
        "theta": jnp.asarray(1.0)
    }


def moved(params, updates):
    return jax.tree.map(jnp.add, params, updates)


def test_steps_whose_outcome_is_finite_are_those_of_the_formula(rng):
    optim = ogp.natural_gradient(optax.adam(0.1), 0.2)
    params = problem(rng)
    state = optim.init(params)
    for _ in range(3):
        g = problem(rng, 30.0)
        updates, state = optim.update(g, state, params)
        q, d = (Full(t["u_loc"].value, t["u_scale_tril"].value) for t in (params, g))
        wanted, after = q.natural_step(d, 0.2), moved(params, updates)
        np.testing.assert_allclose(after["u_loc"].value, wanted.loc, rtol=1e-14)
        np.testing.assert_allclose(after["u_scale_tril"].value, wanted.scale_tril, rtol=1e-14, atol=1e-15)
        params = after


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_a_step_is_taken_back_and_a_quarter_of_it_tried(bad, rng):
    """Twice; others and their state wait, and the step after a success has its full length."""
    optim = ogp.natural_gradient(optax.adam(0.1), 0.2)
    start, g = problem(rng), problem(rng)
    first, state = optim.update(g, optim.init(start), start)
    params, adam = moved(start, first), state.others
    q, d = (Full(t["u_loc"].value, t["u_scale_tril"].value) for t in (start, g))
    useless = g | {"u_loc": Natural(g["u_loc"].value.at[1].set(bad), Full, "loc"), "theta": jnp.asarray(np.nan)}
    for length in (0.05, 0.0125):
        updates, state = optim.update(useless, state, params)
        theta, params = params["theta"], moved(params, updates)
        np.testing.assert_allclose(params["u_loc"].value, q.natural_step(d, length).loc, rtol=1e-12)
        np.testing.assert_allclose(
            params["u_scale_tril"].value, q.natural_step(d, length).scale_tril, rtol=1e-12, atol=1e-14
        )
        assert params["theta"] == theta
        jax.tree.map(np.testing.assert_array_equal, state.others, adam)
    updates, state = optim.update(g, state, params)
    q = Full(params["u_loc"].value, params["u_scale_tril"].value)
    np.testing.assert_allclose(moved(params, updates)["u_loc"].value, q.natural_step(d, 0.2).loc, rtol=1e-12)
    assert state.past.length == 1


def test_a_first_gradient_that_is_not_finite_moves_nothing(rng):
    optim = ogp.natural_gradient(optax.adam(0.1), 0.2)
    params, g = problem(rng), jax.tree.map(lambda v: v * np.nan, problem(rng))
    updates, _ = optim.update(g, optim.init(params), params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved(params, updates)), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-15)


def test_a_step_that_is_not_finite_itself_is_not_taken(monkeypatch, rng):
    monkeypatch.setattr(Full, "natural_step", lambda q, g, rate: Full(q.loc * np.inf, q.scale_tril))
    optim = ogp.natural_gradient(optax.adam(0.1), 0.2)
    params = problem(rng)
    updates, _ = optim.update(problem(rng), optim.init(params), params)
    assert not updates["u_loc"].value.any() and not updates["u_scale_tril"].value.any()
