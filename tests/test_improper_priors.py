"""Sites with an improper prior, which has no draws: the guide's first look gives them a value."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

X = jnp.linspace(0.0, 5.0, 12)[:, None]
KERNEL, NOISE = kernels.RBF(0.8), 0.3
Y = jnp.sin(2 * X[:, 0]) + 1.0


def model(X, y=None):
    level = numpyro.sample("level", dist.ImproperUniform(constraints.real, (), ()))
    f = ogp.gp("f", KERNEL, X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X) + level, NOISE), obs=y)


@pytest.mark.parametrize("hyper", [{}, {"hyper": AutoNormal}])
def test_a_level_with_a_flat_prior(hyper):
    """With inducing points at all inputs the posterior of the level is that of generalized least squares."""
    guide = ogp.AutoSparseGP(model, natural=True, **hyper)
    optim = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.05, 600)), 1.0)
    fit = SVI(model, guide, optim, TraceMeanField_ELBO()).run(random.PRNGKey(0), 600, X, Y, progress_bar=False)
    precision = np.linalg.inv(np.asarray(KERNEL(X, X)) + NOISE**2 * np.eye(len(X)))
    expected = precision.sum(0) @ np.asarray(Y) / precision.sum()
    tolerance = 0.02 if hyper else 1e-3  # AutoNormal draws
    np.testing.assert_allclose(fit.params["level_auto_loc"], expected, atol=tolerance)
    assert ogp.posterior(model, guide, fit.params, X, Y)["f"](X).shape == (len(X),)
    assert ogp.check(model, guide, fit.params, X, Y, num_samples=25).plugged == {}


@pytest.mark.parametrize(
    "prior, shape",
    [
        (dist.ImproperUniform(constraints.positive, (), (2,)), (2,)),
        (dist.ImproperUniform(constraints.unit_interval, (), ()).expand([3]).to_event(1), (3,)),
        (dist.ImproperUniform(constraints.simplex, (), (4,)), (4,)),
        (dist.ImproperUniform(constraints.real, (2,), ()).mask(False), (2,)),
    ],
)
def test_starts_within_the_support(prior, shape):
    def model(X, y):
        w = numpyro.sample("w", prior)
        f = ogp.gp("f", KERNEL, X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + w.sum(), NOISE), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(random.PRNGKey(0), X, Y))
    start = params["w_auto_loc"]
    assert start.shape == shape and bool(jnp.all(prior.support(start)))
