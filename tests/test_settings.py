"""The strict settings of JAX: what the package adds axes to on purpose, and promotes, is its own matter and not the user's."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.plugged import plugged_of
from numpyro_orthgp.diagnostics.replay import look
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.guides.own_draws import own_draws

SETTINGS = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "NaN": lambda: jax.debug_nans(True),
    "leaks": lambda: jax.checking_leaks(),
    "checks": lambda: jax.enable_checks(True),
}

CASES = {
    "gaussian": (lambda m: likelihoods.Gaussian(m, 0.3), {}),
    "tight, per point": (lambda m: likelihoods.StudentT(m, 4.0, jnp.full(12, 0.3)), {"residual": "tight"}),
    "counts": (likelihoods.Poisson, {"covariance": "diagonal"}),
    "several": (lambda m: likelihoods.Gaussian(m, jnp.array([0.2, 0.3])).to_event(1), {"num_latents": 2}),
    "mixed": (lambda m: likelihoods.Gaussian((m @ jnp.ones((2, 2))) + 1.0, 0.3).to_event(1), {"num_latents": 2}),
    "classes": (likelihoods.Categorical, {"num_latents": 3}),
    "robust classes": (lambda m: likelihoods.Categorical(m, "robustmax"), {"num_latents": 3}),
    "ordinal": (lambda m: likelihoods.Ordinal(m, jnp.array([0.0, 1.0])), {}),
}


# Looking for leaks takes a hundred times as long as tracing, and grows with what is traced.
MANY = ("several", "mixed", "classes", "robust classes", "ordinal")
ALL = [
    pytest.param(setting, case, marks=[pytest.mark.slow] if setting == "leaks" and case in MANY else [])
    for case in CASES
    for setting in SETTINGS
]


@pytest.mark.parametrize(("setting", "case"), ALL)
def test_fit_and_predictions(setting, case, rng):
    if setting == "checks" and case in ("ordinal", "robust classes"):
        pytest.skip("JAX's own log_ndtr fails with its internal checks on")
    likelihood, options = CASES[case]
    num_latents = options.get("num_latents")
    X = jnp.asarray(rng.uniform(-2, 2, (12, 1)))
    y = jnp.asarray(rng.integers(0, 2, (12, 2) if case in ("several", "mixed") else 12))
    y = y.astype(float) if case.split(",")[0] in ("gaussian", "tight", "several", "mixed") else y

    def model(X, y=None):
        scale = numpyro.param("scale", jnp.asarray(0.7), constraint=dist.constraints.positive)
        kernel = kernels.Matern52(scale) if num_latents else 1.5 * kernels.RBF(scale) + 0.1
        f = ogp.gp("f", kernel, [X[::3], X[1::3]], num_latents=num_latents)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihood(f(X)), obs=y)

    others = {k: v for k, v in options.items() if k != "num_latents"}
    guide = ogp.AutoSparseGP(model, **others)
    with SETTINGS[setting]():
        svi = SVI(model, guide, optax.sgd(1e-4), TraceMeanField_ELBO())  # optax's adam promotes integers itself
        result = svi.run(jax.random.PRNGKey(0), 2, X, y, progress_bar=False)
        f = ogp.posterior(model, guide, result.params, X, y)["f"]
        mean, variance = f(X).mean, f(X).variance
        likelihood(f(X)).log_prob(y)
    assert np.isfinite(result.losses).all() and np.isfinite(mean).all() and (np.asarray(variance) > 0).all()


def regression(rng):
    X = jnp.asarray(rng.uniform(-2, 2, (12, 1)))

    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(0.5), X[::3])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    return X, jnp.sin(X[:, 0]), model


@pytest.mark.parametrize("setting", ["ranks", "dtypes"])
def test_natural_gradients_paths_and_collapsed_bounds(setting, rng):
    X, y, model = regression(rng)
    guide = ogp.AutoSparseGP(model, natural=True)
    with SETTINGS[setting]():
        optimizer = ogp.natural_gradient(optax.sgd(1e-4), 1.0)
        result = SVI(model, guide, optimizer, Trace_ELBO()).run(jax.random.PRNGKey(0), 2, X, y, progress_bar=False)
        f = ogp.posterior(model, guide, result.params, X, y)["f"]
        paths = f.sample_paths(jax.random.PRNGKey(0), 3)(X)
        bound = ogp.CollapsedGP(kernels.RBF(0.5), X, [X[::3], X[1::3]], 0.3).log_prob(y)
    assert np.isfinite(paths).all() and np.isfinite(bound)


@pytest.mark.parametrize("name", ["one peak", "several peaks", "natural"])
def test_nothing_infinite_on_the_way(name, rng):
    """``jax_debug_infs`` stopped at where the search for peaks starts, and before the first natural step."""
    f = ogp.Marginals(jnp.array([0.3, -1.0]), jnp.array([0.5, 2.0]), jnp.zeros(2))
    X, y, model = regression(rng)
    svi = SVI(model, ogp.AutoSparseGP(model, natural=True), ogp.natural_gradient(optax.sgd(1e-4), 1.0), Trace_ELBO())
    run = {
        "one peak": lambda: likelihoods.Poisson(f).log_predictive(jnp.array([2, 0])),
        "several peaks": lambda: likelihoods.StudentT(f, 4.0, 0.1).log_predictive(jnp.array([2.0, 0.0])),
        "natural": lambda: svi.run(jax.random.PRNGKey(0), 2, X, y, progress_bar=False).losses,
    }[name]
    with jax.debug_infs(True):
        found = run()
    np.testing.assert_array_equal(found, run())


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # of the guide, which remembers 64
def test_diagnostics_of_a_fit_with_other_bits(rng):
    """In 32 bits, parameters of 64 ended in JAX's words about dtypes; the other way round they were promoted."""
    with jax.enable_x64(True):
        X = rng.uniform(-2, 2, (12, 1))
        y = np.sin(X[:, 0])

        def model(X, y=None):
            f = ogp.gp("f", kernels.RBF(numpyro.param("scale", 0.5)), np.linspace(-2, 2, 4)[:, None])
            with numpyro.plate("data", len(X)):
                numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

        guide = ogp.AutoSparseGP(model)
        svi = SVI(model, guide, optax.sgd(1e-3), TraceMeanField_ELBO())
        params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y))
        mean = ogp.posterior(model, guide, params, X)["f"](X).mean
    assert all(p.dtype == np.float64 for p in params.values())
    with jax.enable_x64(False):
        f = ogp.posterior(model, guide, params, X)["f"]
        np.testing.assert_allclose(f(X).mean, mean, 1e-5, 1e-5)
        assert "y:" in str(ogp.check(model, guide, params, X, y, num_samples=25))
        assert np.isfinite(ogp.khat(model, guide, params, X, y, num_samples=100).khat)
        assert ogp.to_arviz(model, guide, params, X, y, num_samples=10).posterior["f.u0"].dtype == np.float32


def test_looking_for_what_sites_take_keeps_nothing_of_a_program(rng):
    """With tracers in what was kept JAX looked for leaks, and ``check`` did not end."""
    X = jnp.asarray(rng.uniform(-2, 2, (3, 1)))

    def model(X):
        f = ogp.gp("f", kernels.RBF(0.5), X[:1])
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=X[:, 0])

    params = {"f.u0_loc": jnp.zeros(1), "f.u0_scale_tril": jnp.eye(1)}
    guide, arguments, key = ogp.AutoSparseGP(model), Arguments((X,), {}), jax.random.PRNGKey(0)
    layout = look(model, arguments, GuideDraws(guide, params, arguments, key), fitted=True)
    with jax.checking_leaks():
        assert own_draws(model, (X,), {}) == []
        assert plugged_of(Subject(model, guide, params, arguments, layout, key), ["f"]) == {}


def test_paths_without_jit():
    f = ogp.CollapsedGP(kernels.RBF(0.5), jnp.zeros((1, 1)), jnp.zeros((1, 1)), 0.3).posterior(jnp.ones(1))
    X = jnp.ones((1, 1))
    compiled = f.sample_paths(jax.random.PRNGKey(0), 2, num_features=4)(X)
    with jax.disable_jit():
        np.testing.assert_allclose(f.sample_paths(jax.random.PRNGKey(0), 2, num_features=4)(X), compiled)


def test_operands_of_the_user_are_still_refused(rng):
    """The setting is off within the package only."""
    with jax.numpy_rank_promotion("raise"):
        likelihoods.Gaussian(ogp.Marginals(jnp.zeros(3), jnp.ones(3), jnp.ones(3)), jnp.ones(3)).log_prob(jnp.zeros(3))
        with pytest.raises(ValueError, match="rank_promotion"):
            jnp.ones((3, 3)) + jnp.ones(3)


def test_groups_starting_points_and_uncertain_inputs_with_strict_ranks(rng):
    X = jnp.asarray(rng.uniform(-2, 2, (24, 2)))
    y = jnp.sin(X[:, 0])

    def bound(scale):
        return ogp.CollapsedGP(kernels.RBF(scale), X, X[::6], 0.3, group_size=4).log_prob(y)

    def answers():
        f = ogp.CollapsedGP(kernels.Matern32(0.5), X, X[::3], 0.3).posterior(y)
        inputs = ogp.LatentInputs(X[:3], X[:3], jnp.full((3, 2), 0.1))
        return (
            jax.grad(bound)(0.5),
            f.expected(inputs).variance,
            ogp.init.kmeans(jax.random.PRNGKey(0), X, 4),
            ogp.init.greedy_variance(kernels.RBF(0.5), X, 4),
            ogp.init.median_lengthscale(X, ard=True),
            ogp.init.pca(X, 1),
            ogp.init.linear_mean(X, 1),
        )

    with jax.numpy_rank_promotion("raise"):
        strict = answers()
    for one, other in zip(strict, answers(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_checks_of_a_fit_with_strict_ranks(rng):
    X = jnp.asarray(rng.uniform(-2, 2, (12, 1)))
    y = jnp.sin(X[:, 0])

    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(0.5), [X[::3], X[1::3]])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y))
    with jax.numpy_rank_promotion("raise"):
        assert "rows" in str(ogp.check(model, guide, params, X, y))


def test_keys_of_another_kind_by_default(rng):
    """NumPyro takes no plain keys of `rbg`, and ours were: every fit failed, and every call that makes a key by itself."""
    X, y, model = regression(rng)
    with jax.default_prng_impl("rbg"):
        svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())
        result = ogp.fit(svi, jax.random.key(0), (X, y), num_steps=3, progress_bar=False)
        assert np.isfinite(result.posterior()["f"](X).mean).all()
        assert result.predict(X, num_samples=10)["y"].draws.shape == (10, 12)
        assert result.khat(num_samples=50).num_samples == 50


@pytest.mark.parametrize("call", ["regression", "classification"])
def test_calls_for_tables_choose_their_own_settings(call, rng):
    """Also where JAX refuses promotion by optax's Adam, axes of a softmax's intercepts, and arrays of NumPy."""
    X = rng.integers(0, 6, (60, 2)) / 2.0
    wave = np.sin(X[:, 0]) + 0.1 * rng.normal(size=60)
    y = {"regression": wave, "classification": np.digitize(wave, [0.0, 0.7])}
    fit_and_serve = partial(served, getattr(ogp, call), X, y[call])
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        strict = fit_and_serve()
    for one, other in zip(strict, fit_and_serve(), strict=True):
        np.testing.assert_array_equal(one, other)


def served(call, X, y):
    fit = call(X, y, M=8, num_steps=6)
    new = fit.predict(X[:5])
    return new.log_density(y[:5]), fit.export().in_avals[0].shape[1:]
