"""Discrete sites that NumPyro enumerates: every array that may depend on one, beside a sum over its values by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS, SVI, TraceEnum_ELBO, TraceMeanField_ELBO, autoguide
from numpyro.primitives import Messenger
from scipy.special import logsumexp

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles
from tests.likelihood_cases import CASES
from tests.problems import kernel_oracle, oracle_sets, q_params, random_q

K, B = 3, 4
FACTORS = np.array([0.8, 1.0, 1.04])
WEIGHTS = np.array([0.2, 0.5, 0.3])
KERNEL = dict(variance=1.3, lengthscale=0.9)


class Enumerating(Messenger):
    """What NumPyro's ``enum`` is to the package: a handler that has this attribute. Needs no funsor."""

    first_available_dim = -2

    def __init__(self) -> None:
        super().__init__()


def marginals(rng, num_latents=None, **more):
    shape = (B,) if num_latents is None else (B, num_latents)
    parts = rng.normal(size=shape), rng.uniform(0.1, 0.6, shape), rng.uniform(0.1, 0.6, shape)
    return ogp.Marginals(*map(jnp.asarray, parts), **more)


# Each is one program: operation by operation there would be hundreds.
OF_LIKELIHOODS = [
    jax.jit(moment)
    for moment in (
        lambda d, y: d.log_prob(y),
        lambda d, y: d.log_predictive(y),
        lambda d, y: d.mean,
        lambda d, y: d.variance,
    )
]


def compare(enumerated, each, y):
    """An enumerated likelihood and those of each value of the site."""
    y = jnp.asarray(y)
    assert enumerated.batch_shape == (K, *each[0].batch_shape)
    compared = 0
    for moment in OF_LIKELIHOODS[:2] if isinstance(each[0], likelihoods.Categorical) else OF_LIKELIHOODS:
        try:
            expected = np.stack([moment(one, y) for one in each])
        except (NotImplementedError, ValueError):
            continue
        got = np.broadcast_to(moment(enumerated, y), expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-10)
        compared += 1
    assert compared


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters_and_functions_of_every_likelihood(case, rng):
    m = marginals(rng, case.num_latents, residual_scale=jnp.asarray(0.7))
    offset = np.array([0.0, 0.3, -0.4])
    tail = (1,) * len(m.shape)
    for name, value in case.params.items():
        table = np.stack([np.asarray(value) * factor for factor in FACTORS])
        rank = 1 if case.mixes else len(m.shape)
        own = table.reshape(K, *(1,) * (rank - table[0].ndim), *table.shape[1:])
        if name == "cutpoints":
            own = table[:, None]
        with Enumerating():
            enumerated = case(m, **{name: own})
        compare(enumerated, [case(m, **{name: table[k]}) for k in range(K)], case.y)
    with Enumerating():
        changed = case(m * (1 + offset.reshape(K, *tail)) + offset.reshape(K, *tail))
    compare(changed, [case(m * (1 + o) + o) for o in offset], case.y)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_picked_functions(mixed, tight, rng):
    v = jnp.asarray([0.6, 1.5]) if tight else None
    m = marginals(rng, 2, residual_scale=v)
    m = m @ jnp.asarray(rng.normal(size=(2, 2))) if mixed else m
    z = np.array([0, 1, 1])  # of each value of the site
    y = jnp.asarray(rng.normal(size=B))
    with Enumerating():
        picked = likelihoods.StudentT(m.pick(z[:, None]), 5.0, 0.4)
    compare(picked, [likelihoods.StudentT(m[..., int(k)], 5.0, 0.4) for k in z], y)
    rows = np.array([1, 0, 0, 1])
    of_rows = likelihoods.Gaussian(m.pick(rows), 0.3)
    columns = [likelihoods.Gaussian(m[..., p], 0.3).log_prob(y) for p in (0, 1)]
    np.testing.assert_allclose(of_rows.log_prob(y), np.where(rows == 0, *columns), rtol=1e-12)
    draws = m.pick(rows).sample(jax.random.PRNGKey(0), (40_000,))
    np.testing.assert_allclose(draws.mean(0), m.pick(rows).mean, atol=0.03)
    np.testing.assert_allclose(draws.var(0), m.pick(rows).variance, rtol=0.05)


def test_weights_that_depend_on_the_site(rng):
    m, W = marginals(rng, 2), rng.normal(size=(K, 2, 3))
    with Enumerating():
        mixed = likelihoods.Gaussian(m @ jnp.asarray(W)[:, None], 0.5)
        twice = likelihoods.Gaussian((m @ jnp.asarray(W)[:, None])[..., [2, 0]] * 2.0 + 1.0, 0.5)
    y = jnp.asarray(rng.normal(size=(B, 3)))
    compare(mixed, [likelihoods.Gaussian(m @ jnp.asarray(w), 0.5) for w in W], y)
    compare(twice, [likelihoods.Gaussian((m @ jnp.asarray(w))[..., [2, 0]] * 2.0 + 1.0, 0.5) for w in W], y[:, :2])


def test_groups_of_rows(rng):
    D = np.diag([0.3, 0.5, 0.2, 0.4]) + 0.1
    m = marginals(rng, None, residual_scale=jnp.asarray(1.0), groups=jnp.asarray(D)[None])
    scales = np.array([0.2, 0.4, 0.9])
    states, kind = dist.Categorical(jnp.ones(3) / 3), {"enumerate": "parallel"}
    with Enumerating(), handlers.seed(rng_seed=0), handlers.trace():
        numpyro.sample("z", states, infer=kind)  # of all rows
        noisy = likelihoods.Gaussian(m, scales[:, None])
        scaled = likelihoods.Gaussian(m * scales[:, None], 0.3)
        masked = noisy.mask(np.array([[True], [False], [True]]))
        with numpyro.plate("rows", B):
            numpyro.sample("state", states, infer=kind)
        for make in (
            lambda: likelihoods.Gaussian(m, scales[:, None]),
            lambda: likelihoods.Gaussian(m * scales[:, None], 1.0),
        ):
            with pytest.raises(ValueError, match="must not depend on an enumerated site of each row"):
                make()
    y = jnp.asarray(rng.normal(size=B))
    np.testing.assert_allclose(masked.log_prob(y), np.array([[1.0], [0.0], [1.0]]) * noisy.log_prob(y), rtol=1e-12)
    np.testing.assert_allclose(noisy.log_prob(y), [likelihoods.Gaussian(m, s).log_prob(y) for s in scales], rtol=1e-12)
    expected = [likelihoods.Gaussian(m * s, 0.3).log_prob(y) for s in scales]
    np.testing.assert_allclose(scaled.log_prob(y), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="rows of one group would be of different functions"):
        ogp.stack([m, replace_names(m)]).pick(np.array([0, 1, 0, 1]))


def replace_names(m):
    return ogp.Marginals(m.mean + 1, m.explained, m.residual, residual_scale=m.residual_scale, groups=m.groups)


def test_axes_are_taken_while_a_site_is_enumerated_and_else_refused(rng):
    m = marginals(rng)
    column = np.ones((B, 1))
    with pytest.raises(ValueError, match=r"`f\(X\) \+ array` needs an array that broadcasts to the shape \(4,\)"):
        m + column
    with pytest.raises(ValueError, match=r"`scale` must broadcast to the shape \(4,\) of f\(X\); got \(4, 1\)"):
        likelihoods.Gaussian(m, column)
    with Enumerating(), pytest.raises(ValueError, match=r"`scale` must broadcast to the shape \(4,\)"):
        likelihoods.Gaussian(m, np.ones((3, 2)))
    with Enumerating():
        noise = likelihoods.Gaussian(m, np.ones((3, 1)))
    with pytest.raises(ValueError, match=r"`obs` must have shape \(4,\)"):
        noise.log_prob(jnp.zeros(3))


@pytest.mark.parametrize(
    "which, error, match",
    [
        (np.array([0.0, 1.0, 0.0, 1.0]), TypeError, "needs integers"),
        (np.array([0, 1]), ValueError, r"one output for each row, shape \(B,\); got \(4, 2\) and \(2,\)"),
        (np.array([[0], [1]]), ValueError, r"got \(4, 2\) and \(2, 1\)"),
        (np.array([0, 1, 2, 0]), ValueError, r"needs outputs in 0\.\.1; got 2"),
    ],
)
def test_picks_that_are_refused(which, error, match, rng):
    with pytest.raises(error, match=match):
        marginals(rng, 2).pick(which)


def test_picks_of_no_output_are_nan_where_they_cannot_be_looked_at(rng):
    m = marginals(rng, 2)
    found = jax.jit(lambda which: m.pick(which).mean)(np.array([0, -1, 2, 1]))
    np.testing.assert_allclose(found, np.where([1, 0, 0, 1], m.mean[np.arange(B), [0, 0, 0, 1]], np.nan), rtol=1e-12)


# ---------------------------------------------------------------- inference, beside sums by hand

N = 12
Z = np.linspace(-2, 2, 4)[:, None]
NOISES = np.array([0.2, 0.5, 1.0])
OFFSETS = np.array([-1.0, 0.0, 0.5])


def data(rng):
    X = rng.uniform(-2, 2, (N, 1))
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N)


def model(X, y=None, *, local):
    def component():
        return numpyro.sample("z", dist.Categorical(jnp.asarray(WEIGHTS)), infer={"enumerate": "parallel"})

    z = None if local else component()
    f = ogp.gp("f", KERNEL["variance"] * kernels.Matern52(KERNEL["lengthscale"]), jnp.asarray(Z), jitter=0.0)
    with numpyro.plate("data", N):
        z = component() if local else z
        numpyro.sample("y", likelihoods.Gaussian(f(X) + jnp.asarray(OFFSETS)[z], jnp.asarray(NOISES)[z]), obs=y)


def expected_log_likelihoods(X, y, qs):
    """E[log p(y_n | f, z = k)] of each k and n, by the oracle's moments of q(f); and the divergence."""
    mean, variance = oracles.spherical_moments(kernel_oracle("matern52", **KERNEL), oracle_sets([Z], qs), X)
    noise = NOISES[:, None]
    square = (y - mean - OFFSETS[:, None]) ** 2 + variance
    return -0.5 * np.log(2 * np.pi * noise**2) - square / (2 * noise**2)


def total(values, local):
    logs = np.log(WEIGHTS)
    if local:
        return logsumexp(logs[:, None] + values, axis=0).sum()
    return logsumexp(logs + values.sum(1))


@pytest.mark.parametrize("local", [True, False], ids=["of each row", "of all rows"])
def test_bound_of_TraceEnum_ELBO(local, rng):
    pytest.importorskip("funsor")
    X, y = data(rng)
    qs = [random_q(rng, len(Z))]
    values = expected_log_likelihoods(X, y, qs)
    m, T = qs[0]
    kl = 0.5 * (m @ m + (T**2).sum() - len(m)) - np.log(np.diag(T)).sum()

    def mixture(X, y=None):
        model(X, y, local=local)

    guide = ogp.AutoSparseGP(mixture)
    params = {name: jnp.asarray(value) for name, value in q_params(qs).items()}
    elbo = TraceEnum_ELBO()
    SVI(mixture, guide, optax.adam(0.1), elbo).init(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(y))
    for key in range(2):  # the divergence is known, so the bound has no noise
        loss = elbo.loss(jax.random.PRNGKey(key), params, mixture, guide, jnp.asarray(X), jnp.asarray(y))
        np.testing.assert_allclose(-loss, total(values, local) - kl, rtol=1e-10)


@pytest.mark.parametrize("local", [True, False], ids=["of each row", "of all rows"])
def test_density_that_MCMC_sees(local, rng):
    pytest.importorskip("funsor")
    from numpyro.contrib.funsor import config_enumerate, enum, log_density, plate_to_enum_plate

    X, y = data(rng)
    u = rng.normal(size=len(Z))
    values = expected_log_likelihoods(X, y, [(u, np.zeros((len(u), len(u))))])

    def mixture(X, y=None):
        model(X, y, local=local)

    with plate_to_enum_plate():
        counted = enum(config_enumerate(handlers.seed(mixture, 0)), -2)
        got, _ = log_density(counted, (jnp.asarray(X), jnp.asarray(y)), {}, {"f.u0": jnp.asarray(u)})
    prior = -0.5 * (u @ u + len(u) * np.log(2 * np.pi))
    np.testing.assert_allclose(got, total(values, local) + prior, rtol=1e-10)


def two_functions(X, y=None):
    f, g = (ogp.gp(name, kernels.RBF(0.7), jnp.asarray(Z)) for name in "fg")
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("data", len(X)):
        z = numpyro.sample("z", dist.Categorical(jnp.ones(2) / 2), infer={"enumerate": "parallel"})
        numpyro.sample("y", likelihoods.Gaussian(ogp.stack([f(X) + 2.0, g(X) - 2.0]).pick(z), noise), obs=y)


@pytest.mark.parametrize("hyper", [autoguide.AutoDelta, autoguide.AutoNormal])
def test_mixture_of_functions_is_learned(hyper, rng):
    pytest.importorskip("funsor")
    X = jnp.asarray(rng.uniform(-2, 2, (60, 1)))
    which = rng.integers(0, 2, 60)
    y = jnp.asarray(np.where(which == 0, 2 + np.sin(2 * X[:, 0]), -2 - np.cos(X[:, 0])) + 0.1 * rng.normal(size=60))
    guide = ogp.AutoSparseGP(two_functions, hyper=hyper)
    result = ogp.fit(
        SVI(two_functions, guide, optax.adam(0.05), TraceEnum_ELBO()), jax.random.PRNGKey(0), (X, y), num_steps=400
    )
    f = ogp.posterior(two_functions, guide, result.params, X, y)
    assert np.abs(f["f"](X).mean - np.sin(2 * X[:, 0])).max() < 0.3
    assert np.abs(f["g"](X).mean + np.cos(X[:, 0])).max() < 0.3
    assert "z" not in guide.median(result.params)


def test_NUTS_with_functions_to_choose_from(rng):
    pytest.importorskip("funsor")
    X, y = data(rng)
    mcmc = MCMC(NUTS(two_functions), num_warmup=3, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(y))
    assert {"f.u0", "g.u0", "noise"} == set(mcmc.get_samples())


TRANSITION = np.array([[0.8, 0.2], [0.3, 0.7]])
LEVELS = np.array([0.4, 0.9])


def chain(X, y, of):
    """States of a hidden Markov chain, which start after the state 0."""
    f = ogp.gp("f", kernels.RBF(0.7), jnp.asarray(Z), num_latents=2)

    def step(z, now):
        x, y = now
        z = numpyro.sample("z", dist.Categorical(jnp.asarray(TRANSITION)[z]), infer={"enumerate": "parallel"})
        with numpyro.plate("row", 1):
            numpyro.sample("y", of(f(x[None]), z), obs=y[None])
        return z, None

    scan(step, 0, (jnp.asarray(X), jnp.asarray(y)))


CHAINS = {
    "function": (lambda m, z: likelihoods.Gaussian(m.pick(z), 0.4), [0, 1], [0.0, 0.0], [0.4, 0.4]),
    "offset": (lambda m, z: likelihoods.Gaussian(m[..., 0] + jnp.asarray(LEVELS)[z], 0.4), [0, 0], LEVELS, [0.4, 0.4]),
    "noise": (lambda m, z: likelihoods.Gaussian(m[..., 0], jnp.asarray(LEVELS)[z]), [0, 0], [0.0, 0.0], LEVELS),
}


@pytest.mark.parametrize("name", CHAINS)
def test_states_of_a_chain_under_MCMC(name, rng):
    """A likelihood in scan whose function, offset or noise depends on the state: it refused the y of the scan for its shape."""
    pytest.importorskip("funsor")
    from numpyro.contrib.funsor import enum, log_density

    X, y = (a[:5] for a in data(rng))
    u = rng.normal(size=(2, len(Z)))
    of, columns, offsets, noise = CHAINS[name]
    counted = enum(handlers.seed(chain, 0), -2)
    got, _ = log_density(counted, (X, y, of), {}, {"f.u0": jnp.asarray(u)})
    m = ogp.posterior(chain, None, {"f.u0": jnp.asarray(u)}, X, y, of)["f"](jnp.asarray(X))
    mean, variance = (np.asarray(a)[:, columns] for a in (m.mean, m.variance))
    noise = np.asarray(noise)
    fit = -0.5 * (((y[:, None] - mean - offsets) ** 2 + variance) / noise**2 + np.log(2 * np.pi * noise**2))
    alpha = np.log(TRANSITION[0]) + fit[0]
    for row in fit[1:]:
        alpha = logsumexp(alpha[:, None] + np.log(TRANSITION), 0) + row
    prior = -0.5 * (np.sum(u**2) + u.size * np.log(2 * np.pi))
    np.testing.assert_allclose(got, logsumexp(alpha) + prior, rtol=1e-10)


# ---------------------------------------------------------------- what cannot be right


def dependent(which):
    def model(X, y=None):
        z = numpyro.sample("z", dist.Categorical(jnp.asarray(WEIGHTS)), infer={"enumerate": "parallel"})
        noise = jnp.asarray(NOISES)[z]
        if which == "collapsed":
            numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(0.5), X, X[:4], noise), obs=y)
            return
        if which == "collapsed kernel":
            numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(noise), X, X[:4], 0.3), obs=y)
            return
        kernel = noise * kernels.RBF(0.5) if which == "variance" else kernels.RBF(noise)
        f = ogp.gp("f", kernel, X[:4])
        with numpyro.plate("data", N):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    return model


@pytest.mark.parametrize("which", ["lengthscale", "variance", "collapsed", "collapsed kernel"])
def test_priors_that_depend_on_an_enumerated_site(which, rng):
    pytest.importorskip("funsor")
    X, y = data(rng)
    mcmc = MCMC(NUTS(dependent(which)), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="cannot depend on a discrete site that is enumerated"):
        mcmc.run(jax.random.PRNGKey(0), jnp.asarray(X), jnp.asarray(y))


def test_as_many_functions_as_the_model_says(rng):
    def model(X):
        return ogp.gp("f", kernels.RBF(jnp.ones((2, 1))), X, num_latents=2), ogp.gp("g", kernels.RBF(1.0), X)

    with handlers.seed(rng_seed=0), Enumerating():
        f, g = model(jnp.asarray(Z))
    assert (f.num_latents, g.num_latents) == (2, None)


def test_outputs_that_nobody_observed_are_not_enumerated(rng):
    def model(X):
        f = ogp.gp("f", kernels.RBF(1.0), jnp.asarray(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Bernoulli(f(X)), infer={"enumerate": "parallel"})

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match="`y` has a likelihood of numpyro_orthgp and no observations"):
        svi.init(jax.random.PRNGKey(0), data(rng)[0])


def test_an_objective_that_does_not_enumerate():
    """It ended in KeyError: 'z'."""
    X = jnp.linspace(0.0, 1.0, 4)[:, None]

    def model():
        f = ogp.gp("f", kernels.RBF(0.5), X, num_latents=2)
        with numpyro.plate("data", 4):
            z = numpyro.sample("z", dist.Categorical(jnp.array([0.3, 0.7])), infer={"enumerate": "parallel"})
            numpyro.sample("y", likelihoods.Gaussian(f(X).pick(z), 0.3), obs=jnp.ones(4))

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=r"TraceMeanField_ELBO does not sum over `z`.*TraceEnum_ELBO\(\)"):
        svi.evaluate(svi.init(jax.random.PRNGKey(0)))


@pytest.mark.parametrize("states", [True, False])
def test_an_objective_that_leaves_out_a_step_of_scan(states, rng):
    """With states the loss was 24.0 where the bound is 18.8; without any, NumPyro leaves out the first y."""
    pytest.importorskip("funsor")
    X, y = (jnp.asarray(a) for a in data(rng))

    def model():
        f = ogp.gp("f", kernels.RBF(0.7), jnp.asarray(Z))

        def step(z, now):
            x, y = now
            if states:
                z = numpyro.sample("z", dist.Categorical(jnp.asarray(TRANSITION)[z]), infer={"enumerate": "parallel"})
            with numpyro.plate("row", 1):
                numpyro.sample("y", likelihoods.Gaussian(f(x[None]) + z, 0.4), obs=y[None])
            return z, None

        scan(step, 0, (X, y))

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceEnum_ELBO())
    with pytest.raises(
        ValueError, match=r"TraceEnum_ELBO leaves out the first step of numpyro's scan, which holds `[zy]`"
    ):
        svi.evaluate(svi.init(jax.random.PRNGKey(0)))


def test_diagnostics_of_sites_that_are_summed_over():
    """They asked for the guide with which the model was fitted, which it was."""
    X = jnp.linspace(0.0, 1.0, 4)[:, None]

    def model():
        f = ogp.gp("f", kernels.RBF(0.5), X)
        with numpyro.plate("data", 4):
            z = numpyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            numpyro.sample("y", likelihoods.Gaussian(f(X) + z, 0.3), obs=jnp.ones(4))

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.1), TraceEnum_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0)))
    for of_fit in (ogp.check, ogp.khat, ogp.to_arviz):
        with pytest.raises(
            ValueError, match=r"draws of all latent sites, and NumPyro sums over \['z'\].*infer_discrete=True"
        ):
            of_fit(model, guide, params)
    assert ogp.posterior(model, guide, params)["f"](X).shape == (4,)
