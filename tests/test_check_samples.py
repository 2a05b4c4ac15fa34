"""`check` of a sample of the rows of a large plate: it says so, and measures what all of them would."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

RNG = np.random.default_rng(0)
X = RNG.uniform(0.0, 1.0, (600, 1))
Y = np.sin(6 * X[:, 0]) + 0.3 * RNG.normal(size=600)


def model(X, y=None, *, N, local=False):
    f = ogp.gp("f", kernels.RBF(0.2), np.linspace(0, 1, 8)[:, None])
    with numpyro.plate("rows", N, subsample_size=len(X)):
        mean = f(X) + numpyro.sample("shift", dist.Normal(0.0, 0.1)) if local else f(X)
        numpyro.sample("y", likelihoods.Gaussian(mean, 0.3), obs=y)


@pytest.fixture(scope="module")
def result():
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.05), TraceMeanField_ELBO())
    return ogp.fit(svi, random.PRNGKey(0), (X, Y), batch_size=100, num_steps=300, progress_bar=False, N=600)


def test_a_sample_says_that_it_is_one_and_finds_the_same(result):
    held = {"held_out": (X[:50], Y[:50]), "num_samples": 100}
    whole, part = result.check(**held), result.check(num_rows=150, **held)
    assert whole.samples == {} and not str(whole).startswith("a sample")
    assert part.samples == {"rows": (150, 600)}
    assert str(part).startswith("a sample: 150 of the 600 rows of plate 'rows', each counted 4 times\n")
    assert part.nearby == {} and whole.nearby
    own, every = part.functions["f"], whole.functions["f"]
    assert own.residual.shape == (150,) and every.residual.shape == (600,)
    assert_allclose(own.sets[0].divergence, every.sets[0].divergence)
    assert_allclose(own.sets[0].explained, every.sets[0].explained, rtol=0.02)
    assert_allclose(part.held_out["y"].log_density, whole.held_out["y"].log_density)
    # Log weights of the sample are those of all rows, estimated: each row of it counts four times.
    f = result.posterior()["f"](X)
    each = -0.5 * (((Y - f.mean) ** 2 + f.variance) / 0.09 + np.log(2 * np.pi * 0.09))
    apart = 4 * each[::4].sum() - each.sum()
    assert abs(apart) > 10
    assert_allclose(np.median(part.khat.log_weights) - np.median(whole.khat.log_weights), apart, atol=2.0)


def test_what_a_sample_cannot_answer(result):
    with pytest.raises(ValueError, match=r"`nuts` needs all the data, but plate 'rows' holds 150 of its 600 rows"):
        result.check(num_rows=150, nuts=25)
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    options = {"batch_size": 100, "num_steps": 3, "progress_bar": False, "N": 600, "local": True}
    local = ogp.fit(svi, random.PRNGKey(0), (X, Y), **options)
    with pytest.raises(
        ValueError, match=r"`shift` has a value for each row of plate 'rows', which holds 100 of its 600"
    ):
        local.check(num_rows=100, losses=None)


def test_a_few_steps_say_nothing_of_convergence(result):
    few = result._replace(losses=result.losses[:5])
    assert few.check(num_rows=100).convergence is None
    assert result.check(num_rows=100).convergence is not None
    assert result.check(num_rows=100, losses=None).convergence is None
    with pytest.raises(ValueError, match=r"`losses` must have shape \(num_steps,\), at least 20 of them; got \(5,\)"):
        result.check(num_rows=100, losses=result.losses[:5])
