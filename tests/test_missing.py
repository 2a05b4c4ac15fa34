"""Outputs hidden by `obs_mask` weigh nothing under AutoSparseGP: the bound and its gradient are those with a mask."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

N = 24
KEY = jax.random.PRNGKey(0)
X = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (N, 1)))
Z = jnp.linspace(-1, 1, 3)[:, None]
Y = jnp.sin(4 * X) + jnp.array([0.0, 1.0])
SEEN = jnp.asarray(np.random.default_rng(1).random((N, 2)) < 0.6)
positive = dist.constraints.positive


def site(likelihood, y, seen, missing):
    """One site with hidden outputs, by a mask or by `obs_mask`."""
    if missing:
        return numpyro.sample("y", likelihood, obs=y, obs_mask=seen)
    return numpyro.sample("y", likelihood.mask(seen), obs=y)


def with_params(missing):
    noise = numpyro.param("noise", 1.0, constraint=positive)
    kernel = numpyro.param("variance", 1.0, constraint=positive) * kernels.Matern32(0.7)
    f = ogp.gp("f", kernel, numpyro.param("Z", Z))
    with numpyro.plate("points", N):
        site(likelihoods.Gaussian(f(X), noise), Y[:, 0], SEEN[:, 0], missing)


def rows(missing):
    """A plate picks rows; what is in it weighs N / 8."""
    noise = numpyro.param("noise", 1.0, constraint=positive)
    f = ogp.gp("f", kernels.RBF(0.7), Z)
    with numpyro.plate("points", N, subsample_size=8) as index:
        site(likelihoods.Gaussian(f(X[index]), noise), Y[index, 0], SEEN[index, 0], missing)


def two_plates(missing):
    level = numpyro.param("level", jnp.zeros(2))
    f = ogp.gp("f", kernels.RBF(0.7), Z, num_latents=2)
    with numpyro.plate("points", N, subsample_size=8, dim=-2) as index, numpyro.plate("outputs", 2, dim=-1):
        site(likelihoods.StudentT(f(X[index]) + level, 4.0, 0.3), Y[index], SEEN[index], missing)


def sampled(missing):
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = ogp.gp("f", kernels.RBF(numpyro.param("lengthscale", 0.4)), Z)
    with handlers.scale(scale=3.0), numpyro.plate("points", N):
        site(likelihoods.Gaussian(f(X), noise), Y[:, 0], SEEN[:, 0], missing)


def latent(missing):
    """Rows of latent inputs, in the plate of the outputs."""
    f = ogp.gp("f", kernels.RBF(numpyro.param("lengthscale", 0.4)), Z, num_latents=2)
    with numpyro.plate("points", N, subsample_size=8) as index:
        inputs = ogp.latent_inputs("X", N, 1)
        site(likelihoods.Gaussian(f(inputs), 0.3).to_event(1), Y[index], SEEN[index, 0], missing)


def prepared(model, missing, **options):
    """The model with its guide, and parameters away from where they start."""
    model = partial(model, missing)
    guide = ogp.AutoSparseGP(model, **options)
    svi = SVI(model, guide, optax.sgd(0.1), Trace_ELBO())
    return model, guide, {name: 0.7 * value for name, value in svi.get_params(svi.init(KEY)).items()}


def loss_and_gradient(elbo, model, guide, params):
    """With the same rows each time."""
    rows = {} if model.func in (with_params, sampled) else {"points": jnp.arange(0, N, 3)}
    fixed = handlers.substitute(model, data=rows), handlers.substitute(guide, data=rows)
    return jax.jit(jax.value_and_grad(lambda p: elbo.loss(KEY, p, *fixed)))(params)


@pytest.mark.parametrize("model", [with_params, rows, two_plates, sampled, latent], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("elbo", "residual"), [(TraceMeanField_ELBO(), "prior"), (Trace_ELBO(), "tight")], ids=["prior", "tight"]
)
def test_hidden_outputs_weigh_nothing(model, elbo, residual):
    (expected, gradient), (loss, g) = (
        loss_and_gradient(elbo, *prepared(model, missing, residual=residual)) for missing in (False, True)
    )
    assert_allclose(loss, expected, rtol=1e-9)
    assert g.keys() == gradient.keys()
    for name in gradient:
        assert_allclose(g[name], gradient[name], rtol=1e-7, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("model", [rows, two_plates, latent], ids=lambda m: m.__name__)
def test_the_guide_picks_the_rows_of_the_model(model):
    model, guide, params = prepared(model, missing=True)
    in_guide = handlers.trace(handlers.seed(handlers.substitute(guide, data=params), 1)).get_trace()
    known = handlers.replay(handlers.seed(handlers.substitute(model, data=params), 2), trace=in_guide)
    in_model = handlers.trace(known).get_trace()
    assert_allclose(in_model["points"]["value"], in_guide["points"]["value"])
    p, q = (
        trace["y_unobserved"]["scale"] * trace["y_unobserved"]["fn"].log_prob(trace["y_unobserved"]["value"])
        for trace in (in_model, in_guide)
    )
    assert_allclose(p, q, rtol=1e-10)
    assert np.abs(p).max() > 0.1


def test_hidden_outputs_are_drawn_as_the_parameters_say():
    model, guide, params = prepared(with_params, missing=True)
    params |= {"noise": 0.01, "f.u0_scale_tril": 1e-6 * jnp.eye(3), "variance": 1e-8, "f.u0_loc": jnp.ones(3)}
    hidden = ~SEEN[:, 0]
    drawn = guide.sample_posterior(KEY, params, sample_shape=(400,))["y_unobserved"][:, hidden]
    predicted = Predictive(model, guide=guide, params=params, num_samples=400)(KEY)["y"][:, hidden]
    for values in (drawn, predicted):
        assert_allclose(values.std(0), 0.01, rtol=0.2)


def test_mutable_state_is_written_once():
    def model():
        state = numpyro.primitives.mutable("state", {"value": jnp.zeros(())})
        f = ogp.gp("f", kernels.RBF(0.7), Z)
        with numpyro.plate("points", N):
            site(likelihoods.Gaussian(f(X) + 0.1 * state["value"], 0.3), Y[:, 0], SEEN[:, 0], missing=True)
        state["value"] += 1.0

    svi = SVI(model, ogp.AutoSparseGP(model), optax.sgd(0.01), Trace_ELBO())
    state = svi.init(KEY)
    before = state.mutable_state["state"]["value"]
    for _ in range(3):
        state, _ = svi.update(state)
    assert float(state.mutable_state["state"]["value"] - before) == 3


def test_nodes_of_hidden_outputs_are_drawn_anew_at_each_call():
    """Where densities are averages over draws, errors of guide and model then cancel on average."""

    def classes():
        f = ogp.gp("f", kernels.RBF(0.7), Z, num_latents=4)
        with numpyro.plate("points", N):
            numpyro.sample("y", likelihoods.Categorical(f(X)), obs=jnp.arange(N) % 4, obs_mask=SEEN[:, 0])

    guide = ogp.AutoSparseGP(classes)
    sites = [handlers.trace(handlers.seed(guide, k)).get_trace()["y_unobserved"] for k in (0, 0, 1)]
    keys = [jax.random.key_data(site["fn"].base_dist.rng_key) for site in sites]
    assert (keys[0] == keys[1]).all() and (keys[0] != keys[2]).any()


def test_predictions_need_no_mask():
    """A guide that first saw a model with a mask is called without one, at other inputs."""

    def masked(X, y=None, seen=None):
        f = ogp.gp("f", kernels.RBF(0.7), Z)
        with numpyro.plate("points", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y, obs_mask=seen)

    svi = SVI(masked, ogp.AutoSparseGP(masked), optax.sgd(0.1), Trace_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y[:, 0], SEEN[:, 0]))
    predicted = Predictive(masked, guide=svi.guide, params=params, num_samples=5)(KEY, X[:7])["y"]
    assert predicted.shape == (5, 7) and np.isfinite(predicted).all()
    assert ogp.posterior(masked, svi.guide, params, X[:7])["f"](X).mean.shape == (N,)
