"""Errors that name the remedy, and that the remedy they name works."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods

M = ogp.Marginals(jnp.linspace(-1.0, 1.0, 5), jnp.full(5, 0.3), jnp.full(5, 0.1))


@pytest.mark.parametrize("which", ["mean", "variance"])
@pytest.mark.parametrize(
    "given",
    [
        lambda f: dist.Cauchy(f, 1.0),
        lambda f: dist.OrderedLogistic(f, jnp.asarray([-1.0, 1.0])),
        lambda f: dist.TransformedDistribution(dist.Normal(f, 1.0), dist.transforms.SigmoidTransform()),
    ],
)
def test_moments_that_do_not_exist(given, which):
    fn = ogp.Likelihood(M, given)
    kind = type(given(M.mean)).__name__
    with pytest.raises(
        ValueError, match=rf"{kind}, the distribution of y given f, has no .*fn\.sample\(rng_key, \(1000,\)\)"
    ):
        getattr(fn, which)
    assert fn.sample(jax.random.PRNGKey(0), (1000,)).shape == (1000, 5)


def test_moments_that_do_exist_are_as_they_were():
    fn = ogp.Likelihood(M, lambda f: dist.Normal(f, 0.5))
    assert_allclose(fn.mean, M.mean, atol=1e-12)
    assert_allclose(fn.variance, M.variance + 0.25, rtol=1e-10)


def test_one_output_in_each_row():
    X, task = jnp.linspace(0.0, 1.0, 500)[:, None], jnp.arange(500) % 3
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(0.5), X[::100], num_latents=3)
    m = f(X)
    with pytest.raises(
        TypeError, match=r"got the key \(array of shape \(500,\), array of shape \(500,\)\).*f\(Tasks\(X, task\)\)"
    ) as error:
        m[jnp.arange(500), task]
    assert len(str(error.value)) < 400
    picked = ((m * jax.nn.one_hot(task, 3)) @ jnp.ones((3, 1)))[..., 0]
    rows = np.arange(500)
    assert_allclose(picked.mean, m.mean[rows, task], atol=1e-12)
    assert_allclose(picked.variance, m.variance[rows, task], atol=1e-12)
    y = jnp.ones(500, int)
    each = likelihoods.Poisson(m).log_prob(jnp.ones((500, 3), int))
    assert_allclose(likelihoods.Poisson(picked).log_prob(y), each[rows, task], rtol=1e-10)


def test_centres_of_tasks_are_no_tasks():
    rng = np.random.default_rng(0)
    X = np.stack([rng.normal(size=30), rng.integers(0, 3, 30)], 1)
    kernel = kernels.RBF(1.0).on(0) * kernels.Coregion(jnp.ones((3, 1)), jnp.ones(3)).on(1)

    def declare(Z):
        with numpyro.handlers.seed(rng_seed=0):
            return ogp.gp("f", kernel, Z)

    with pytest.raises(
        ValueError, match=r"Averages of tasks are no tasks.*init\.kmeans\(\.\.\., categories=\[column\]\)"
    ):
        declare(init.kmeans(jax.random.PRNGKey(0), X, 4))
    beside = np.concatenate([init.kmeans(jax.random.PRNGKey(0), X[:, :1], 6), np.arange(6)[:, None] % 3.0], 1)
    assert declare(beside)(X).shape == declare(init.greedy_variance(kernel, X, 4))(X).shape == (30,)


def test_columns_of_categories_have_no_centres():
    key = jax.random.PRNGKey(0)
    for X in (np.arange(10)[:, None], np.ones((10, 1), bool)):
        with pytest.raises(
            TypeError, match=r"Codes of categories have no means: name their columns.*init\.greedy_variance"
        ):
            init.kmeans(key, X, 2)
    for X in (np.array([["a"], ["b"]]), np.array([[1.0, "a"]], object)):
        with pytest.raises(
            TypeError, match=r"got ndarray of (<U1|object)\. Text and categories need numbers.*Coregion"
        ):
            init.kmeans(key, X, 1)
    one_hot = jax.nn.one_hot(np.arange(10) % 3, 3)
    assert init.kmeans(key, one_hot, 3).shape == (3, 3)


@pytest.mark.parametrize(
    "fn",
    [
        likelihoods.Gaussian(M, 0.1),
        ogp.Likelihood(M, lambda f: dist.Normal(f, 0.5)),
        likelihoods.Stacked(jax.vmap(lambda s: likelihoods.Gaussian(M, s))(jnp.ones(3))),
        ogp.CollapsedGP(kernels.RBF(1.0), jnp.zeros((2, 1)), jnp.ones((1, 1)), 0.1),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_draws_without_a_key(fn):
    with pytest.raises(ValueError, match=r"belong in a model.* no random key.*\.sample\(jax\.random\.PRNGKey\(0\)\)"):
        numpyro.sample("y", fn)
