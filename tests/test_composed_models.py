"""Models around functions that are fitted, whose sets are partly known, or that are called outside of their scope."""

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
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles, problems

SIZES = [4, 3, 5]
VALUE = 0.3  # of variables that are conditioned on
NOISE = 0.35
HYPER = {"variance": jnp.asarray(1.3), "lengthscale": jnp.full(2, 0.9)}


@pytest.fixture
def setting(rng):
    X, y = problems.data(rng)
    return jnp.asarray(X), jnp.asarray(y), problems.sets(rng, SIZES), [problems.random_q(rng, M) for M in SIZES]


# ---------------------------------------------------------------- sets that are conditioned on


def conditioned(known):
    return handlers.condition(problems.model, {f"f.u{i}": jnp.full(SIZES[i], VALUE) for i in known})


def oracle_sets(Zs, qs, known):
    """Known sets have a mean and no covariance."""
    return problems.oracle_sets(
        Zs, [(np.full(len(m), VALUE), 0 * T) if i in known else (m, T) for i, (m, T) in enumerate(qs)]
    )


def latent_params(qs, known):
    return {k: v for k, v in problems.q_params(qs).items() if int(k[3]) not in known}


@pytest.mark.parametrize("known", [[0], [1], [2], [0, 1], [0, 2]], ids=str)
def test_any_set_may_be_conditioned_on(setting, known):
    X, y, Zs, qs = setting
    model = conditioned(known)
    guide, arguments = ogp.AutoSparseGP(model), {"inducing": Zs, "likelihood": problems.gaussian(NOISE)}
    params = latent_params(qs, known)
    draws = handlers.substitute(handlers.seed(guide, 0), params)(X, y, **arguments)
    assert set(draws) == {f"f.u{i}" for i in range(3) if i not in known}
    whitened = oracle_sets(Zs, qs, known)
    terms = oracles.gaussian_terms(problems.kernel_oracle("matern52"), whitened, np.asarray(X), np.asarray(y), NOISE**2)
    expected = terms.sum()
    for i, s in enumerate(whitened):
        zero, one = np.zeros(len(s.Z)), np.eye(len(s.Z))
        expected += oracles.log_normal(s.loc, zero, one) if i in known else -oracles.kl_normal(s.loc, s.cov, zero, one)
    elbo = TraceMeanField_ELBO()
    loss = jax.jit(lambda params: elbo.loss(jax.random.PRNGKey(0), params, model, guide, X, y, **arguments))
    assert_allclose(-loss(params), expected, rtol=1e-9)


@pytest.mark.parametrize("known", [[0], [1]], ids=str)
def test_the_residual_is_tightened_whichever_set_is_known(setting, known):
    X, y, Zs, qs = setting
    model = conditioned(known)
    params = latent_params(qs, known) | {"f_residual_scale": jnp.asarray(0.8)}
    counts = jnp.round(jnp.exp(y))

    def loss(guide, params):
        arguments = {"inducing": Zs, "likelihood": likelihoods.Poisson}
        return TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, X, counts, **arguments)

    whitened = oracle_sets(Zs, qs, known)
    kernel = problems.kernel_oracle("matern52")
    bounds = []
    for v in (0.8, 1.0):
        mean, variance = oracles.spherical_moments(kernel, whitened, np.asarray(X), v=v)
        fit = oracles.expected_log_density(oracles.log_poisson(), np.asarray(counts), mean, variance).sum()
        bounds.append(fit - oracles.residual_cost(v, len(X)))
    tight, loose = (loss(ogp.AutoSparseGP(model, residual=r), params) for r in ("tight", "prior"))
    assert_allclose(loose - tight, bounds[0] - bounds[1], rtol=1e-7)


def test_options_of_a_gp_with_a_known_set_are_one_for_each_of_its_sets(setting):
    X, y, Zs, _ = setting
    model = conditioned([0])
    arguments = {"inducing": Zs, "likelihood": problems.gaussian(NOISE)}

    def params(covariance):
        svi = SVI(model, ogp.AutoSparseGP(model, covariance=covariance), optax.adam(0.1), TraceMeanField_ELBO())
        found = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y, **arguments))
        return {name for name in found if name.startswith("f.u")}

    assert params(["full", "diagonal", "prior"]) == {"f.u1_loc", "f.u1_scale", "f.u2_loc"}
    with pytest.raises(ValueError, match="one per set, 3 here; got 2"):
        params(["diagonal", "prior"])


def test_a_gp_of_known_sets_alone_needs_no_parameters(setting):
    X, y, Zs, _ = setting
    model = conditioned([0, 1, 2])
    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
    state = svi.init(jax.random.PRNGKey(0), X, y, inducing=Zs, likelihood=problems.gaussian(NOISE))
    assert set(svi.get_params(state)) == {"variance", "lengthscale"}


# ---------------------------------------------------------------- a fitted function inside another model


def test_a_fitted_function_is_a_constant_of_another_model(setting):
    X, y, Zs, qs = setting
    params = problems.q_params(qs[:2]) | HYPER
    arguments = {"inducing": Zs[:2], "likelihood": problems.gaussian(NOISE)}
    fitted = partial(ogp.posterior, problems.model, ogp.AutoSparseGP(problems.model), params, X, y, **arguments)

    def model(X, y, mean=None):
        mean = fitted()["f"](X).mean if mean is None else mean
        f = ogp.gp("f", kernels.RBF(0.9), Zs[2])  # of the same name
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X) + mean, NOISE), obs=y)

    sites = handlers.trace(handlers.seed(model, 0)).get_trace(X, y)
    assert list(sites) == ["f.u0", "data", "y"]
    runs = []
    for mean in (None, fitted()["f"](X).mean):
        svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
        runs.append(svi.run(jax.random.PRNGKey(1), 5, X, y, mean, progress_bar=False))
    assert set(runs[0].params) == {"f.u0_loc", "f.u0_scale_tril"}
    assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-10)
    # and `posterior` of the outer model knows its own function only
    guide = ogp.AutoSparseGP(model)
    outer = ogp.posterior(model, guide, runs[0].params, X, y)
    assert outer["f"].blocks[0].whitener.shape == (5, 5)


# ---------------------------------------------------------------- handlers around the statement


def test_functions_of_two_scopes_may_be_drawn_outside_of_them(setting):
    X, y, Zs, _ = setting

    def model(X, y):
        with handlers.scope(prefix="a"):
            f = ogp.gp("f", kernels.RBF(0.9), Zs[0])
        with handlers.scope(prefix="b"):
            g = ogp.gp("f", kernels.RBF(0.5), Zs[1])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f(X).sample() + g(X).sample(), NOISE), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model, residual="tight"), optax.adam(0.1), TraceMeanField_ELBO())
    result = svi.run(jax.random.PRNGKey(0), 3, X, y, progress_bar=False)
    assert np.isfinite(result.losses).all()
    assert {"a/f_residual_scale", "b/f_residual_scale"} <= set(result.params)


def test_handlers_that_ask_for_names_see_named_messages_only(setting):
    X, y, Zs, _ = setting

    def model(X, y):
        numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = ogp.gp("f", kernels.RBF(0.9), Zs[0])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)

    hidden = handlers.block(handlers.seed(model, rng_seed=0), hide_fn=lambda site: site["name"] == "scale")
    assert list(handlers.trace(hidden).get_trace(X, y)) == ["f.u0", "data", "y"]


# ---------------------------------------------------------------- plates


def rows_and_outputs(X, sets, layout):
    """Rows of data beside three outputs of each, whose draws are tightened; how the plates lie differs."""
    N = len(X)
    f = ogp.gp("f", kernels.RBF(0.9), sets[0], num_latents=3 if layout == "rows left" else None)
    if layout == "rows left":
        with numpyro.plate("rows", 4 * N, subsample_size=N, dim=-2):
            h = f(X).sample()
            with numpyro.plate("outputs", 3, dim=-1):
                numpyro.sample("y", dist.Normal(h, NOISE), obs=jnp.zeros((N, 3)))
    elif layout == "one function":
        with numpyro.plate("rows", 4 * N, subsample_size=N, dim=-2):
            h = f(X).sample()[:, None]
            with numpyro.plate("outputs", 3, dim=-1):
                numpyro.sample("y", dist.Normal(h, NOISE), obs=jnp.zeros((N, 3)))
    elif layout == "one draw within both":
        with numpyro.plate("outputs", 3, dim=-2), numpyro.plate("rows", 4 * N, subsample_size=N, dim=-1):
            numpyro.sample("y", dist.Normal(f(X).sample(), NOISE), obs=jnp.zeros((3, N)))
    else:
        with numpyro.plate("rows", 4 * N, subsample_size=N):
            numpyro.sample("y", dist.Normal(f(X).sample(), NOISE), obs=jnp.zeros(N))


def test_of_two_plates_as_large_as_the_batch_the_one_that_subsamples_holds_the_rows(setting):
    X, _, Zs, _ = setting
    N = len(X)

    def model():
        f = ogp.gp("f", kernels.RBF(0.9), Zs[0], num_latents=N)
        with numpyro.plate("rows", 4 * N, subsample_size=N, dim=-2), numpyro.plate("outputs", N, dim=-1):
            numpyro.sample("y", dist.Normal(f(X).sample(), NOISE), obs=jnp.zeros((N, N)))

    guide = ogp.AutoSparseGP(model, residual="tight")
    guide_trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    sites = handlers.trace(handlers.replay(handlers.seed(model, 0), guide_trace)).get_trace()
    assert sites["f.residual_cost0"]["scale"] == 4
    assert sites["f.residual_cost0"]["fn"].batch_shape == ()  # all rows' costs in one, whatever plates are around


@pytest.mark.parametrize("layout", ["rows left", "one function", "one draw within both", "rows alone"])
def test_a_tightened_draw_pays_once_for_each_row_however_plates_lie(setting, layout):
    X, _, Zs, _ = setting
    guide = ogp.AutoSparseGP(rows_and_outputs, residual="tight")
    with handlers.block():
        guide_trace = handlers.trace(handlers.seed(guide, 0)).get_trace(X, Zs, layout)
    v = jnp.full(3 if layout == "rows left" else (), 0.3)
    guide_trace["f.u0"]["infer"]["numpyro_orthgp"] = guide_trace["f.u0"]["infer"]["numpyro_orthgp"]._replace(
        residual_scale=v
    )
    sites = handlers.trace(handlers.replay(handlers.seed(rows_and_outputs, 0), guide_trace)).get_trace(X, Zs, layout)
    cost = sites["f.residual_cost0"]
    paid = cost["scale"] * cost["fn"].log_prob(cost["value"]).sum()
    assert_allclose(-paid, 4 * len(X) * (3 if layout == "rows left" else 1) * oracles.residual_cost(0.3, 1), rtol=1e-12)


# ---------------------------------------------------------------- parameters that are not those of the fit


def test_posterior_refuses_parameters_that_are_not_the_fits(setting):
    X, y, Zs, qs = setting
    arguments = {"inducing": Zs, "likelihood": problems.gaussian(NOISE)}
    guide, params = ogp.AutoSparseGP(problems.model), problems.q_params(qs)
    params |= HYPER

    def fitted(params, guide=guide):
        return ogp.posterior(problems.model, guide, params, X, y, **arguments)["f"]

    assert fitted(params)(X).shape == X.shape[:1]
    with pytest.raises(ValueError, match=r"`params` must hold all parameters of the guide; it lacks 'f.u0_loc'"):
        fitted({})
    svi = SVI(problems.model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    result = svi.run(jax.random.PRNGKey(0), 2, X, y, progress_bar=False, **arguments)
    for wrong in (result, result.state):
        with pytest.raises(TypeError, match=r"`params` must be a dictionary .*result.params.*; got SVI"):
            fitted(wrong)
    values = {f"f.u{i}": jnp.full(size, VALUE) for i, size in enumerate(SIZES)}
    assert fitted(values, None)(X).shape == X.shape[:1]
    with pytest.raises(ValueError, match=r"Nothing says what 'f.u1' are"):
        fitted({name: value for name, value in values.items() if name != "f.u1"}, None)
    with pytest.raises(ValueError, match=r"Nothing says what 'f.u0', 'f.u1', 'f.u2' are"):
        fitted(params, lambda *args, **kwargs: numpyro.sample("other", dist.Normal(0, 1)))


def test_a_gp_outside_of_a_model_says_where_it_belongs(setting):
    with pytest.raises(ValueError, match=r"gp\(\) and orthogonal\(\) belong in a model or a guide"):
        ogp.gp("f", kernels.RBF(0.9), setting[2][0])


def test_plates_of_a_fitted_model_pick_evenly_spread_rows(rng):
    """Not at random, by a loop that is compiled each time; nor the first ones, of data that may be sorted."""
    X = rng.normal(size=(30, 1))
    seen = []

    def model(X):
        f = ogp.gp("f", kernels.RBF(1.0), X[:4])
        with numpyro.plate("data", 30, subsample_size=7) as rows:
            seen.append(np.asarray(rows))
            numpyro.sample("y", likelihoods.Gaussian(f(X[rows]), 0.1), obs=jnp.zeros(7))

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X))
    seen.clear()
    ogp.posterior(model, guide, params, X)
    assert seen and all(list(rows) == [0, 4, 8, 12, 17, 21, 25] for rows in seen)
