"""Small regression problems, a model that many tests share, and random Gaussians for its guide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles

KERNELS = {"rbf": kernels.RBF, "matern12": kernels.Matern12, "matern32": kernels.Matern32, "matern52": kernels.Matern52}


def data(rng: np.random.Generator, N: int = 30, D: int = 2):
    X = rng.uniform(-2, 2, (N, D))
    return X, np.sin(2 * X).sum(1) + 0.3 * rng.normal(size=N)


def sets(rng: np.random.Generator, sizes, D: int = 2):
    return [rng.uniform(-2, 2, (M, D)) for M in sizes]


def random_q(rng: np.random.Generator, M: int):
    """A mean and a lower-triangular factor with positive diagonal."""
    T = np.tril(0.4 * rng.normal(size=(M, M)), -1) + np.diag(rng.uniform(0.3, 1.2, M))
    return rng.normal(size=M), T


def q_params(qs, name: str = "f"):
    """The guide's parameters for Gaussians given as (mean, factor) per set."""
    params = {}
    for i, (m, T) in enumerate(qs):
        params |= {f"{name}.u{i}_loc": jnp.asarray(m), f"{name}.u{i}_scale_tril": jnp.asarray(T)}
    return params


def oracle_sets(Zs, qs):
    return [oracles.WhitenedSet(Z, m, T @ T.T) for Z, (m, T) in zip(Zs, qs, strict=True)]


def model(
    X,
    y=None,
    *,
    inducing,
    likelihood,
    kernel="matern52",
    variance=1.3,
    lengthscale=0.9,
    N=None,
    jitter=0.0,
    num_latents=None,
    to_event=0,
):
    """One gp with all hyperparameters as params, whatever the sets and the likelihood."""
    variance = numpyro.param("variance", jnp.asarray(variance, X.dtype))
    lengthscale = jnp.asarray(lengthscale, X.dtype)
    lengthscale = numpyro.param(
        "lengthscale", jnp.broadcast_to(lengthscale, jnp.broadcast_shapes(lengthscale.shape, X.shape[1:]))
    )
    f = ogp.gp("f", variance * KERNELS[kernel](lengthscale), inducing, jitter=jitter, num_latents=num_latents)
    with numpyro.plate("data", N or len(X), subsample_size=len(X)):
        numpyro.sample("y", likelihood(f(X)).to_event(to_event), obs=y)


def recording(values: list):
    """A model of a sampled lengthscale, whose kernel notes what it returns."""

    def model(X, y):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))

        def kernel(X1, X2=None):
            values.append(kernels.RBF(scale)(X1, X2))
            return values[-1]

        f = ogp.gp("f", kernel, jnp.asarray(X[::3]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.1), obs=y)

    return model


def loss(params, X, y, *, guide=None, key=0, elbo=None, **kwargs):
    """The negative ELBO as NumPyro computes it."""
    options = {k: kwargs.pop(k) for k in ("covariance", "residual", "analytic") if k in kwargs}
    guide = guide or ogp.AutoSparseGP(model, **options)
    elbo = elbo or TraceMeanField_ELBO()
    # Compiled as a whole: run operation by operation the same takes three times as long.
    return jax.jit(lambda params: elbo.loss(jax.random.PRNGKey(key), params, model, guide, X, y, **kwargs))(params)


def posterior(params, X, y, **kwargs):
    """The fitted function, compiled as a whole."""
    options = {k: kwargs.pop(k) for k in ("covariance", "residual") if k in kwargs}
    guide = ogp.AutoSparseGP(model, **options)
    return jax.jit(lambda params: ogp.posterior(model, guide, params, X, y, **kwargs)["f"])(params)


def gaussian(scale):
    return lambda marginals: likelihoods.Gaussian(marginals, scale)


def kernel_oracle(kernel: str, variance=1.3, lengthscale=0.9):
    return getattr(oracles, kernel)(variance, lengthscale)
