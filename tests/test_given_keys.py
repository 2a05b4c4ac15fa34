"""Draws in fits with keys that users give: one that is the same at each step, or in two draws, must not fix their noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels

A = jnp.array([[0.3], [1.1], [2.0]])
B = A + 0.6
Z = jnp.array([[0.0], [3.0]])  # few, so that draws have a residual
FIXED = jax.random.PRNGKey(7)


def _twice_one_key(f):
    key = numpyro.prng_key()
    return f.joint(A).sample(key) - f.joint(B).sample(key)


DIFFERENCES = {
    "fixed": lambda f: f(A).sample(FIXED) - f(B).sample(jax.random.PRNGKey(8)),
    "draw": lambda f: f(A).draw(FIXED) - f(B).draw(FIXED),
    "joint": lambda f: f.joint(A).sample(FIXED) - f.joint(B).sample(FIXED),
    "the model's, twice": _twice_one_key,
    "path": lambda f: f.sample_paths(FIXED, 1, num_features=20)(A)[0] - f(B).sample(),
    "in a loop": lambda f: jax.vmap(lambda a, b: f(jnp.stack([a, b])).sample(FIXED))(A, B) @ jnp.array([1.0, -1.0]),
}
ROWS = {
    "fixed": lambda f: f(A).independent().sample(FIXED),
    "loop": lambda f: jax.vmap(lambda a: f(a[None]).independent().sample(FIXED)[0])(A),
}


def _elbos(mean, guide_of, objective, num=2000):
    def model():
        f = ogp.gp("f", kernels.Matern32(0.7), Z)
        with numpyro.plate("data", len(A)):
            numpyro.sample("y", dist.Normal(mean(f), 0.8), obs=jnp.array([0.5, -0.3, 0.9]))

    guide = guide_of(model)
    svi = SVI(model, guide, optax.sgd(0.0), objective)
    params = svi.get_params(svi.init(jax.random.PRNGKey(0)))
    loss = jax.jit(lambda keys: jax.lax.map(lambda key: objective.loss(key, params, model, guide), keys))
    return -np.asarray(loss(jax.random.split(jax.random.PRNGKey(1), num)))


def _assert_same(ours, expected):
    error = np.sqrt((ours.var() + expected.var()) / len(ours))
    assert abs(ours.mean() - expected.mean()) < 5 * error and ours.std() > 0.6 * expected.std()


@pytest.fixture(scope="module")
def difference():
    return _elbos(lambda f: f(A).sample() - f(B).sample(), ogp.AutoSparseGP, TraceMeanField_ELBO())


@pytest.mark.parametrize("draw", DIFFERENCES)
def test_noise_is_drawn_anew_at_each_step(draw, difference):
    """With the same noise at each step the loss of a fit was -3.6 where log p(y) was -4.6."""
    _assert_same(_elbos(DIFFERENCES[draw], ogp.AutoSparseGP, TraceMeanField_ELBO()), difference)


@pytest.mark.parametrize("draw", ROWS)
def test_row_by_row(draw):
    ours, expected = (
        _elbos(mean, ogp.AutoSparseGP, TraceMeanField_ELBO())
        for mean in (ROWS[draw], lambda f: f(A).independent().sample())
    )
    _assert_same(ours, expected)


def test_guides_of_numpyro():
    ours, expected = (
        _elbos(mean, AutoMultivariateNormal, Trace_ELBO())
        for mean in (DIFFERENCES["joint"], lambda f: f(A).sample() - f(B).sample())
    )
    _assert_same(ours, expected)


def test_outside_of_fits_a_key_decides():
    """Also of a fitted function within the run of another model."""
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.Matern32(0.7), Z)
        first = f(A).sample(FIXED)
    with numpyro.handlers.seed(rng_seed=0):
        assert jnp.array_equal(ogp.gp("f", kernels.Matern32(0.7), Z)(A).sample(FIXED), first)
    guide = ogp.AutoSparseGP(lambda: _observed(lambda f: f(A).mean))
    params = {"f.u0_loc": jnp.ones(2), "f.u0_scale_tril": 0.5 * jnp.eye(2)}
    fitted = ogp.posterior(guide.model, guide, params)["f"]
    with numpyro.handlers.seed(rng_seed=0):
        assert jnp.array_equal(fitted(A).sample(FIXED), fitted(A).sample(FIXED))
    assert jnp.array_equal(fitted(A).sample(FIXED), fitted(A).sample(FIXED))


def _observed(mean):
    f = ogp.gp("f", kernels.Matern32(0.7), Z)
    with numpyro.plate("data", len(A)):
        numpyro.sample("y", dist.Normal(mean(f), 0.8), obs=jnp.zeros(3))


def test_rows_of_keys_differ():
    """A key of each row, at one input: what is given still counts."""
    seen = []

    def model():
        f = ogp.gp("f", kernels.Matern32(0.7), Z)
        keys = jax.random.split(jax.random.PRNGKey(3), len(A))
        draws = jax.vmap(lambda key: f(A[:1]).independent().sample(key)[0])(keys)
        seen.append(draws)
        with numpyro.plate("data", len(A)):
            numpyro.sample("y", dist.Normal(draws, 0.8), obs=jnp.zeros(len(A)))

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.sgd(0.0), TraceMeanField_ELBO())
    svi.evaluate(svi.init(jax.random.PRNGKey(0)))
    assert len(set(np.asarray(seen[-1]).tolist())) == len(A)
