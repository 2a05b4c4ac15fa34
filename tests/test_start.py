"""`fit` compiles `svi.init` where the guide is AutoSparseGP: the same start and the same errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from numpy.testing import assert_allclose
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, autoguide

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.errors import inspect, is_concrete
from numpyro_orthgp.guides.hyper import PointsAndEffects
from numpyro_orthgp.math.kept import run_checked
from numpyro_orthgp.training.start import initial_state
from tests import problems

X = np.linspace(0, 1, 12)[:, None]
Y = np.sin(6 * X[:, 0])
KEY = jax.random.PRNGKey(3)


def with_params(X, y, noise=0.1):
    scale = numpyro.param("scale", 0.3, constraint=constraints.positive)
    f = ogp.gp("f", kernels.RBF(scale), numpyro.param("Z", jnp.asarray(X[::3])))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.asarray(noise)), obs=jnp.asarray(y))


def with_priors(X, y):
    scale = numpyro.sample("scale", dist.LogNormal(jnp.zeros(1), 1.0).to_event(1))
    f = ogp.gp("f", kernels.RBF(scale), jnp.asarray(X[::3]))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def with_latents(X, y):
    with numpyro.plate("data", len(X), subsample_size=6) as rows:
        H = ogp.latent_inputs("H", len(X), 2)
    f = ogp.gp("f", kernels.RBF(numpyro.sample("scale", dist.LogNormal(0.0, 1.0))), jnp.eye(4, 2))
    with numpyro.plate("data", len(X), subsample_size=6):
        numpyro.sample("y", likelihoods.Gaussian(f(H), 0.1), obs=y[rows])


def start(model, *, compiled, data=(X, Y), hyper=autoguide.AutoDelta, init_params=None, **options):
    guide = ogp.AutoSparseGP(model, hyper=hyper, **options)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    if compiled:
        state = initial_state(svi, KEY, data, init_params, {})
    else:
        state = svi.init(KEY, *data, init_params=init_params)
    return svi, state


class Counted:
    """Whether calls of a model were traced."""

    def __init__(self, model):
        self.model, self.traced = model, []

    def __call__(self, *args):
        self.traced.append(isinstance(args[0], jax.core.Tracer))
        return self.model(*args)


@pytest.mark.parametrize("model, hyper, init_params", [
    (with_params, autoguide.AutoDelta, None),
    (with_priors, autoguide.AutoDelta, {"f.u0_loc": np.full(4, 0.5)}),
    (with_priors, autoguide.AutoMultivariateNormal, None),
    (with_latents, autoguide.AutoDelta, None),
])  # fmt: skip
def test_it_starts_where_svi_init_does(model, hyper, init_params):
    (one, compiled), (other, expected) = (
        start(model, compiled=c, hyper=hyper, init_params=init_params) for c in (True, False)
    )
    assert jax.tree.structure(compiled.optim_state) == jax.tree.structure(expected.optim_state)
    for found, wanted in zip(*(jax.tree.leaves(s) for s in (compiled, expected)), strict=True):
        assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)
    params = one.get_params(compiled)
    assert params.keys() == other.get_params(expected).keys()
    if init_params:
        assert_allclose(params["f.u0_loc"], 0.5)
    first, second = (svi.update(state, X, Y)[1] for svi, state in ((one, compiled), (other, expected)))
    assert_allclose(first, second, rtol=1e-5)


def encoded(X, y):
    """Latent inputs after the hyperparameters: their encoder starts at random, with keys that come after those of `hyper`."""
    f = ogp.gp("f", kernels.RBF(numpyro.sample("scale", dist.LogNormal(0.0, 1.0))), jnp.eye(4, 2))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(ogp.latent_inputs("H", len(X), 2)), 0.1), obs=y)


def encoder(X, y):
    weights = numpyro.param("weights", lambda rng_key: jax.random.normal(rng_key, (2,)))
    return y[:, None] * weights, jnp.full((len(X), 2), 0.1)


def hidden(X, y):
    """The guide runs the model for its hidden outputs, and finds the random start of its parameter."""
    slope = numpyro.param("weights", lambda rng_key: jax.random.normal(rng_key, (1,)))
    f = ogp.gp("f", kernels.RBF(0.3), jnp.asarray(X[::3]))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X) + X @ slope, noise), obs=y, obs_mask=y > 0)


@pytest.mark.parametrize("hyper", [autoguide.AutoDelta, autoguide.AutoMultivariateNormal], ids=lambda g: g.__name__)
@pytest.mark.parametrize(
    "model, options", [(encoded, {"latents": {"H": encoder}}), (hidden, {})], ids=["encoder", "hidden"]
)
def test_random_starts_after_the_hyper_guide_are_those_of_svi_init(model, options, hyper):
    """`hyper` is started apart, so the compiled start does not ask for the random keys of that; the others stay what they are."""
    (one, compiled), (other, expected) = (start(model, compiled=c, hyper=hyper, **options) for c in (True, False))
    weights = one.get_params(compiled)["weights"]
    assert_allclose(weights, other.get_params(expected)["weights"], rtol=1e-6)
    first, second = (svi.update(state, X, Y)[1] for svi, state in ((one, compiled), (other, expected)))
    assert_allclose(first, second, rtol=1e-5)


def test_the_model_runs_under_jit_only():
    counted = Counted(with_params)
    start(counted, compiled=True)
    assert counted.traced and counted.traced[0] is False  # once for its names, abstractly
    assert all(counted.traced[1:])
    assert len(counted.traced) == 3  # and for its checks, and for the start of its parameters


def test_functions_are_evaluated_under_jit_only():
    """Also where the guide of sampled hyperparameters starts, which is not."""
    evaluated = []
    start(problems.recording(evaluated), compiled=True)
    assert evaluated and all(isinstance(values, jax.core.Tracer) for values in evaluated)


def scaled(X, y):
    with_params(X, 2 * y)  # under jit known at its end only


def negative(model_noise):
    return lambda X, y: with_params(X, y, model_noise)


@pytest.mark.parametrize(
    "model, data, message",
    [
        (negative(-0.1), (X, Y), "`scale` must be positive; got a value of -0.1"),
        (with_params, (X, np.where(X[:, 0] > 0.5, np.nan, Y)), "`y` must lie in the support of Gaussian"),
        (scaled, (X, np.where(X[:, 0] > 0.5, np.nan, Y)), "`y` must lie in the support of Gaussian"),
        (with_params, (np.where(X > 0.5, np.nan, X), Y), "`inducing.0.` must be finite; got 2 NaN"),
    ],
)
def test_errors_are_those_of_svi_init(model, data, message):
    for compiled in (False, True):
        with pytest.raises(ValueError, match=message):
            start(model, compiled=compiled, data=data)
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    for _ in range(2):  # it is said again
        with pytest.raises(ValueError, match=message):
            ogp.fit(svi, KEY, data, num_steps=1, progress_bar=False)


def by_numpy(X, y):
    numpyro.param("start", lambda key: np.asarray(jax.random.normal(key, (2,))) + 1)
    with_params(X, y)


def computed_bounds(X, y):
    low = jnp.asarray([0.1, 0.2]) * X.max()
    numpyro.param("start", low + 0.5, constraint=constraints.interval(low, low + 1))
    with_params(X, y)


def test_what_cannot_be_compiled_starts_as_before(caplog):
    """A start that NumPy computes."""
    caplog.set_level("DEBUG", logger="numpyro_orthgp")
    counted = Counted(by_numpy)
    svi, state = start(counted, compiled=True)
    assert not counted.traced[-1]
    assert [record.message for record in caplog.records] == ["svi.init is not compiled as a whole:"]
    other, expected = start(by_numpy, compiled=False)
    assert_allclose(svi.get_params(state)["start"], other.get_params(expected)["start"], rtol=1e-6)
    assert np.isfinite(jax.jit(svi.update)(state, X, Y)[1])


def bounded_noise(X, y):
    """The support of the noise is computed, and ``AutoDelta`` keeps a parameter with it."""
    low = jnp.asarray(0.05) * X.max()
    above = dist.transforms.AffineTransform(low, 1.0, domain=constraints.positive)
    noise = numpyro.sample("start", dist.TransformedDistribution(dist.LogNormal(-2.0, 1.0), above))
    numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(0.3), X, jnp.asarray(X[::3]), noise), obs=y)


def test_sites_stay_in_the_order_of_the_model():
    """JAX sorts the keys of dicts that a program returns."""

    def model(X, y):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = ogp.gp("f", kernels.RBF(numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))), jnp.asarray(X[::3]))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), scale), obs=y)

    for compiled in (True, False):
        svi, state = start(model, compiled=compiled, hyper=PointsAndEffects)
        assert list(svi.guide.median(svi.get_params(state)))[:2] == ["scale", "lengthscale"]


@pytest.mark.parametrize("model, guide", [
    (computed_bounds, ogp.AutoSparseGP), (bounded_noise, autoguide.AutoDelta)
], ids=["parameter", "support"])  # fmt: skip
def test_bounds_that_the_model_computes_are_kept_as_numbers(model, guide, caplog):
    """The ``SVI`` keeps them from its start. Under `jit` they would be tracers, which the program returns."""
    caplog.set_level("DEBUG", logger="numpyro_orthgp")
    name = "start" if guide is ogp.AutoSparseGP else "start_auto_loc"
    ours, plain = (SVI(model, guide(model), optax.adam(0.01), TraceMeanField_ELBO()) for _ in range(2))
    expected = plain.get_params(plain.init(KEY, X, Y))
    for _ in range(2):  # again with a guide that has had its first look
        state = initial_state(ours, KEY, (X, Y), None, {})
        assert not caplog.records
        assert all(map(is_concrete, jax.tree.leaves(ours.constrain_fn.args)))
        assert_allclose(ours.get_params(state)[name], expected[name], rtol=1e-6)
        assert np.isfinite(jax.jit(ours.update)(state, X, Y)[1])


def test_other_guides_start_as_numpyro_starts_them():
    for make in (autoguide.AutoNormal, lambda model: lambda X, y: ogp.gp_posterior("f", 4)):
        counted = Counted(with_params)
        svi = SVI(counted, make(counted), optax.adam(0.01), TraceMeanField_ELBO())
        initial_state(svi, KEY, (X, Y), None, {})
        assert not any(counted.traced)


def refuse_negative(x):
    if np.any(np.asarray(x) < 0):
        raise ValueError(f"negative: {x}")


def test_checks_wait_for_the_values_of_a_program():
    def program(x):
        inspect(refuse_negative, x - 1)
        return 2 * x

    assert run_checked(program, 3.0) == 6
    with pytest.raises(ValueError, match="negative: -0"):
        run_checked(program, 0.5)
    assert jax.jit(program)(0.5) == 1  # never
    with pytest.raises(ValueError, match="negative"):
        program(0.5)


@pytest.mark.parametrize("inner", [
    lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    lambda f, x: jax.vmap(f)(jnp.stack([x, x]))[0],
    lambda f, x: jax.grad(f)(x),
    lambda f, x: jax.jit(f)(x),
])  # fmt: skip
def test_values_within_loops_and_such_are_not_looked_at(inner):
    def check(x):
        inspect(refuse_negative, x)
        return x * 1.0

    assert np.isfinite(run_checked(lambda x: inner(check, x), -1.0))


def test_a_program_within_a_program_keeps_its_own_checks():
    def inner(x):
        inspect(refuse_negative, x)
        return x

    def outer(x):
        inspect(refuse_negative, x - 1)
        return run_checked(inner, 2.0) + x

    assert run_checked(outer, 1.0) == 3
    with pytest.raises(ValueError, match="negative: -1"):
        run_checked(outer, 0.0)


def collapsed(X, y):
    """Priors of every sort, a plate, and what is computed of them."""
    scale = numpyro.sample("scale", dist.LogNormal(jnp.zeros(2), 1.0).to_event(1))
    amplitude = numpyro.sample("amplitude", dist.Uniform(0.0, 2.0))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    numpyro.deterministic("total", effect.sum())
    kernel = amplitude * kernels.RBF(scale[:1])
    numpyro.sample(
        "y", ogp.CollapsedGP(kernel, jnp.asarray(X), jnp.asarray(X[::3]), 0.1, loc=effect.mean()), obs=jnp.asarray(y)
    )


def test_points_start_by_one_program_and_keep_no_tracers():
    """AutoDelta keeps arrays of its first look, which are the program's."""
    found = []
    for compiled in (True, False):
        counted = Counted(collapsed)
        guide = autoguide.AutoDelta(counted)
        svi = SVI(counted, guide, optax.adam(0.01), Trace_ELBO())
        state = initial_state(svi, KEY, (X, Y), None, {}) if compiled else svi.init(KEY, X, Y)
        assert all(counted.traced) == compiled
        params = svi.get_params(state)
        with jax.checking_leaks():
            state, loss = jax.jit(svi.update)(state, X, Y)
        totals = guide.sample_posterior(KEY, params, X, Y, sample_shape=(2,))["total"]
        assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(guide.prototype_trace))
        found.append((params, guide.median(params), loss, totals))
    for one, other in zip(*(jax.tree.leaves(each) for each in found), strict=True):
        assert_allclose(one, other, rtol=1e-5)


def test_points_that_cannot_start_by_one_program_start_as_before():
    """Bounds that depend on other sites; a class that may keep more; a guide that has looked; an error, said where it is."""

    def bounded(X, y):
        low = numpyro.sample("low", dist.Uniform(0.0, 1.0))
        numpyro.sample("noise", dist.Uniform(low, low + 1))
        numpyro.sample(
            "y", ogp.CollapsedGP(kernels.RBF(0.3), jnp.asarray(X), jnp.asarray(X[::3]), 0.1), obs=jnp.asarray(y)
        )

    class Own(autoguide.AutoDelta):
        pass

    for model, kind in ((bounded, autoguide.AutoDelta), (collapsed, Own)):
        counted = Counted(model)
        guide = kind(counted)
        svi = SVI(counted, guide, optax.adam(0.01), Trace_ELBO())
        for _ in range(2):
            state = initial_state(svi, KEY, (X, Y), None, {})
            assert not counted.traced[-1] and np.isfinite(jax.jit(svi.update)(state, X, Y)[1])
            assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(guide.prototype_trace))
    wrong = SVI(collapsed, autoguide.AutoDelta(collapsed), optax.adam(0.01), Trace_ELBO())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`y` must have shape"):
            initial_state(wrong, KEY, (X, Y[:5]), None, {})


def test_without_priors_nothing_starts_apart(compilations):
    """The guide's first look needs no values then: not even random keys are split outside of the program of `svi.init`."""

    def model(X, y):
        f = ogp.gp("f", ogp.kernels.RBF(numpyro.param("lengthscale", 1.0)), X[:4])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.3), obs=y)

    X = jnp.linspace(0.0, 1.0, 20)[:, None]
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
    ogp.fit(svi, jax.random.PRNGKey(0), (X, jnp.sin(6 * X[:, 0])), num_steps=2, progress_bar=False)
    assert "jit(leaves)" in compilations and "jit(_threefry_split)" not in compilations
