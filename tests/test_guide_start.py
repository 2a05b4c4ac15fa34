"""How AutoSparseGP starts the guide of all other sites: as NumPyro would, without evaluating functions for it."""

from __future__ import annotations

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_array_equal
from numpyro.infer import SVI, TraceMeanField_ELBO, autoguide

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.guides.handlers import WithoutGPs
from tests import problems

X = jnp.linspace(0, 1, 12)[:, None]
Y = jnp.sin(6 * X[:, 0])


def before(X, y):
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    raw = numpyro.sample("raw", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    scale = numpyro.deterministic("scale", jnp.exp(raw))
    noise = numpyro.sample("noise", dist.Uniform(0.05, variance))
    f = ogp.gp("f", variance * kernels.RBF(scale[:1]), X[::3])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def around(X, y):
    """A site after the function and a local one, in a plate that picks rows."""
    f = ogp.gp("f", kernels.RBF(numpyro.sample("scale", dist.LogNormal(0.0, 1.0))), X[::3])
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X), subsample_size=6) as rows:
        shift = numpyro.sample("shift", dist.Normal(0.0, 0.1))
        numpyro.deterministic("shifted", shift + 1)
        numpyro.sample("y", likelihoods.Gaussian(f(X[rows]) + shift, noise), obs=y[rows])


@pytest.mark.parametrize("model, name", [
    (before, "AutoDelta"), (before, "AutoNormal"), (before, "AutoMultivariateNormal"), (before, "AutoIAFNormal"),
    (around, "AutoDelta"), (around, "AutoNormal"),
])  # fmt: skip
def test_it_starts_where_it_would_if_the_whole_model_were_run(model, name, monkeypatch):
    def start():
        guide = ogp.AutoSparseGP(model, hyper=getattr(autoguide, name))
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
        state = svi.init(jax.random.PRNGKey(3), X, Y)
        return svi.get_params(state), guide.sample_posterior(jax.random.PRNGKey(4), svi.get_params(state), X, Y)

    found = start()
    monkeypatch.setattr(WithoutGPs, "only", lambda *_: nullcontext())
    jax.tree.map(assert_array_equal, found, start())


def test_no_function_is_evaluated_for_it():
    calls = []
    model = problems.recording(calls)

    def evaluations(hyper):
        calls.clear()
        guide = ogp.AutoSparseGP(model, hyper=hyper)
        SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO()).init(jax.random.PRNGKey(0), X, Y)
        return sum(not isinstance(values, jax.core.Tracer) for values in calls)  # shapes are looked at abstractly

    def by_hand(rest):
        return lambda *args: numpyro.sample("scale", dist.Delta(numpyro.param("at", 1.0)))

    # Once for the prototype of the model and once for the model.
    assert evaluations(autoguide.AutoDelta) == evaluations(by_hand) > 0


def test_afterwards_the_guide_sees_the_whole_model():
    guide = ogp.AutoSparseGP(before)
    SVI(before, guide, optax.adam(0.01), TraceMeanField_ELBO()).init(jax.random.PRNGKey(0), X, Y)
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as messages:
        guide._rest(X, Y)
    assert {"variance", "raw", "scale", "noise", "y"} <= set(messages)
    assert "f.u0" not in messages
