"""One model under every AutoGuide of NumPyro and under reparametrization: gp's sites are ordinary latent sites."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO, autoguide, log_likelihood
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

Z, O = jnp.linspace(-2, 2, 4)[:, None], jnp.linspace(-1.6, 1.7, 3)[:, None]


def model(X, y=None):
    """Counts with a hierarchical constant, two orthogonal sets, a prior on the lengthscale."""
    log_lengthscale = numpyro.sample("log_lengthscale", dist.Normal(0.0, 0.5))
    level = numpyro.sample(
        "level", dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(1.0, 0.5))
    )
    f = ogp.gp("f", kernels.Matern52(jnp.exp(log_lengthscale)), [Z, O])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Poisson(f(X) + level), obs=y)


@pytest.fixture(scope="module")
def counts():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (40, 1))
    return jnp.asarray(X), jnp.asarray(rng.poisson(np.exp(1 + np.sin(2 * X[:, 0]))))


def train(guide, *args, model=model, steps=100, elbo=None):
    svi = SVI(model, guide, optax.adam(0.03), elbo or Trace_ELBO())
    # Not inside jit: some of NumPyro's guides keep what they make at `init`.
    return svi.run(jax.random.PRNGKey(0), steps, *args, progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "AutoDiagonalNormal",
        "AutoLowRankMultivariateNormal",
        "AutoIAFNormal",
        "AutoBNAFNormal",
        "AutoBatchedMultivariateNormal",
        "AutoLaplaceApproximation",
        "AutoDAIS",
    ],
)
def test_every_autoguide(counts, name):
    options = {"batch_ndim": 0} if "Batched" in name else {}
    guide = getattr(autoguide, name)(model, **options)
    result = train(guide, *counts)
    losses = np.asarray(result.losses)
    assert np.isfinite(losses).all() and losses[-30:].mean() < losses[:10].mean() - 5
    draws = guide.sample_posterior(jax.random.PRNGKey(1), result.params, sample_shape=(20,))
    assert draws["f.u0"].shape == (20, 4) and draws["f.u1"].shape == (20, 3)
    predicted = Predictive(model, draws)(jax.random.PRNGKey(2), counts[0])["y"]
    assert predicted.shape == (20, 40)
    scores = log_likelihood(model, draws, *counts)["y"]
    assert scores.shape == (20, 40) and np.isfinite(scores).all()


@pytest.mark.parametrize("ours", [True, False], ids=["AutoSparseGP", "AutoNormal"])
def test_reparametrized_hyperparameters(counts, ours):
    config = {"log_lengthscale": LocScaleReparam(0.0), "level": TransformReparam()}
    changed = handlers.reparam(model, config=config)
    guide = ogp.AutoSparseGP(changed, hyper=autoguide.AutoNormal) if ours else autoguide.AutoNormal(changed)
    result = train(guide, *counts, model=changed, elbo=TraceMeanField_ELBO())
    assert {"log_lengthscale_decentered_auto_loc", "level_base_auto_loc"} <= set(result.params)
    assert np.isfinite(result.losses).all() and result.losses[-30:].mean() < result.losses[:10].mean() - 5
    if ours:
        f = ogp.posterior(changed, guide, result.params, *counts)["f"]
        assert f(counts[0]).mean.shape == (40,)


def test_predictive_log_likelihood_is_that_of_the_conditional(counts):
    """With values for u, `log_likelihood` is E_p(f|u) log p(y | f), at each draw and point."""
    X, y = counts
    draws = {
        "f.u0": jnp.zeros((2, 4)),
        "f.u1": jnp.zeros((2, 3)),
        "level": jnp.array([0.5, 1.0]),
        "log_lengthscale": jnp.zeros(2),
    }
    scores = log_likelihood(model, draws, X, y)["y"]
    A = handlers.substitute(handlers.seed(model, 0), {k: v[1] for k, v in draws.items()})
    m = handlers.trace(A).get_trace(X, y)["y"]["fn"].marginals
    rate = jnp.exp(m.mean + m.variance / 2)
    expected = y * m.mean - rate - jax.scipy.special.gammaln(y + 1.0)
    np.testing.assert_allclose(scores[1], expected, rtol=1e-10)


def test_in_a_list_of_guides(counts):
    """Parts of a model under guides of their own, as NumPyro has it."""
    parts = autoguide.AutoGuideList(model)
    parts.append(ogp.AutoSparseGP(handlers.block(model, hide=["log_lengthscale", "level"])))
    parts.append(autoguide.AutoNormal(handlers.block(model, expose=["log_lengthscale", "level"])))
    result = train(parts, *counts)
    assert {name.removesuffix("_0") for name in result.params} >= {"f.u0_loc", "f.u1_scale_tril", "level_auto_loc"}
    assert result.losses[-30:].mean() < result.losses[:10].mean() - 5


def test_hyperparameters_in_a_plate_before_other_sites(counts):
    """The guide's sites come in the model's order, or TraceMeanField_ELBO would warn."""

    def in_plate(X, y):
        with numpyro.plate("columns", 1):
            log_lengthscale = numpyro.sample("log_lengthscale", dist.Normal(0.0, 0.5))
        f = ogp.gp("f", kernels.Matern52(jnp.exp(log_lengthscale)), Z)
        level = numpyro.sample("level", dist.Normal(1.0, 1.0))
        g = ogp.gp("g", kernels.Matern52(2.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Poisson(f(X) + level), obs=y)
            numpyro.sample("z", likelihoods.Poisson(g(X)), obs=y)

    guide = ogp.AutoSparseGP(in_plate, hyper=autoguide.AutoNormal)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(guide, *counts, model=in_plate, steps=2, elbo=TraceMeanField_ELBO())
    sites = handlers.trace(handlers.seed(guide, 0)).get_trace(*counts)
    ordered = [name for name in sites if name in ("log_lengthscale", "f.u0", "level", "g.u0")]
    assert ordered == ["log_lengthscale", "f.u0", "level", "g.u0"]


def test_medians_of_a_guide_that_has_not_seen_its_model(counts):
    guide = ogp.AutoSparseGP(model)
    with pytest.raises(RuntimeError, match=r"has not seen its model yet.*svi\.init"):
        guide.median({"f.u0_loc": jnp.zeros(4)})
    params = train(guide, *counts, steps=2).params
    assert set(guide.median(params)) == {"log_lengthscale", "level", "f.u0", "f.u1"}
