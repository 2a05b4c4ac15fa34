"""Sums over all rows in float32, where the signal is far above the noise: nothing large is subtracted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from numpyro_orthgp.math.blocks import sum_blocks
from tests import oracles

N, M, NOISE, JITTER = 1500, 20, 0.003, 1e-6
# Nats. Sums of y^2 / noise^2 are 1e8 here, with rounding errors of up to 8. The difference of two of them was off by 2.3 to 3.0
# nats at three seeds, its derivative by 6 to 83 %.
TOO_MUCH = 1.5


def data(rng):
    """Inputs, outputs and points that float32 holds exactly."""
    X = rng.uniform(size=(N, 1))
    Y = np.stack([np.sin(6 * X[:, 0]), 1 + np.cos(5 * X[:, 0])], 1) + NOISE * rng.normal(size=(N, 2))
    return (a.astype(np.float32) for a in (X, Y, np.linspace(0.0, 1.0, M)[:, None]))


def collapsed(X, Z, noise=NOISE, *, lengthscale=0.3, **options):
    options = {"bound": "dtc", "jitter": JITTER, "block_size": 200} | options
    return ogp.CollapsedGP(kernels.Matern32(lengthscale), X, Z, jnp.asarray(noise, X.dtype), **options)


def exact(arrays, lengthscale=0.3, of=oracles.dtc):
    X, y, Z = (np.asarray(a, float) for a in arrays)
    return of(oracles.matern32(1.0, lengthscale), X, y, Z, float(np.float32(NOISE)) ** 2, JITTER)


def test_one_output_and_its_gradient(rng):
    X, Y, Z = data(rng)
    y = jnp.asarray(Y[:, 0])

    @jax.jit
    def bound(lengthscale):
        return collapsed(X, Z, lengthscale=lengthscale).log_prob(y)

    value, slope = jax.value_and_grad(bound)(jnp.float32(0.3))
    step = 1e-5
    wanted = (exact((X, y, Z), np.float32(0.3) + step) - exact((X, y, Z), np.float32(0.3) - step)) / (2 * step)
    assert abs(value - exact((X, y, Z), float(np.float32(0.3)))) < TOO_MUCH
    assert_allclose(slope, wanted, rtol=4e-2)


@pytest.mark.parametrize("lengthscale", [0.3, [[0.3], [0.5]]])
def test_two_outputs_of_which_some_are_missing(rng, lengthscale):
    X, Y, Z = data(rng)
    observed = rng.uniform(size=Y.shape) < 0.7
    kernel = jnp.asarray(lengthscale, jnp.float32)
    value = jax.jit(lambda Y: collapsed(X, Z, lengthscale=kernel, observed=observed, num_outputs=2).log_prob(Y))(Y)
    each = np.broadcast_to(np.asarray(kernel, float).reshape(-1), 2)
    wanted = sum(exact((X[o], y[o], Z), each[i]) for i, (y, o) in enumerate(zip(Y.T, observed.T, strict=True)))
    assert abs(value - wanted) < TOO_MUCH


def test_upper_bound(rng):
    X, Y, Z = data(rng)
    wanted = exact((X, Y[:, 0], Z), float(np.float32(0.3)), of=oracles.upper_bound)
    assert abs(collapsed(X, Z).upper_bound(Y[:, 0]) - wanted) < 2 * TOO_MUCH  # its charge is in float32 too


def test_the_best_mean(rng):
    X, Y, Z = data(rng)
    mean = collapsed(X, Z).posterior(Y[:, 0])(X).mean
    k = oracles.matern32(1.0, float(np.float32(0.3)))
    K = k(Z, Z) + JITTER * np.eye(M)
    C = k(X, Z).astype(float)
    wanted = C @ np.linalg.solve(K * float(np.float32(NOISE)) ** 2 + C.T @ C, C.T @ Y[:, 0].astype(float))
    assert_allclose(mean, wanted, atol=3e-5)


@pytest.mark.parametrize(
    ("name", "sets"),
    [(name, 1) for name in ("titsias2009", "titsias2025", "artemev2021", "fitc", "pep", "conditional")]
    + [("titsias2025", 2), ("titsias2009", 2)],
)
def test_outputs_less_what_a_few_rows_explain_give_the_same_bound(rng, monkeypatch, name, sets):
    """In float64, by pretending that it is float32, where both forms are right."""
    X, Y, Z = (a.astype(float) for a in data(rng))
    options = {
        "bound": name,
        "alpha": 0.5 if name == "pep" else None,
        "block_size": None if name == "conditional" else 400,
    }
    options |= {"group_size": 8} if name in ("titsias2025", "fitc", "pep") else {}
    inducing = Z if sets == 1 else [Z[::2], Z[1::2]]
    bound = collapsed(X[:600], inducing, 0.05, **options)
    plain = bound.log_prob(Y[:600])
    monkeypatch.setattr("numpyro_orthgp.collapsed.sums._COARSE", (jnp.float64,))
    jax.clear_caches()
    assert_allclose(bound.log_prob(Y[:600]), plain, rtol=1e-10)


def test_totals_of_many_blocks_lose_no_more_than_one_rounding(rng):
    """10,000 blocks: added plainly the error is about 30 units in the last place."""
    x = rng.uniform(size=10_000).astype(np.float32)
    total = jax.jit(lambda x: sum_blocks(lambda rows, w: jnp.sum(rows * w), x, jnp.ones_like(x), 1))(x)
    assert abs(float(total) - x.astype(float).sum()) <= np.spacing(total)
    assert_allclose(jax.grad(lambda x: sum_blocks(lambda r, w: jnp.sum(r**2 * w), x, jnp.ones_like(x), 1))(x), 2 * x)
