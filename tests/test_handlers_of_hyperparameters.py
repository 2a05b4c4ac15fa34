"""NumPyro's handlers of hyperparameters around a model with a gp: fits beside the exact mode, from dense formulas."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.optimize
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.reparam import LocScaleReparam

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

X = jnp.linspace(0.0, 5.0, 14)[:, None]
Y = jnp.sin(2 * X[:, 0]) + 0.3 * random.normal(random.PRNGKey(0), (14,))
NOISE = 0.3


def observe(lengthscale):
    f = ogp.gp("f", kernels.RBF(lengthscale), X)  # points at all inputs: the optimal bound is the evidence
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=Y)


def fit(model):
    guide = ogp.AutoSparseGP(model, natural=True)
    optim = ogp.natural_gradient(optax.adam(optax.cosine_decay_schedule(0.03, 600)), 1.0)
    result = SVI(model, guide, optim, TraceMeanField_ELBO()).run(random.PRNGKey(0), 600, progress_bar=False)
    ogp.posterior(model, guide, result.params)
    return result.params, -result.losses[-1]


def mode(log_prior, lengthscale, start):
    """The exact mode over t, and the log joint density there."""

    def loss(t):
        cov = kernels.RBF(lengthscale(t))(X, X) + NOISE**2 * jnp.eye(len(X))
        return -dist.MultivariateNormal(jnp.zeros(len(X)), cov).log_prob(Y) - log_prior(t)

    found = scipy.optimize.minimize(jax.jit(jax.value_and_grad(loss)), start, jac=True)
    return found.x, -found.fun


def of_prior():
    observe(numpyro.sample("l", dist.LogNormal(0.0, 0.5)))


def test_a_substituted_value_is_a_start_which_is_said_and_a_condition_fixes_it():
    def fitted(handler):
        model = handler(of_prior, {"l": jnp.array(2.0)})
        svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
        return svi.run(random.PRNGKey(0), 2, progress_bar=False).params

    with pytest.warns(RuntimeWarning, match=r"`l` has a value from handlers.substitute .* handlers.condition\(model"):
        moved = fitted(handlers.substitute)
    assert abs(moved["l_auto_loc"] - 2.0) > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "l_auto_loc" not in fitted(handlers.condition)


def test_what_a_loop_draws_is_not_said_to_be_substituted():
    def model():
        def step(state, _):
            return numpyro.sample("state", dist.Normal(state, 0.1)), None

        observe(jnp.exp(scan(step, jnp.zeros(()), None, 3)[0]))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ogp.AutoSparseGP(model)._setup_prototype()


def test_a_lifted_parameter():
    prior = dist.LogNormal(0.0, 0.5)
    model = handlers.lift(
        lambda: observe(numpyro.param("l", jnp.array(1.0), constraint=dist.constraints.positive)), {"l": prior}
    )
    params, elbo = fit(model)
    t, best = mode(lambda t: prior.log_prob(t[0]), lambda t: t[0], [1.0])
    np.testing.assert_allclose(params["l_auto_loc"], t[0], rtol=1e-3)
    np.testing.assert_allclose(elbo, best, atol=1e-4)


def test_a_hyperparameter_without_its_parent():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        observe(jnp.exp(numpyro.sample("log_l", dist.Normal(mu, 0.4))))

    params, elbo = fit(handlers.reparam(model, {"log_l": LocScaleReparam(0.0)}))
    t, best = mode(lambda t: dist.Normal(0, 1).log_prob(t).sum(), lambda t: jnp.exp(t[0] + 0.4 * t[1]), [0.0, 0.0])
    np.testing.assert_allclose([params["mu_auto_loc"], params["log_l_decentered_auto_loc"]], t, atol=1e-3)
    np.testing.assert_allclose(elbo, best, atol=1e-4)


def test_a_parent_that_is_integrated_out():
    def model():
        with handlers.collapse():
            p = numpyro.sample("p", dist.Beta(2.0, 3.0))
            numpyro.sample("k", dist.Binomial(10, p), obs=jnp.array(4.0))
        observe(numpyro.sample("l", dist.LogNormal(0.0, 0.5)))

    _, elbo = fit(model)
    _, best = mode(lambda t: dist.LogNormal(0.0, 0.5).log_prob(t[0]), lambda t: t[0], [1.0])
    np.testing.assert_allclose(elbo, best + dist.BetaBinomial(2.0, 3.0, 10).log_prob(4.0), atol=1e-4)
