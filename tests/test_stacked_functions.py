"""Functions and marginals that `jax.vmap` has stacked: nodes are rows, not outputs, and what is of several functions says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

N, Q, NOISE = 5, 2, 0.4
Z = jnp.array([[1.0], [4.0]])
NODES = jnp.linspace(0.0, 5.0, N)[:, None, None] + jnp.array([[0.0], [0.5]])  # (N, Q, 1)
Y = jnp.sin(NODES[:, 0, 0])


def model_of(density, num_latents=None):
    def model():
        f, g = ogp.gp("f", kernels.RBF(1.2), Z, num_latents=num_latents), ogp.gp("g", kernels.RBF(0.8), Z)
        with numpyro.plate("data", N):
            numpyro.sample("y", density(f, g), obs=Y)

    return model


def fit_of(model, seed=0):
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.sgd(0.0), TraceMeanField_ELBO())
    return model, guide, svi.get_params(svi.init(random.PRNGKey(seed)))


def by_rows(f, X):
    return jax.vmap(f)(X).independent().sample()


def of_node(f, g):
    return dist.Normal(by_rows(f, NODES)[:, 0], NOISE)


def of_two_functions(f, g):
    v = ogp.stack([f(NODES[:, 0]), g(NODES[:, 1])]).independent().sample()
    return dist.Normal(v[:, 0] * v[:, 1], NOISE)


def of_outputs(f, g):
    v = f(NODES[:, 0]).independent().sample()
    return dist.Normal(v[:, 0] * v[:, 1], NOISE)


WRONG = {
    "averages": (lambda f, g: dist.Normal(by_rows(f, NODES).mean(1), NOISE), None),
    "products": (lambda f, g: dist.Normal(by_rows(f, NODES).prod(1), NOISE), None),
    "averages of an output": (lambda f, g: dist.Normal(by_rows(f, NODES)[..., 0].mean(1), NOISE), 2),
}
RIGHT = {"a node": (of_node, None), "two functions": (of_two_functions, None), "two outputs": (of_outputs, 2)}


@pytest.mark.parametrize("kind", WRONG)
def test_several_nodes_row_by_row_are_refused(kind):
    with pytest.raises(ValueError, match="`y` takes several rows of one draw of `f` row by row"):
        fit_of(model_of(*WRONG[kind]))


@pytest.mark.parametrize("kind", RIGHT)
def test_what_sees_one_row_is_not(kind):
    fit_of(model_of(*RIGHT[kind]))


def test_what_is_refused_would_be_no_bound():
    """With q the prior the ELBO is E log N(y; average of f, s^2), in closed form. Draws of nodes by themselves have another."""
    model = model_of(lambda f, g: dist.Normal(jax.vmap(lambda x: f(x).sample())(NODES).mean(1), NOISE))
    fit = fit_of(model)
    loss = lambda key: TraceMeanField_ELBO().loss(key, fit[2], *fit[:2])  # noqa: E731
    losses = jax.jit(lambda keys: lax.map(loss, keys))(random.split(random.PRNGKey(1), 4000))
    k = np.exp(-(0.5**2) / 2 / 1.2**2)  # of two nodes

    def expected(variance):
        return -(Y**2 + variance).sum() / 2 / NOISE**2 - N * np.log(NOISE * np.sqrt(2 * np.pi))

    error = 4 * float(losses.std()) / np.sqrt(len(losses))
    assert -losses.mean() == pytest.approx(float(expected((1 + k) / 2)), abs=error)
    assert abs(expected((1 + k) / 2) - expected(0.5)) > 4 * error


@pytest.mark.parametrize("running", [True, False])
def test_draws_of_stacked_marginals_say_so(running):
    model = model_of(lambda f, g: likelihoods.Gaussian(f(NODES[:, 0]), NOISE))
    draw = lambda f: jax.vmap(f)(NODES).sample(random.PRNGKey(0))  # noqa: E731
    with pytest.raises(ValueError, match=r"These marginals are stacked, as by jax.vmap.*independent\(\)"):
        if running:
            handlers.seed(model_of(lambda f, g: dist.Normal(draw(f)[:, 0], NOISE)), 0)()
        else:
            draw(ogp.posterior(*fit_of(model))["f"])


def test_stacked_functions_say_so():
    fit = fit_of(model_of(lambda f, g: likelihoods.Gaussian(f(NODES[:, 0]), NOISE)))
    functions = jax.vmap(lambda key: ogp.posterior(*fit, rng_key=key)["f"])(random.split(random.PRNGKey(0), 3))
    X = NODES[:, 0]
    asked = [lambda f: f(X), lambda f: f.joint(X), lambda f: f.sample_paths(random.PRNGKey(0), 1)]
    for ask in asked:
        with pytest.raises(ValueError, match=r"These are several functions, stacked as by jax\.vmap"):
            ask(functions)
    one = ogp.posterior(*fit)["f"](X).mean
    np.testing.assert_allclose(jax.vmap(lambda f: f(X).mean)(functions), jnp.stack([one] * 3), atol=1e-5)
