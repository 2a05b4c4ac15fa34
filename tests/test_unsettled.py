"""How far q is from its optimum where natural steps are noisy: beside the difference of two bounds, and fits that end off it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.replay import look
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.diagnostics.unsettled import Unsettled, advice_on_unsettled, unsettled_of

KEY = jax.random.PRNGKey(0)
Z = np.linspace(0.0, 10.0, 9)[:, None]
NODES = 0.5 * (np.arange(40) + 0.5)[:, None] / 2
Y = np.sin(NODES[:, 0]).reshape(10, 4).mean(1) + 0.1 * np.cos(np.arange(10.0))


def exact():
    f = ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z))
    with numpyro.plate("bins", 10):
        numpyro.sample(
            "y", likelihoods.Gaussian(f(ogp.Average(jnp.asarray(NODES.reshape(10, 4, 1)))), 0.1), obs=jnp.asarray(Y)
        )


def drawn():
    f = ogp.gp("f", kernels.RBF(1.5), jnp.asarray(Z))
    with numpyro.plate("bins", 10):
        numpyro.sample("y", dist.Normal(f(jnp.asarray(NODES)).sample().reshape(10, 4).mean(1), 0.1), obs=jnp.asarray(Y))


def fitted(model, rate, steps, **options):
    guide = ogp.AutoSparseGP(model, natural=True, **options)
    svi = SVI(model, guide, ogp.natural_gradient(optax.adam(0.01), rate), TraceMeanField_ELBO())
    return svi, guide, svi.run(KEY, steps, progress_bar=False).params


def measured(model, guide, params):
    arguments = Arguments((), {})
    layout = look(model, arguments, GuideDraws(guide, params, arguments, KEY), fitted=True, whole=False)
    return unsettled_of(Subject(model, guide, params, arguments, layout, KEY))


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_mean_that_is_off_its_optimum(covariance):
    """In the mean the bound is a parabola, and at the best covariance a step of length one ends at its top."""
    rate, steps = (1.0, 2) if covariance == "full" else (0.1, 600)
    svi, guide, params = fitted(exact, rate, steps, covariance=covariance)
    assert_allclose(measured(exact, guide, params)["f"].gain, 0.0, atol=1e-3)
    if covariance == "diagonal":
        return
    moved = params | {"f.u0_loc": params["f.u0_loc"] + 0.3 * jnp.cos(jnp.arange(9.0))}
    loss, best = (svi.loss.loss(KEY, p, exact, guide) for p in (moved, params))
    found = measured(exact, guide, moved)["f"]
    assert_allclose(found.gain, loss - best, rtol=1e-4)
    assert_allclose(found.error, 0.0, atol=1e-6)


def test_natural_steps_that_follow_the_noise():
    """Under a constant rate q keeps moving around its optimum, which is that of the same model without draws."""
    _, guide, params = fitted(drawn, 0.1, 200)
    _, _, best = fitted(exact, 1.0, 2)
    noisy, settled = (measured(drawn, guide, p) for p in (params, best))
    assert noisy["f"].gain > 5 > 10 * abs(settled["f"].gain)
    words = r"q of f is not at its optimum: its gradient promises .* nats\. Natural steps were too few, .*cosine_decay_schedule"
    assert re.search(words, *advice_on_unsettled(noisy))
    assert not [*advice_on_unsettled(settled)]


def test_what_is_noise_is_no_distance():
    assert Unsettled(3.0, 1.0, 10).matters
    assert not Unsettled(3.0, 2.0, 10).matters  # not clear
    assert not Unsettled(0.5, 0.1, 10).matters  # a twentieth of a nat for each variable


def test_other_guides_are_not_measured():
    guide = ogp.AutoSparseGP(exact)
    params = SVI(exact, guide, optax.adam(0.01), TraceMeanField_ELBO()).run(KEY, 2, progress_bar=False).params
    assert measured(exact, guide, params) == {}
    auto = AutoNormal(exact)
    params = SVI(exact, auto, optax.adam(0.01), TraceMeanField_ELBO()).run(KEY, 2, progress_bar=False).params
    assert measured(exact, auto, params) == {}
