"""Random effects, the scales that shrink them, and a GP: defaults that do not mislead, beside NUTS; and what `check` says."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose, assert_array_equal
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

import numpyro_orthgp as ogp
from benchmarks import hierarchical
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.hierarchy import Starts, advice_on_starts, starts_of
from numpyro_orthgp.guides.hyper import PointsAndEffects

RNG = np.random.default_rng(0)
GROUP = jnp.asarray(np.arange(60) % 6)
X = jnp.asarray(RNG.uniform(0, 3, (60, 1)))
Y = jnp.asarray(np.array([-1.0, -0.4, 0.0, 0.2, 0.5, 0.9])[GROUP] + 0.2 * RNG.normal(size=60))


def many(X, group, y=None):
    """One of each kind of site."""
    level = numpyro.sample("level", dist.Normal(-6.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    learned = numpyro.param("learned", 0.5)
    fixed = numpyro.sample("fixed", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
    two = numpyro.sample("two", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    centred = numpyro.sample("centred", dist.Normal(level, spread).expand([6]).to_event(1))
    of_param = numpyro.sample("of_param", dist.Normal(0.0, learned).expand([6]).to_event(1))
    factors = numpyro.sample("factors", dist.LogNormal(0.0, spread).expand([6]).to_event(1))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        scales = numpyro.sample("scales", dist.HalfNormal(1.0))
        noise = numpyro.sample("noise", dist.LogNormal(0.0, spread))
    f = ogp.gp("f", kernels.RBF(1.0), X[:5])
    mean = f(X) + (fixed + centred + of_param + factors + effect * scales)[group] + two.sum() + 6
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(mean, noise[group]), obs=y)


def fitted(model, hyper=PointsAndEffects, steps=30, args=(X, GROUP, Y), **options):
    guide = ogp.AutoSparseGP(model, hyper=hyper, **options)
    svi = SVI(model, guide, optax.adam(0.03), TraceMeanField_ELBO())
    return guide, ogp.fit(svi, random.PRNGKey(0), args, num_steps=steps, progress_bar=False)


def test_which_sites_are_effects():
    guide, result = fitted(many)
    gaussian = {"centred", "of_param", "factors", "effect", "noise"}
    assert set(guide._hyper.effects) == gaussian
    points = {"level", "spread", "fixed", "two", "scales"}
    assert {n.removesuffix("_auto_scale") for n in result.params if n.endswith("_auto_scale")} == gaussian
    assert {n.removesuffix("_auto_loc") for n in result.params if n.endswith("_auto_loc")} == gaussian | points
    assert np.isfinite(result.losses).all() and result.losses[-1] < result.losses[0]


def between(X, group, y):
    """Latent values between f and y, each with a prior that f gives, outside of plates."""
    f = ogp.gp("f", kernels.RBF(1.0), X[:5])
    v = f(X[:13]).sample()
    values = numpyro.sample("values", dist.Normal(v[:8], 0.3).to_event(1))
    rates = numpyro.sample("rates", dist.LogNormal(v[8:12], 0.3).to_event(1))
    single = numpyro.sample("single", dist.Normal(v[12], 0.3))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.1))
    z = jnp.concatenate([values, jnp.log(rates), single[None]])
    numpyro.sample("y", dist.Normal(z, noise).to_event(1), obs=y[:13])


def test_latent_values_whose_prior_is_a_function_are_effects():
    guide = ogp.AutoSparseGP(between)
    SVI(between, guide, optax.adam(0.03), TraceMeanField_ELBO()).init(random.PRNGKey(0), X, GROUP, Y)
    assert set(guide._hyper.effects) == {"values", "rates", "single"}


def test_the_loss_of_latent_values_is_a_bound():
    """They were points, so the loss was 7.2 where the negative log evidence is 8.9, and `check` did not name rates."""
    _, result = fitted(between, steps=600)
    K = np.exp(-((X[:13] - X[:13].T) ** 2) / 2)
    noise = result.params["noise_auto_loc"]
    evidence = dist.MultivariateNormal(jnp.zeros(13), K + (0.3**2 + noise**2) * np.eye(13)).log_prob(Y[:13])
    best = -evidence - dist.LogNormal(-1.0, 0.1).log_prob(noise)
    assert best < np.mean(result.losses[-200:]) < best + 10
    _, result = fitted(between, AutoDelta)
    assert {p.name: p.known for p in result.check(num_samples=25).points} == {"values": True, "rates": True}


def test_draws_medians_and_densities_are_those_of_the_gaussians():
    guide, result = fitted(many)
    draws = guide._hyper.sample_posterior(random.PRNGKey(1), result.params, sample_shape=(4000,))
    ours = guide.sample_posterior(random.PRNGKey(2), result.params, X, GROUP, Y, sample_shape=(2000,))
    medians = guide.median(result.params)
    for name, back in (("effect", lambda x: x), ("noise", jnp.log), ("factors", jnp.log)):
        loc, scale = (np.asarray(result.params[f"{name}_auto_{part}"]) for part in ("loc", "scale"))
        assert_allclose(back(medians[name]), loc, atol=1e-12)
        for found in (draws[name], ours[name]):
            assert found.shape[1:] == (6,)
            assert_allclose(back(found).mean(0), loc, atol=6 * scale.max() / np.sqrt(2000))
            assert_allclose(back(found).std(0), scale, rtol=0.12)
    assert_array_equal(ours["level"], np.full(2000, result.params["level_auto_loc"]))
    # NumPyro's AutoNormal says what the densities of the Gaussians are.
    normal = AutoNormal(handlers.block(many, hide=["f.u0", "y"]))
    traces = []
    for own in (guide._hyper, normal):
        with handlers.block(), handlers.seed(rng_seed=0):
            own(X, GROUP, Y)
        known = result.params | {f"{n}_auto_scale": 0.1 for n in ("level", "spread")}
        value = {"factors": jnp.arange(1.0, 7.0)}
        model = handlers.substitute(handlers.seed(own, 0), known | value)
        traces.append(handlers.trace(model).get_trace(X, GROUP, Y)["factors"])
    assert_allclose(*[t["fn"].log_prob(t["value"]) for t in traces])


@pytest.mark.parametrize("hyper", [AutoNormal, AutoMultivariateNormal])
def test_guides_that_start_at_random_start_at_medians(hyper):
    def starts(hyper):
        guide = ogp.AutoSparseGP(many, hyper=hyper)
        with handlers.seed(rng_seed=0):
            guide(X, GROUP, Y)
        return float(guide._hyper.median({k: v for k, v in _params(guide).items()})["level"])

    def _params(guide):
        svi = SVI(many, guide, optax.adam(0.1), TraceMeanField_ELBO())
        return svi.get_params(svi.init(random.PRNGKey(0), X, GROUP, Y))

    assert abs(starts(hyper) + 6) < 1.5
    assert abs(starts(lambda model: hyper(model))) < 2  # what the user makes is left alone


def test_points_of_a_model_without_effects_are_autodelta():
    def plain(X, group, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        lengthscale = numpyro.sample("lengthscale", dist.InverseGamma(3.0, 3.0).expand([1]).to_event(1))
        f = ogp.gp("f", scale**2 * kernels.RBF(lengthscale), X[:5])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.2), obs=y)

    own, autodelta = (fitted(plain, hyper)[1] for hyper in (PointsAndEffects, AutoDelta))
    assert own.params.keys() == autodelta.params.keys()
    jax.tree.map(assert_array_equal, own.params, autodelta.params)


def test_check_names_effects_that_are_points():
    _, result = fitted(many, AutoDelta)
    report = result.check(num_samples=25)
    assert {p.name: p.known for p in report.points} == {
        "fixed": False, "centred": True, "of_param": True, "factors": True, "effect": True, "noise": True,
    }  # fmt: skip
    advice = "\n".join(report.advice)
    assert (
        "The 6 random effects effect are point estimates in this guide, so their scale is estimated too large, or zero"
        in advice
    )
    assert "fixed is a vector of 6 point estimates. If they are random effects" in advice and "nuts=200" in advice
    _, result = fitted(many)
    assert [p.name for p in result.check(num_samples=25).points] == ["fixed"]
    _, result = fitted(many, AutoNormal)
    assert result.check(num_samples=25).points == ()


def of_each_row(X, group, y):
    """Inputs with errors, and scales of a Student's t, both with fixed priors."""
    x = numpyro.sample("x", dist.Normal(X, 0.1).to_event(2))
    factors = numpyro.sample("factors", dist.Gamma(2.0, 2.0).expand([len(X)]).to_event(1))
    f = ogp.gp("f", kernels.RBF(1.0), X[:5])
    with numpyro.plate("data", len(X)):
        shift = numpyro.sample("shift", dist.Uniform(-0.1, 0.1))
        numpyro.sample("y", likelihoods.Gaussian(f(x) + shift, 0.3 / jnp.sqrt(factors)), obs=y)


def test_check_names_points_of_each_row():
    """It named those that are vectors of real numbers outside of plates alone."""
    _, result = fitted(of_each_row)
    report = result.check(num_samples=25)
    assert {p.name: p.of_rows for p in report.points} == {"x": True, "factors": True, "shift": True}
    assert "x has a point estimate for each row, 60 in all" in "\n".join(report.advice)
    _, result = fitted(of_each_row, AutoNormal)
    assert result.check(num_samples=25).points == ()


def test_losses_of_other_starts():
    def losses(end, noise=0.0):
        return end + np.exp(-np.arange(300) / 10) + noise * RNG.normal(size=300)

    same, lower, higher = (starts_of(losses(20.0), [losses(20.0), losses(end)]) for end in (20.3, 15.0, 24.0))
    assert not same.differ and list(advice_on_starts(same)) == []
    assert [*advice_on_starts(lower)] == ["Another start ends 5 nats lower (15): use that fit."]
    assert "up to 4 nats higher: there are several optima" in next(advice_on_starts(higher))
    assert not starts_of(losses(20.0, 10.0), [losses(22.0, 10.0)]).differ  # noise says nothing
    assert "ends at a loss of 20, others at 20, 15" in str(lower)
    assert Starts(1.0, (np.nan,), 0.1).differ
    for wrong in ([], 3.0):
        with pytest.raises(ValueError, match="`starts` must be a list of losses"):
            starts_of(losses(1.0), wrong)
    with pytest.raises(ValueError, match="beside `losses` of this one"):
        starts_of(None, [losses(1.0)])


def test_check_says_where_other_starts_end():
    _, result = fitted(many, steps=60)
    report = result.check(num_samples=25, starts=[result.losses - 10])
    assert "starts: this one ends at" in str(report) and "Another start ends 10 nats lower" in report.advice[1]


# By NUTS, 500 draws after 500 of each of two chains: python benchmarks/hierarchical.py --data nc_sids.npz --nuts 500
NUTS = {
    "counties": {"level": (-6.16, 0.26), "slope": (0.46, 0.11), "spread": (0.22, 0.11)},
    "intercepts": {"level": (1.99, 0.52), "spread": (0.82, 0.18), "noise": (0.43, 0.03), "scale": (0.75, 0.28)},
    "subjects": {"level": (0.23, 0.68), "spread": (0.43, 0.22), "scale": (1.07, 0.38)},
    "slopes": {"level": (-0.88, 0.46), "slope": (0.71, 0.09), "spread": (0.51, 0.09), "spread_slope": (0.37, 0.07)},
    "crossed": {
        "level": (1.32, 0.47),
        "spread_shop": (0.61, 0.15),
        "spread_item": (0.60, 0.17),
        "concentration": (4.54, 0.97),
    },
}
SHARED = Path(os.environ.get("NUMPYRO_ORTHGP_SHARED", "../shared")) / "data" / "nc_sids.npz"


@functools.cache
def problems():
    return hierarchical.problems(SHARED if SHARED.exists() else None)


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["default", "normal"])
@pytest.mark.parametrize("name", NUTS)
def test_beside_nuts(name, guide):
    """Within two standard deviations of the posterior, every one of them; those of points and of random starts are not."""
    if name not in problems():
        pytest.skip(f"{SHARED} is not there")
    found = hierarchical.fit(*problems()[name], 3000, **hierarchical.GUIDES[guide])[1]
    for site, (loc, scale) in NUTS[name].items():
        assert abs(found[site][0] - loc) < 2 * scale, (site, found[site])
