"""`posterior` says that a function is given one draw of another one, on which its kernel or its points depend."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

X = jnp.linspace(0.0, 5.0, 6)[:, None]
Z = X[::2]
Y = jnp.sin(X[:, 0])
FAR = jnp.array([[1e3]])


def path_in_a_kernel(h):
    w = h.sample_paths(numpyro.prng_key(), 1)

    def kernel(A, B=None):
        scale_of = lambda A: jnp.exp(0.5 * w(A)[0])  # noqa: E731
        if B is None:
            return scale_of(A) ** 2
        return scale_of(A)[:, None] * kernels.RBF(1.0)(A, B) * scale_of(B)

    return ogp.gp("f", kernel, Z), X


def variance(h):
    return ogp.gp("f", jnp.exp(h(X[:1]).sample()[0]) * kernels.RBF(1.0), Z), X


def points(h):
    return ogp.gp("f", kernels.RBF(1.0), h(Z).sample()[:, None]), X


def inputs(h):
    return ogp.gp("f", kernels.RBF(1.0), Z), h(X).sample()[:, None]


def hyperparameter(h):
    ell = numpyro.sample("ell", dist.LogNormal(0.0, 0.3))
    return ogp.gp("f", kernels.RBF(ell), Z), h(X).sample()[:, None]


def model(declare):
    f, at = declare(ogp.gp("h", kernels.RBF(1.2), Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(at), 0.4), obs=Y)


def fitted(declare):
    program = partial(model, declare)
    guide = ogp.AutoSparseGP(program, hyper=AutoNormal)
    svi = SVI(program, guide, optax.sgd(0.0), TraceMeanField_ELBO())
    return program, guide, svi.get_params(svi.init(random.PRNGKey(0)))


@pytest.mark.parametrize("declare", [path_in_a_kernel, variance, points])
def test_one_draw_is_said(declare):
    with pytest.warns(
        UserWarning, match="'f' is given one draw of 'h', on which the kernel or the inducing points depend"
    ) as seen:
        ogp.posterior(*fitted(declare))
    assert seen[0].filename == __file__


@pytest.mark.parametrize("declare", [inputs, hyperparameter])
def test_other_draws_are_not(declare):
    """Draws that only likelihoods see, and hyperparameters of a random guide, which the docstring names."""
    fit = fitted(declare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ogp.posterior(*fit)


def test_the_mixture_over_draws():
    """Far from all data the variance of f is exp(h), log-normal as q(h) is the prior."""
    fit = fitted(variance)
    keys = random.split(random.PRNGKey(0), 4000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a key is given
        far = np.asarray(jax.jit(jax.vmap(lambda key: ogp.posterior(*fit, rng_key=key)["f"](FAR).variance[0]))(keys))
    assert np.log(far).mean() == pytest.approx(0, abs=0.1) and np.log(far).std() == pytest.approx(1, abs=0.06)
    assert far.mean() == pytest.approx(np.exp(0.5), abs=0.2)
    assert far.std() > 1
