"""The same model under every kind of NumPyro inference, and what each must find."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from tests import oracles, problems

Z = jnp.linspace(-2, 2, 5)[:, None]
O = jnp.linspace(-1.6, 1.7, 4)[:, None]
NOISE = 0.3


def regression(X, y=None, *, N=None, sets=(Z, O)):
    """A NumPyro user's model: priors on hyperparameters, two orthogonal sets, a plate."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    f = ogp.gp("f", kernels.Matern52(lengthscale), list(sets))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("data", N or X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def fixed(X, y=None, *, sets=(Z, O), likelihood=None):
    """All hyperparameters known."""
    f = ogp.gp("f", kernels.Matern52(0.9), list(sets))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", (likelihood or problems.gaussian(NOISE))(f(X)), obs=y)


@pytest.fixture
def xy(rng):
    X = jnp.asarray(rng.uniform(-2, 2, (40, 1)))
    return X, jnp.sin(2 * X[:, 0]) + NOISE * jnp.asarray(rng.normal(size=40))


def fit(model, guide, *args, steps=600, rate=0.03, elbo=None, **kwargs):
    svi = SVI(model, guide, optax.adam(rate), elbo or TraceMeanField_ELBO())
    return svi.run(jax.random.PRNGKey(0), steps, *args, progress_bar=False, **kwargs)


def test_bound_does_not_depend_on_the_key_and_nothing_warns(xy, recwarn):
    guide = ogp.AutoSparseGP(regression)
    result = fit(regression, guide, *xy, steps=5)
    loss = jax.jit(lambda key: TraceMeanField_ELBO().loss(key, result.params, regression, guide, *xy))
    losses = [loss(jax.random.PRNGKey(k)) for k in range(4)]
    assert len({float(v) for v in losses}) == 1
    assert not [w for w in recwarn if "mean field" in str(w.message)]


def test_svi_reaches_the_collapsed_optimum(xy):
    X, y = xy
    guide = ogp.AutoSparseGP(fixed)
    result = fit(fixed, guide, X, y, sets=(Z,), steps=3000, rate=0.02)
    best = oracles.titsias2009(oracles.matern52(1.0, 0.9), np.asarray(X), np.asarray(y), np.asarray(Z), NOISE**2)
    assert best - 1e-2 < -result.losses[-1] < best + 1e-6


def test_minibatches_and_jitted_updates(xy):
    X, y = xy
    svi = SVI(regression, ogp.AutoSparseGP(regression, residual="tight"), optax.adam(0.02), TraceMeanField_ELBO())
    state = svi.init(jax.random.PRNGKey(0), X[:10], y[:10], N=40)
    step = jax.jit(lambda state, X, y: svi.update(state, X, y, N=40))
    before = svi.evaluate(state, X, y)
    order = np.random.default_rng(0)
    for _ in range(400):
        rows = order.integers(0, 40, 10)
        state, _ = step(state, X[rows], y[rows])
    assert svi.evaluate(state, X, y) < before - 20


@pytest.mark.parametrize("elbo, particles", [(Trace_ELBO, 1), (Trace_ELBO, 4), (TraceMeanField_ELBO, 3)])
def test_other_elbos_agree_on_average(xy, elbo, particles):
    X, y = xy
    elbo = elbo(num_particles=particles)
    guide = ogp.AutoSparseGP(fixed)
    result = fit(fixed, guide, X, y, steps=200)
    exact = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), result.params, fixed, guide, X, y)
    one = jax.jit(jax.vmap(lambda key: elbo.loss(key, result.params, fixed, guide, X, y)))
    values = np.array(one(jax.random.split(jax.random.PRNGKey(1), 400)))
    assert abs(values.mean() - exact) < 4 * values.std() / np.sqrt(400) + 1e-8


@pytest.mark.parametrize("auto", [AutoNormal, pytest.param(AutoMultivariateNormal, marks=pytest.mark.slow), AutoDelta])
def test_numpyros_own_guides(xy, auto):
    """No belief: the model integrates p(f | u) at sampled values, and the bound is one too."""
    X, y = xy
    result = fit(regression, auto(regression), X, y, steps=800, rate=0.02, elbo=Trace_ELBO())
    assert np.mean(result.losses[-50:]) < np.mean(result.losses[:20]) - 10
    if auto is not AutoDelta:  # a point has no density: its "ELBO" is no bound
        ours = fit(regression, ogp.AutoSparseGP(regression, hyper=AutoNormal), X, y, steps=800, rate=0.02)
        assert np.mean(ours.losses[-200:]) < np.mean(result.losses[-200:]) + 2


def test_autonormal_over_inducing_variables_has_an_analytic_divergence(xy):
    result = fit(fixed, AutoNormal(fixed), *xy, steps=3)
    q = dist.Normal(result.params["f.u0_auto_loc"], result.params["f.u0_auto_scale"]).to_event(1)
    p = handlers.trace(handlers.seed(fixed, 0)).get_trace(*xy)["f.u0"]["fn"]
    kl = numpyro.distributions.kl.kl_divergence(q, p)
    np.testing.assert_allclose(kl, numpyro.distributions.kl.kl_divergence(q, dist.Normal(jnp.zeros(5), 1).to_event(1)))


def test_bayesian_hyperparameters(xy):
    X, y = xy
    guide = ogp.AutoSparseGP(regression, hyper=AutoNormal)
    result = fit(regression, guide, X, y, steps=1500, rate=0.02)
    draws = guide.sample_posterior(jax.random.PRNGKey(0), result.params, X, y, sample_shape=(300,))
    assert draws["f.u0"].shape == (300, 5) and draws["noise"].shape == (300,)
    assert 0.2 < draws["noise"].mean() < 0.45 and draws["noise"].std() > 0.01
    assert set(guide.median(result.params)) == {"lengthscale", "noise", "f.u0", "f.u1"}


def test_nuts_over_whitened_variables_sees_the_data(xy):
    """Pyro's sparse GP under NUTS returns the prior of u. Here, the exact Gaussian posterior of u is known."""
    X, y = xy
    mcmc = MCMC(NUTS(fixed), num_warmup=300, num_samples=1500, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), X, y, sets=(Z,))
    u = np.asarray(mcmc.get_samples()["f.u0"])
    mean, cov = oracles.optimal_q(
        oracles.matern52(1.0, 0.9), np.asarray(X), np.asarray(y), np.asarray(Z), NOISE**2, whitened=True
    )
    error = np.sqrt(np.diag(cov) / 300)  # at least 300 effective draws of 1500
    np.testing.assert_array_less(np.abs(u.mean(0) - mean), 4 * error)
    np.testing.assert_allclose(np.cov(u.T), cov, atol=0.35 * np.diag(cov).max())


def test_nuts_with_hyperparameters_and_mean_only(xy):
    X, y = xy
    mcmc = MCMC(NUTS(regression), num_warmup=150, num_samples=150, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), X, y, sets=(Z, O, ogp.MeanOnly(X)))
    samples = mcmc.get_samples()
    assert {"f.u0", "f.u1", "lengthscale", "noise"} == set(samples)
    assert 0.2 < samples["noise"].mean() < 0.45
    pointwise = log_likelihood(regression, samples, X, y)["y"]
    assert pointwise.shape == (150, 40) and bool(jnp.isfinite(pointwise).all())
    draws = Predictive(regression, samples)(jax.random.PRNGKey(1), X)["y"]
    assert draws.shape == (150, 40) and np.corrcoef(draws.mean(0), y)[0, 1] > 0.8


def test_sampling_under_nuts_is_refused_with_advice(xy):
    def model(X, y):
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        numpyro.sample("y", dist.Normal(f(X).sample(), 1.0), obs=y)

    with pytest.raises(ValueError, match="needs a random key"):
        log_density(model, xy, {}, {"f.u0": jnp.zeros(5)})


@pytest.mark.parametrize(
    "draw, match",
    [
        (lambda f, X: f(X).sample(), r"Inference that has no randomness \(NUTS\) cannot sample f"),
        (lambda f, X: f(X).independent().sample(), r"Inference that has no randomness \(NUTS\) cannot sample f"),
        (lambda f, X: ogp.DeepGP([f, f])(X).mean, r"Inference that has no randomness \(NUTS\) cannot sample f"),
        (lambda f, X: f(X).sample(numpyro.prng_key()), r"`f` is drawn in inference that takes the log density"),
        (lambda f, X: f(X).draw(numpyro.prng_key()), r"`f` is drawn in inference that takes the log density"),
        (
            lambda f, X: f(X).independent().draw(numpyro.prng_key()),
            r"`f` is drawn in inference that takes the log density",
        ),
        (lambda f, X: f.joint(X).sample(numpyro.prng_key()), r"`f` is drawn in inference that takes the log density"),
        (
            lambda f, X: f.sample_paths(numpyro.prng_key(), 1)(X)[0],
            r"`f` is drawn in inference that takes the log density",
        ),
    ],
)
def test_draws_in_nuts_are_refused(xy, draw, match):
    """NumPyro gives the same key at each step: the residual's noise was that of one draw, and NUTS took it for known."""

    def model(X, y):
        f = ogp.gp("f", kernels.RBF(1.0), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(draw(f, X), 1.0), obs=y)

    with pytest.raises(ValueError, match=match):
        MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.PRNGKey(0), *xy)
    svi = SVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO())  # whose first look has that key too
    assert np.isfinite(svi.evaluate(svi.init(jax.random.PRNGKey(0), *xy), *xy))


@pytest.mark.parametrize("sets", [(Z, O), (Z, ogp.MeanOnly(O))], ids=["SOLVE-GP", "ODVGP"])
def test_predictive_and_posterior_agree(xy, sets):
    X, y = xy
    guide = ogp.AutoSparseGP(fixed, residual="tight")
    result = fit(fixed, guide, X, y, sets=sets, steps=400)
    Xs = jnp.linspace(-3, 3, 8)[:, None]
    f = ogp.posterior(fixed, guide, result.params, X, y, sets=sets)["f"]
    predictive = Predictive(fixed, guide=guide, params=result.params, num_samples=20_000)
    draws = np.asarray(predictive(jax.random.PRNGKey(2), Xs, sets=sets)["y"])
    joint = f.joint(Xs)
    cov = np.asarray(joint.covariance_matrix) + NOISE**2 * np.eye(8)
    sd = np.sqrt(np.diag(cov))
    np.testing.assert_array_less(np.abs(draws.mean(0) - f(Xs).mean), 4 * sd / np.sqrt(20_000))
    # Draws at several inputs are draws of one function: their covariance is that of the joint distribution.
    error = np.sqrt((np.outer(sd**2, sd**2) + cov**2) / 20_000)
    np.testing.assert_array_less(np.abs(np.cov(draws.T) - cov), 5 * error)
    assert abs(cov[0, 1]) > 20 * error[0, 1]


def test_prior_predictive_is_the_gp_prior(rng):
    Xs = jnp.asarray(rng.uniform(-2, 2, (5, 1)))
    draws = np.asarray(Predictive(fixed, num_samples=20_000)(jax.random.PRNGKey(0), Xs)["y"])
    cov = oracles.matern52(1.0, 0.9)(np.asarray(Xs), np.asarray(Xs)) + NOISE**2 * np.eye(5)
    np.testing.assert_allclose(np.cov(draws.T), cov, atol=0.06)


def test_plain_numpyro_likelihood_by_sampling(xy):
    """`dist.Poisson(jnp.exp(f(X).sample()))`: the same bound as the integrated likelihood, estimated."""
    X, y = xy
    counts = jnp.round(jnp.exp(y))

    def model(X, y=None, *, plain):
        f = ogp.gp("f", kernels.Matern52(0.9), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f(X).sample())) if plain else likelihoods.Poisson(f(X)), obs=y)

    def check(guide):
        params = fit(model, guide, X, counts, steps=200, plain=False).params | {"f_residual_scale": jnp.asarray(0.6)}

        def loss(key, plain):
            return TraceMeanField_ELBO().loss(key, params, model, guide, X, counts, plain=plain)

        exact = loss(jax.random.PRNGKey(0), False)
        values = jax.jit(jax.vmap(lambda key: loss(key, True)))(jax.random.split(jax.random.PRNGKey(3), 2000))
        assert abs(values.mean() - exact) < 4 * values.std() / np.sqrt(2000)

    check(ogp.AutoSparseGP(model))
    check(ogp.AutoSparseGP(model, residual="tight"))


def test_importance_weighted_objectives_must_see_values(xy):
    X, y = xy
    trained = fit(fixed, ogp.AutoSparseGP(fixed), X, y, steps=300).params
    with pytest.raises(ValueError, match=r"RenyiELBO.*analytic=False"):
        RenyiELBO(num_particles=2).loss(jax.random.PRNGKey(0), trained, fixed, ogp.AutoSparseGP(fixed), X, y)
    exact = oracles.exact_log_marginal(oracles.matern52(1.0, 0.9), np.asarray(X), np.asarray(y), NOISE**2)
    for residual in ("prior", "tight"):
        sampled = ogp.AutoSparseGP(fixed, analytic=False, residual=residual)
        params = trained | {"f_residual_scale": jnp.asarray(0.8)}
        guide = ogp.AutoSparseGP(fixed, residual=residual)
        elbo = float(-TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, fixed, guide, X, y))
        loss = jax.jit(lambda key: RenyiELBO(num_particles=50).loss(key, params, fixed, sampled, X, y))  # noqa: B023
        bounds = -np.array([loss(jax.random.PRNGKey(k)) for k in range(40)])
        error = bounds.std() / np.sqrt(40)
        assert elbo - 4 * error < bounds.mean() < exact + 4 * error


DRAWS = {
    "joint": lambda f, X: f(X).sample(),
    "row by row": lambda f, X: f(X).independent().sample(),
    "a path": lambda f, X: f.sample_paths(numpyro.prng_key(), 1)(X)[0],
    "f.joint": lambda f, X: f.joint(X).sample(numpyro.prng_key()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_of_a_residual_that_importance_weights_do_not_see(xy, draw):
    """Of 500 particles, with six rows and mean-only points, the "bound" was -6.27 for a log p(y) of -6.33."""

    def model(X, y, sets):
        f = ogp.gp("f", kernels.Matern52(0.9), list(sets))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(draw(f, X), NOISE), obs=y)

    def loss(elbo, sets, guide):
        svi = SVI(model, guide, optax.sgd(0.0), elbo)
        return svi.evaluate(svi.init(jax.random.PRNGKey(0), *args, sets), *args, sets)

    args = [a[:4] for a in xy]
    renyi, points = RenyiELBO(num_particles=2), (Z, ogp.MeanOnly(O))
    assert np.isfinite(loss(renyi, (Z, O), ogp.AutoSparseGP(model, analytic=False)))
    assert np.isfinite(loss(Trace_ELBO(), points, ogp.AutoSparseGP(model, analytic=False)))
    for guide in (ogp.AutoSparseGP(model, analytic=False), AutoNormal(model)):
        with pytest.raises(ValueError, match=r"`f` is drawn under RenyiELBO, and has mean-only points \(MeanOnly\)"):
            loss(renyi, points, guide)
    if draw in (DRAWS["joint"], DRAWS["row by row"]):
        with pytest.raises(ValueError, match=r"`f` is drawn under RenyiELBO, and has a tightened residual"):
            loss(renyi, (Z, O), ogp.AutoSparseGP(model, analytic=False, residual="tight"))


def test_condition_substitute_and_block(xy):
    X, y = xy
    u = {"f.u0": jnp.ones(5), "f.u1": jnp.zeros(4)}
    density, trace = log_density(fixed, (X, y), {}, u)
    prior = dist.Normal(0, 1).log_prob(jnp.ones(5)).sum() + dist.Normal(0, 1).log_prob(jnp.zeros(4)).sum()
    known = [
        oracles.WhitenedSet(np.asarray(s), np.asarray(u[n]), np.zeros((len(s),) * 2))
        for n, s in (("f.u0", Z), ("f.u1", O))
    ]
    mean, cov = oracles.q_f(oracles.matern52(1.0, 0.9), known, np.asarray(X))  # p(f | u): what is left is the residual
    np.testing.assert_allclose(trace["y"]["fn"].variance, np.diag(cov) + NOISE**2, atol=1e-6)
    np.testing.assert_allclose(trace["y"]["fn"].mean, mean, atol=1e-6)
    np.testing.assert_allclose(density, prior + trace["y"]["fn"].log_prob(y).sum(), rtol=1e-6)
    conditioned = handlers.trace(handlers.seed(handlers.condition(fixed, u), 0)).get_trace(X, y)
    assert conditioned["f.u0"]["is_observed"]
    np.testing.assert_allclose(conditioned["y"]["fn"].mean, mean, atol=1e-6)


def test_scope_and_two_gps_in_one_model(xy, recwarn):
    X, y = xy

    def two(X, y=None):
        f, g = ogp.gp("f", kernels.RBF(0.7), [Z, O]), ogp.gp("g", kernels.Matern32(1.0), Z)
        with numpyro.plate("data", len(X)):
            both = ogp.stack([f(X), g(X)])
            numpyro.sample(
                "y", likelihoods.Likelihood(both, lambda h: dist.Normal(h[..., 0], jnp.exp(h[..., 1] - 1))), obs=y
            )

    scoped = handlers.scope(two, prefix="inner", divider="/")
    guide = ogp.AutoSparseGP(
        scoped, residual={"inner/f": "tight", "inner/g": "tight"}, covariance={"inner/g": "diagonal"}
    )
    result = fit(scoped, guide, X, y, steps=300)
    assert {"inner/f.u0_scale_tril", "inner/f.u1_loc", "inner/g.u0_scale", "inner/f_residual_scale"} <= set(
        result.params
    )
    assert result.losses[-1] < result.losses[0] - 10
    assert set(ogp.posterior(scoped, guide, result.params, X, y)) == {"inner/f", "inner/g"}
    assert not [w for w in recwarn if "mean field" in str(w.message)]


def test_masks_and_missing_outputs(xy):
    X, y = xy
    keep = jnp.arange(40) % 3 > 0

    def masked(X, y=None, mask=None):
        f = ogp.gp("f", kernels.Matern52(0.9), [Z, O])
        with numpyro.plate("data", len(X)), handlers.mask(mask=mask if mask is not None else True):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)

    def missing(X, y=None, mask=None):
        f = ogp.gp("f", kernels.Matern52(0.9), [Z, O])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y, obs_mask=mask)

    def sampled(X, y=None, mask=None):
        g = numpyro.sample("f.unrelated_unobserved", dist.Normal(0, 1))  # an ordinary latent site, whatever its name
        f = ogp.gp("f", kernels.Matern52(0.9), [Z, O])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f(X).sample() + 0 * g, NOISE), obs=y, obs_mask=mask)

    plain = fit(sampled, ogp.AutoSparseGP(sampled), X, y, keep, steps=5)
    assert {"f.unrelated_unobserved_auto_loc"} == {n for n in plain.params if "auto" in n} and np.isfinite(
        plain.losses
    ).all()

    params = fit(fixed, ogp.AutoSparseGP(fixed), X[keep], y[keep], steps=100).params
    holes = jnp.where(keep, y, jnp.nan)

    def value(model, *args, **options):
        guide = ogp.AutoSparseGP(model, **options)
        loss = jax.jit(
            jax.value_and_grad(lambda p: TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), p, model, guide, *args))
        )
        return loss(params)

    for options in ({}, {"covariance": "full"}):
        expected, gradient = value(fixed, X[keep], y[keep], **options)
        for model, outputs in ((masked, y), (masked, holes), (missing, y)):
            loss, g = value(model, X, outputs, keep, **options)
            np.testing.assert_allclose(loss, expected, rtol=1e-10)
            for name in gradient:
                np.testing.assert_allclose(g[name], gradient[name], atol=1e-8)


def test_vmap_over_seeds(xy):
    X, y = xy
    svi = SVI(regression, ogp.AutoSparseGP(regression), optax.adam(0.02), TraceMeanField_ELBO())

    def train(key):
        state = svi.init(key, X, y)
        state, losses = jax.lax.scan(lambda s, _: svi.update(s, X, y), state, None, length=50)
        return losses, ogp.posterior(regression, svi.guide, svi.get_params(state), X, y)["f"]

    losses, functions = jax.jit(jax.vmap(train))(jax.random.split(jax.random.PRNGKey(0), 3))
    assert losses.shape == (3, 50) and bool((losses[:, -1] < losses[:, 0]).all())
    marginals = jax.vmap(lambda f: f(X))(functions)  # a GPFunction is a pytree
    assert marginals.mean.shape == (3, 40)


def test_init_params_start_from_given_values(xy):
    X, y = xy
    svi = SVI(regression, ogp.AutoSparseGP(regression), optax.adam(0.02), TraceMeanField_ELBO())
    given = {"f.u0_loc": jnp.arange(5.0), "f.u0_scale_tril": 0.1 * jnp.eye(5) + 0.01 * jnp.tril(jnp.ones((5, 5)))}
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y, init_params=given))
    for name, value in given.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-10)


def test_parameters_of_another_number_of_points_are_refused(xy):
    X, y = xy
    guide = ogp.AutoSparseGP(regression)
    svi = SVI(regression, guide, optax.adam(0.02), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=r"`f.u0_loc` must have shape \(5,\), that of the model's .*; got \(3,\)"):
        svi.init(jax.random.PRNGKey(0), X, y, init_params={"f.u0_loc": jnp.zeros(3)})
    params = svi.get_params(svi.init(jax.random.PRNGKey(0), X, y))
    with pytest.raises(ValueError, match=r"u0_scale_tril'\]` must have shape \(5, 5\), .* \(6, 6\).* number of points"):
        ogp.posterior(regression, guide, params | {"f.u0_scale_tril": jnp.eye(6)}, X, y)


def test_a_guide_that_is_none(xy):
    X, y = xy
    mcmc = MCMC(NUTS(regression), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(TypeError, match=r"`guide` must be the guide that was fitted, or None .*; got MCMC\."):
        ogp.posterior(regression, mcmc, {}, X, y)


def test_posterior_of_a_random_hyper_guide_maps_over_keys(xy):
    X, y = xy
    guide = ogp.AutoSparseGP(regression, hyper=AutoNormal)
    result = fit(regression, guide, X, y, steps=100)
    draw = jax.vmap(lambda key: ogp.posterior(regression, guide, result.params, X, y, rng_key=key)["f"](X[:3]).variance)
    values = jax.jit(draw)(jax.random.split(jax.random.PRNGKey(0), 5))
    assert values.shape == (5, 3) and bool((values.std(0) > 0).all())


def test_data_in_32_bits_beside_parameters_in_64(rng):
    """A table in float32 where 64-bit floats are on: q is in float32, the kernel in float64."""
    X = rng.normal(size=(140, 2))

    def model(X, y):
        f = ogp.gp("f", kernels.RBF(numpyro.param("lengthscale", jnp.ones(2))), X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)

    losses = []
    for dtype in (np.float32, np.float64):
        svi = SVI(model, ogp.AutoSparseGP(model), optax.sgd(1e-4), TraceMeanField_ELBO())
        data = X.astype(dtype), np.sin(X[:, 0]).astype(dtype)
        losses.append(svi.run(jax.random.PRNGKey(0), 3, *data, progress_bar=False).losses)
    np.testing.assert_allclose(*losses, rtol=1e-4)
