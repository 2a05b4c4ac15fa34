"""Likelihoods inside ``numpyro.contrib.control_flow.scan`` say what they say in a loop of Python."""

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
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.likelihoods.base import log_predictive
from tests.likelihood_cases import CASES, B

NUM_STEPS = 3
KEY = jax.random.PRNGKey(0)
Z = np.linspace(-2.0, 2.0, 4)[:, None]
X = np.random.default_rng(0).normal(size=(NUM_STEPS, B, 1))
NOISE = np.array([0.1, 0.5, 0.9])  # one for each step


def steps(likelihood, X, y):
    """The same site at each step, by scan."""

    def step(carry, row):
        x, y, noise = row
        return carry, numpyro.sample("y", likelihood(x, noise), obs=y)

    scan(step, 0.0, (X, y, NOISE[: len(X)]))


def loop(likelihood, X, y):
    for t in range(len(X)):
        numpyro.sample(f"y{t}", likelihood(X[t], NOISE[t]), obs=y[t])


def both(likelihood, y):
    y = jnp.asarray(y)
    scanned, trace = log_density(steps, (likelihood, X, y), {}, {})
    return scanned, log_density(loop, (likelihood, X, y), {}, {})[0], trace["y"]


def posterior(num_latents: int | None):
    """A function whose mean and variance differ from input to input."""
    y = np.random.default_rng(1).normal(size=(len(Z),) if num_latents is None else (len(Z), num_latents))
    return ogp.CollapsedGP(kernels.RBF(0.7), Z, Z, 0.3).posterior(jnp.asarray(y))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_likelihood(case):
    f = posterior(case.num_latents)
    scanned, looped, site = both(lambda x, noise: case(f(x)), np.stack([case.y] * NUM_STEPS))
    assert_allclose(scanned, looped, rtol=1e-9)
    assert site["fn"].batch_shape[0] == NUM_STEPS


WRAPPED = {
    "noise per step": lambda m, noise: likelihoods.Gaussian(m, noise),
    "noise per point": lambda m, noise: likelihoods.Gaussian(m, noise * jnp.arange(1.0, B + 1)),
    "masked": lambda m, noise: likelihoods.Gaussian(m, noise).mask(jnp.arange(B) != 1),
    "event": lambda m, noise: likelihoods.Gaussian(m, noise).to_event(1),
    "masked event": lambda m, noise: likelihoods.StudentT(m, 4.0, noise).to_event(1).mask(noise > 0.2),
    "transformed": lambda m, noise: dist.TransformedDistribution(
        likelihoods.Gaussian(m, noise), dist.transforms.AffineTransform(0.3, 1 + noise)
    ),
    "mixture": lambda m, noise: likelihoods.Mixture(likelihoods.Gaussian(m, noise), jnp.log(noise) * jnp.ones((B // 2, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_parameters_and_wrappers(name):
    f, y = posterior(None), np.random.default_rng(2).normal(size=(NUM_STEPS, B // 2 if name == "mixture" else B))
    scanned, looped, site = both(lambda x, noise: WRAPPED[name](f(x), noise), y)
    assert_allclose(scanned, looped, rtol=1e-12)
    assert site["fn"].shape() == y.shape


EXPANDED = {
    "expanded": lambda m, noise: likelihoods.Gaussian(m, noise).expand((2, B)),
    "masked, then expanded": lambda m, noise: likelihoods.Gaussian(m, noise).mask(jnp.arange(B) != 1).expand((2, B)),
    "event, then expanded": lambda m, noise: likelihoods.Gaussian(m, noise).to_event(1).expand((2,)),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_a_plate_around_the_points(name):
    f, y = posterior(None), np.random.default_rng(2).normal(size=(NUM_STEPS, 2, B))
    scanned, looped, site = both(lambda x, noise: EXPANDED[name](f(x), noise), y)
    assert_allclose(scanned, looped, rtol=1e-12)
    assert site["fn"].shape() == site["fn"].sample(KEY).shape == y.shape
    expected = [log_predictive(EXPANDED[name](f(X[t]), NOISE[t]), jnp.asarray(y[t])) for t in range(NUM_STEPS)]
    assert_allclose(log_predictive(site["fn"], y), np.stack(expected), rtol=1e-12)


def test_other_distributions_expand_as_before():
    def model(y):
        scan(
            lambda carry, y: (carry, numpyro.sample("y", dist.Normal(jnp.zeros(B), 1.0).expand((2, B)), obs=y)), 0.0, y
        )

    y = jnp.ones((NUM_STEPS, 2, B))
    assert_allclose(log_density(model, (y,), {}, {})[0], dist.Normal(0.0, 1.0).log_prob(y).sum(), rtol=1e-12)


@pytest.mark.parametrize(
    "of_gp, match",
    [
        (True, r"`f` is another function in each step of scan: declare f = gp\(\.\.\.\) before the loop"),
        (False, r"`g\.u1` has shape \(3, 4\), and \(4,\) in one step.*before the loop"),
    ],
    ids=["gp", "orthogonal"],
)
def test_a_function_in_each_step_is_refused(of_gp, match):
    def model(y):
        outside = None if of_gp else ogp.gp("f", kernels.RBF(0.7), Z)

        def step(carry, y):
            f = ogp.gp("f", kernels.RBF(0.7), Z) if of_gp else outside
            if not of_gp:
                ogp.orthogonal("g", [Z])
            return carry, numpyro.sample("y", likelihoods.Gaussian(f(X[0]), 0.3), obs=y)

        scan(step, 0.0, y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=match):
        svi.init(KEY, jnp.ones((NUM_STEPS, B)))


def test_a_scan_within_a_scan():
    f, y = posterior(None), np.random.default_rng(2).normal(size=(2, NUM_STEPS, B))
    likelihood = lambda x, noise: likelihoods.Gaussian(f(x), noise)  # noqa: E731

    def model(y):
        scan(lambda carry, y: (carry, steps(likelihood, X, y)), 0.0, y)

    got, trace = log_density(model, (jnp.asarray(y),), {}, {})
    assert_allclose(got, sum(log_density(loop, (likelihood, X, part), {}, {})[0] for part in y), rtol=1e-12)
    assert trace["y"]["fn"].batch_shape == y.shape


@pytest.mark.parametrize("residual", ["prior", "tight"])
@pytest.mark.parametrize("name", ["noise per step", "masked event"])
def test_bounds(name, residual):
    """With a guide, tightened or not, whose Gaussians have moved away from the prior."""
    y, losses = np.random.default_rng(2).normal(size=(NUM_STEPS, B)), []
    for model in (steps, loop):

        def with_gp(X, y, model=model):
            f = ogp.gp("f", 1.3 * kernels.RBF(0.7), [Z, Z[:2] + 0.1])
            model(lambda x, noise: WRAPPED[name](f(x), noise), X, y)

        svi = SVI(with_gp, ogp.AutoSparseGP(with_gp, residual=residual), optax.sgd(0.01), Trace_ELBO())
        state = svi.init(KEY, jnp.asarray(X), jnp.asarray(y))
        for _ in range(2):
            state, _ = svi.update(state, jnp.asarray(X), jnp.asarray(y))
        losses.append(svi.evaluate(state, jnp.asarray(X), jnp.asarray(y)))
    assert_allclose(losses[0], losses[1], rtol=1e-10)


def stacked(likelihood, y):
    def model():
        steps(likelihood, X, jnp.asarray(y))

    return handlers.trace(model).get_trace()["y"]["fn"]


def test_what_a_site_of_many_steps_can_do():
    f = posterior(None)
    parts = [likelihoods.Gaussian(f(X[t]), NOISE[t]) for t in range(NUM_STEPS)]
    y = np.random.default_rng(3).normal(size=(2, NUM_STEPS, B))
    fn = stacked(lambda x, noise: likelihoods.Gaussian(f(x), noise), y[0])
    for method in ("log_prob", "log_predictive"):
        expected = np.stack([getattr(part, method)(jnp.asarray(y[:, t])) for t, part in enumerate(parts)], 1)
        assert_allclose(getattr(fn, method)(jnp.asarray(y)), expected, rtol=1e-12)
    assert_allclose(fn.mean, [part.mean for part in parts], rtol=1e-12)
    assert_allclose(fn.variance, [part.variance for part in parts], rtol=1e-12)
    assert fn.support is dist.constraints.real
    draws = fn.sample(KEY, (20_000,))
    assert draws.shape == (20_000, NUM_STEPS, B)
    assert_allclose(draws.mean(0), fn.mean, atol=0.03)
    assert_allclose(draws.var(0), fn.variance, rtol=0.06)
    with pytest.raises(
        ValueError, match=r"y must have shape \(3, 4\) to match the likelihoods of 3 steps; got \(4, 3\)"
    ):
        fn.log_prob(y[0].T)


def state_space(counts, num_steps=12, move=lambda m: m.sample()):
    """A state that moves by a function of itself, seen through counts whose rate is another function of it."""
    f = ogp.gp("f", 0.2 * kernels.RBF(1.0), Z)
    g = ogp.gp("g", kernels.RBF(1.0), Z)
    exposure = numpyro.sample("exposure", dist.LogNormal(0.0, 0.5))

    def step(state, count):
        state = numpyro.sample("state", dist.Normal(state + move(f(state))[:, None], 0.3).to_event(2))
        numpyro.sample("count", likelihoods.Poisson(g(state), exposure), obs=count)
        return state, state

    scan(step, jnp.zeros((1, 1)), counts, length=num_steps)


COUNTS = jnp.asarray(np.random.default_rng(4).poisson(2.0, (12, 1)))


def test_a_state_space_model_is_fitted_and_predicts():
    guide = ogp.AutoSparseGP(state_space, hyper=AutoNormal)
    svi = SVI(state_space, guide, optax.adam(0.03), Trace_ELBO(num_particles=4))
    fitted = svi.run(KEY, 300, COUNTS, progress_bar=False)
    assert fitted.losses[-50:].mean() < fitted.losses[:10].mean() - 3
    found = ogp.to_arviz(state_space, guide, fitted.params, COUNTS, num_samples=6)
    assert found.posterior["state"].shape == (1, 6, 12, 1, 1)
    assert found.log_likelihood["count"].shape == found.posterior_predictive["count"].shape == (1, 6, 12, 1)
    assert np.isfinite(found.log_likelihood["count"]).all() and np.isfinite(found.sample_stats["lp"]).all()
    with pytest.raises(
        ValueError, match=r"The draws of `state` have shape \(12, 1, 1\); the model's site has shape \(14, 1, 1\)"
    ):
        ogp.to_arviz(partial(state_space, num_steps=14), guide, fitted.params, None, num_samples=6)
    drawn = Predictive(state_space, guide=guide, params=fitted.params, num_samples=7)(KEY, None)
    assert drawn["count"].shape == (7, 12, 1) and drawn["count"].dtype == COUNTS.dtype


def test_a_state_space_model_under_nuts():
    """What moves the state is a value there, not a draw, so that the potential is smooth."""
    mcmc = MCMC(NUTS(state_space), num_warmup=50, num_samples=20, progress_bar=False)
    mcmc.run(KEY, COUNTS, move=lambda m: m.mean)
    samples = mcmc.get_samples()
    assert samples["state"].shape == (20, 12, 1, 1) and np.isfinite(samples["exposure"]).all()
    assert np.ptp(np.asarray(samples["exposure"])) > 0.1
