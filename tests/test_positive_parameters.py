"""Why examples and guides store positive parameters as softplus: fits that start at the truth stay there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

SEEDS, STEPS, NOISE = 16, 1500, 0.1


def data(seed):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(0, 20, (200, 1)), 0).astype(np.float32)
    return X, (np.sin(2 * np.pi * X[:, 0]) + NOISE * rng.normal(size=200)).astype(np.float32)


def noises(constraint):
    """The noise scale that each seed ends with, the period of the kernel being true at the start."""

    def model(X, y):
        start = {"variance": 1.0, "lengthscale": 1.0, "period": 1.0, "noise": 1.0}
        p = {k: numpyro.param(k, jnp.asarray(v, jnp.float32), constraint=constraint) for k, v in start.items()}
        kernel = p["variance"] * kernels.Periodic(p["lengthscale"], p["period"])
        f = ogp.gp("f", kernel, numpyro.param("Z", jnp.linspace(0, 20, 40, dtype=jnp.float32)[:, None]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), p["noise"]), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.02), TraceMeanField_ELBO())
    X, y = (jnp.stack(arrays) for arrays in zip(*map(data, range(SEEDS)), strict=True))
    state = svi.init(jax.random.PRNGKey(0), X[0], y[0])

    def fit(batch):
        steps = lambda _, state: svi.update(state, *batch)[0]  # noqa: E731
        return svi.get_params(jax.lax.fori_loop(0, STEPS, steps, state))["noise"]

    return np.asarray(jax.jit(lambda batches: jax.lax.map(fit, batches))((X, y)))


@pytest.mark.slow
def test_a_periodic_kernel_started_at_the_true_period():
    """Adam's steps are as long however small the gradient; under exp each multiplies the parameter."""
    lost = {
        c: int((noises(c) > 5 * NOISE).sum()) for c in (dist.constraints.softplus_positive, dist.constraints.positive)
    }
    assert lost[dist.constraints.softplus_positive] + 3 <= lost[dist.constraints.positive], lost
