"""What a guide is asked for: its Gaussians, whatever it hands to fits; and parameters that are those of this model."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI, Predictive, RenyiELBO, TraceMeanField_ELBO, autoguide

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

Z = np.linspace(-1.0, 1.0, 5)[:, None]
X = jnp.linspace(-1.2, 1.2, 9)[:, None]
Y = jnp.sin(3 * X[:, 0])
M, LENGTH, NOISE = len(Z), 0.6, 0.3


def model(X, y=None):
    f = ogp.gp("f", kernels.RBF(LENGTH), jnp.asarray(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)


def two_sets(X, y=None):
    f = ogp.gp("f", kernels.RBF(LENGTH), [jnp.asarray(Z), jnp.asarray(Z + 0.25)])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), NOISE), obs=y)


def by_hand(X, y=None):
    ogp.gp_posterior("f", M, analytic=False)


def normal(X, y=None):
    loc = numpyro.param("loc", jnp.zeros(M))
    scale = numpyro.param("scale", jnp.full(M, 0.4), constraint=constraints.positive)
    numpyro.sample("f.u0", dist.Normal(loc, scale).to_event(1))


def multivariate(X, y=None):
    loc = numpyro.param("loc", jnp.zeros(M))
    tril = numpyro.param("tril", 0.4 * jnp.eye(M), constraint=constraints.lower_cholesky)
    numpyro.sample("f.u0", dist.MultivariateNormal(loc, scale_tril=tril))


def of_standard_normals(X, y=None):
    """loc + L e, as a distribution."""
    loc = numpyro.param("loc", jnp.zeros(M))
    tril = numpyro.param("tril", 0.4 * jnp.eye(M), constraint=constraints.lower_cholesky)
    standard = dist.Normal(jnp.zeros(M), 1.0).to_event(1)
    numpyro.sample("f.u0", dist.TransformedDistribution(standard, dist.transforms.LowerCholeskyAffine(loc, tril)))


def of_scaled_normals(X, y=None):
    loc, scale = numpyro.param("loc", jnp.full(M, 0.1)), numpyro.param("scale", jnp.full(M, -0.4))
    maps = [dist.transforms.AffineTransform(loc, 1.0), dist.transforms.AffineTransform(0.2, scale)]
    numpyro.sample("f.u0", dist.TransformedDistribution(dist.Normal(jnp.ones(M), 0.8), maps).to_event(1))


def chained(X, y=None):
    """Each set's Gaussian is one, but the second moves with the draw of the first."""
    first = numpyro.sample("f.u0", dist.Normal(jnp.zeros(M), 0.5).to_event(1))
    numpyro.sample("f.u1", dist.Normal(first, 0.5).to_event(1))


GAUSSIAN = {
    "AutoSparseGP": lambda: ogp.AutoSparseGP(model),
    "AutoSparseGP, samples only": lambda: ogp.AutoSparseGP(model, analytic=False),
    "AutoSparseGP, diagonal, samples only": lambda: ogp.AutoSparseGP(model, covariance="diagonal", analytic=False),
    "AutoSparseGP, tight, samples only": lambda: ogp.AutoSparseGP(model, residual="tight", analytic=False),
    "gp_posterior, samples only": lambda: by_hand,
    "Normal": lambda: normal,
    "MultivariateNormal": lambda: multivariate,
    "affine of Normal, full": lambda: of_standard_normals,
    "affine of Normal, diagonal": lambda: of_scaled_normals,
    "AutoNormal": lambda: autoguide.AutoNormal(model),
    "AutoDiagonalNormal": lambda: autoguide.AutoDiagonalNormal(model),
    "AutoMultivariateNormal": lambda: autoguide.AutoMultivariateNormal(model),
    "AutoLowRankMultivariateNormal": lambda: autoguide.AutoLowRankMultivariateNormal(model),
}  # fmt: skip


def moved(guide, model=model):
    """The guide's parameters, away from where they start."""
    svi = SVI(model, guide, optax.adam(0.01), RenyiELBO(num_particles=2))
    if isinstance(guide, ogp.AutoSparseGP):
        svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(random.PRNGKey(0), X, Y))
    rng = np.random.default_rng(1)

    def move(value):
        value = np.asarray(value)
        step = rng.normal(size=value.shape).astype(value.dtype)
        if value.ndim == 2 and value.shape[0] == value.shape[1]:
            return jnp.asarray(0.6 * value + np.tril(0.2 * step, -1))
        return jnp.asarray(value * np.exp(0.3 * step) + (0.5 * step if np.any(value <= 0) else 0))

    return {name: move(value) for name, value in params.items()}


def dense_moments(u, at):
    """Mean and variance of f at inputs, of draws of the whitened u, shape (S, M)."""
    k = lambda a, b: np.exp(-((a - b.T) ** 2) / (2 * LENGTH**2))  # noqa: E731
    L = np.linalg.cholesky(k(Z, Z) + 1e-10 * np.eye(M))
    A = np.linalg.solve(L, k(Z, at))
    return u @ A, 1 - (A**2).sum(0)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_posterior_has_the_guides_gaussian(name):
    guide = GAUSSIAN[name]()
    params = moved(guide)
    at = np.array([[-0.7], [0.1], [1.4]])
    f = ogp.posterior(model, guide, params, X, Y)["f"]
    got = f(jnp.asarray(at))
    draws = Predictive(guide, params=params, num_samples=20_000)(random.PRNGKey(3), X, Y)["f.u0"]
    values, residual = dense_moments(np.asarray(draws, float), at)
    variance = values.var(0) + residual
    assert f.drawn == ()
    np.testing.assert_allclose(got.mean, values.mean(0), atol=0.03)
    np.testing.assert_allclose(got.variance, variance, rtol=0.05, atol=1e-4)
    again = jax.jit(lambda params: ogp.posterior(model, guide, params, X, Y)["f"](jnp.asarray(at)).variance)(params)
    np.testing.assert_allclose(again, got.variance, rtol=1e-4, atol=1e-6)


def test_posterior_of_a_joined_gaussian_is_given_what_else_was_drawn():
    """With a random hyperparameter beside u, correlated: the Gaussian of u given the draw, by the textbook's formula."""

    def random_noise(X, y=None):
        noise = numpyro.sample("noise", dist.Normal(0.0, 1.0))
        f = ogp.gp("f", kernels.RBF(LENGTH), jnp.asarray(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), jnp.exp(noise)), obs=y)

    guide = autoguide.AutoMultivariateNormal(random_noise)
    params = moved(guide, random_noise)
    f = ogp.posterior(random_noise, guide, params, X, Y, rng_key=random.PRNGKey(4))["f"]
    guide_key, _ = random.split(random.PRNGKey(4))
    draw = np.asarray(
        numpyro.handlers.seed(numpyro.handlers.substitute(guide, params), guide_key)(X, Y)["noise"], float
    )
    loc, L = np.asarray(params["auto_loc"], float), np.asarray(params["auto_scale_tril"], float)
    C = L @ L.T  # sites stand in the order of the model: noise, f.u0
    gain = C[1:, :1] / C[0, 0]
    (q,) = f.beliefs
    np.testing.assert_allclose(q.loc, loc[1:] + gain[:, 0] * (draw - loc[0]), atol=1e-4)
    np.testing.assert_allclose(q.scale_tril @ q.scale_tril.T, C[1:, 1:] - gain @ C[:1, 1:], atol=1e-4)


@pytest.mark.parametrize("make", [lambda: chained, lambda: autoguide.AutoMultivariateNormal(two_sets)])
def test_what_has_no_gaussian_of_its_own_is_a_draw_and_says_so(make):
    guide = make()
    f = ogp.posterior(two_sets, guide, {} if guide is chained else moved(guide, two_sets), X, Y)["f"]
    assert 0 in f.drawn


@pytest.mark.parametrize(
    "name, given, said", [("draws", {}, 1), ("draws", {"rng_key": random.key(1)}, 0), ("a point", {}, 0)]
)
def test_posterior_says_that_it_is_of_one_draw(name, given, said):
    """The spread of draws is as large as that of the guide, which variances lack."""

    def point(X, y=None):
        numpyro.sample("f.u0", dist.Delta(numpyro.param("at", jnp.ones(M)), event_dim=1))

    guide = {"draws": student, "a point": point}[name]
    params = {} if name == "draws" else {"at": jnp.ones(M)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f = ogp.posterior(model, guide, params, X, Y, **given)["f"]
    assert f.drawn == (0,)
    assert [w.filename for w in caught if "gives one draw of 'f.u0'" in str(w.message)] == [__file__] * said
    if said:
        draws = jax.vmap(lambda key: ogp.posterior(model, guide, {}, X, Y, rng_key=key)["f"](Z[:1]).mean[0])
        values = draws(random.split(random.key(0), 300))
        u = dist.StudentT(5.0, 0.0, 0.3).sample(random.key(1), (20_000, M))
        assert np.std(values) == pytest.approx(float(dense_moments(u, Z[:1])[0].std()), rel=0.2)
        assert f(Z[:1]).variance < 1e-4


def test_check_names_sets_that_are_drawn():
    guide = autoguide.AutoDelta(model)
    f = ogp.posterior(model, guide, {"f.u0_auto_loc": jnp.ones(M)} | moved(guide), X, Y)["f"]
    assert f.drawn == (0,)
    report = ogp.check(model, student, {}, X, Y, num_samples=30)
    assert np.isnan(report.functions["f"].sets[0].divergence) and "nan" not in str(report)
    assert "f.u0: the guide gives one draw, not a Gaussian" in str(report)
    assert not any("does nothing" in line for line in report.advice)
    plain = str(ogp.check(model, normal, moved(normal), X, Y, num_samples=30))
    assert "no Gaussian" not in plain


def student(X, y=None):
    numpyro.sample("f.u0", dist.StudentT(5.0, jnp.zeros(M), 0.3).to_event(1))


def test_importance_weights_are_refused_for_gaussians_only():
    for analytic in (True, False):
        svi = SVI(model, ogp.AutoSparseGP(model, analytic=analytic), optax.adam(0.01), RenyiELBO(num_particles=2))
        state = svi.init(random.PRNGKey(0), X, Y)
        if analytic:
            with pytest.raises(ValueError, match="RenyiELBO weighs particles by importance"):
                svi.evaluate(state, X, Y)
        else:
            assert np.isfinite(svi.evaluate(state, X, Y))


# Parameters of another model.


def learned(X, y=None):
    length = numpyro.param("length", 0.6, constraint=constraints.positive)
    noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
    f = ogp.gp("f", kernels.RBF(length), jnp.asarray(Z))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


@pytest.fixture(scope="module")
def fitted():
    guide = ogp.AutoSparseGP(learned)
    svi = SVI(learned, guide, optax.adam(0.01), TraceMeanField_ELBO())
    state = svi.init(random.PRNGKey(0), X, Y)
    return guide, svi.get_params(state), svi.optim.get_params(state.optim_state)


ASKING = {
    "posterior": ogp.posterior,
    "khat": lambda *args: ogp.khat(*args, num_samples=30),
    "check": lambda *args: ogp.check(*args, num_samples=30),
    "to_arviz": lambda *args: ogp.to_arviz(*args, num_samples=30),
}


@pytest.mark.parametrize("ask", ASKING)
def test_parameters_of_another_model_are_refused(fitted, ask):
    guide, params, unconstrained = fitted
    without = {name: v for name, v in params.items() if name != "length"}
    with pytest.raises(ValueError, match="'length'"):
        ASKING[ask](learned, guide, without, X, Y)
    with pytest.raises(ValueError, match="'length'"):
        ASKING[ask](learned, guide, without | {"lengthscale": jnp.asarray(0.6)}, X, Y)
    with pytest.raises(ValueError, match=r"optimizer's unconstrained parameters; use svi.get_params\(state\)"):
        ASKING[ask](learned, guide, unconstrained, X, Y)
    with pytest.raises(ValueError, match=r"are model and guide swapped\?"):
        ASKING[ask](guide, learned, params, X, Y)


def test_what_may_be_left_out(fitted):
    guide, params, _ = fitted
    only_guide = {name: v for name, v in params.items() if name not in ("length", "noise")}
    for given in (params, only_guide, only_guide | {"length": 0.6, "noise": 0.3}):
        f = ogp.posterior(learned, guide, given, X, Y)["f"]
        np.testing.assert_allclose(f.kernel.lengthscale, 0.6, rtol=1e-5)


def test_values_that_constraints_allow_up_to_rounding_are_taken(fitted):
    guide, params, _ = fitted
    (name,) = (name for name, v in params.items() if v.shape == (M, M))
    for factor in (params[name], params[name].astype(np.float32)):
        assert ogp.posterior(learned, guide, params | {name: factor}, X, Y)["f"].drawn == ()
    with pytest.raises(ValueError, match="unconstrained"):
        ogp.posterior(learned, guide, params | {name: params[name] + jnp.ones((M, M))}, X, Y)
    with pytest.raises(ValueError, match="unconstrained"):
        ogp.posterior(learned, guide, params | {"length": jnp.asarray(-0.5)}, X, Y)
    # A traced value cannot be looked at.
    jax.jit(lambda p: ogp.posterior(learned, guide, p, X, Y)["f"](X).mean)(params | {"length": jnp.asarray(-0.5)})


def test_wrapped_parameters_of_natural_steps_are_refused():
    guide = ogp.AutoSparseGP(learned, natural=True)
    svi = SVI(learned, guide, ogp.natural_gradient(optax.adam(0.01), 0.5), TraceMeanField_ELBO())
    state = svi.init(random.PRNGKey(0), X, Y)
    params = svi.get_params(state)
    assert ogp.posterior(learned, guide, params, X, Y)["f"].drawn == ()
    with pytest.raises(ValueError, match="optimizer's unconstrained parameters"):
        ogp.posterior(learned, guide, svi.optim.get_params(state.optim_state), X, Y)


def test_swapped_collapsed_model_is_refused():
    def collapsed(X, y=None):
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(0.6), X, jnp.asarray(Z), 0.3), obs=y)

    with pytest.raises(ValueError, match=r"are model and guide swapped\?"):
        ogp.posterior(lambda X, y=None: None, collapsed, {}, X, Y)


def test_categorical_of_one_function_is_refused():
    f = numpyro.handlers.seed(lambda: ogp.gp("f", kernels.RBF(0.6), jnp.asarray(Z), num_latents=1), random.PRNGKey(0))()
    for link in ("softmax", "robustmax"):
        with pytest.raises(ValueError, match=r"num_latents=P\) for P classes.*Bernoulli"):
            likelihoods.Categorical(f(X), link)


def test_nothing_to_ask_for():
    """A guide of another number of sets, and models that have no function where they are asked."""

    def collapsed(X, y=None):
        numpyro.sample("y", ogp.CollapsedGP(kernels.RBF(LENGTH), X, jnp.asarray(Z), NOISE), obs=y)

    def of_two(X, y=None):
        ogp.gp_posterior("f", [M, M])

    params = {f"f.u{i}_{what}": v for i in (0, 1) for what, v in (("loc", jnp.zeros(M)), ("scale_tril", jnp.eye(M)))}
    with pytest.raises(ValueError, match=r"The guide draws 'f.u1', which the model does not have"):
        ogp.posterior(model, of_two, params, X, Y)
    assert set(ogp.posterior(two_sets, of_two, params, X, Y)) == {"f"}
    with pytest.raises(
        ValueError, match=r"no gp\(\), and no CollapsedGP that is observed.*Does it need its observations"
    ):
        ogp.posterior(collapsed, None, {}, X)
    assert set(ogp.posterior(collapsed, None, {}, X, Y)) == {"y"}


def test_draws_of_mcmc_with_some_parameters_of_the_model():
    def own(X, y=None):
        length = numpyro.param("length", 0.5, constraint=constraints.positive)
        noise = numpyro.param("noise", 0.3, constraint=constraints.positive)
        f = ogp.gp("f", kernels.RBF(length), jnp.asarray(Z))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)

    fitted = {"length": jnp.asarray(0.7), "noise": jnp.asarray(0.2)}
    mcmc = MCMC(NUTS(numpyro.handlers.substitute(own, fitted)), num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(random.PRNGKey(0), X, Y)
    with pytest.raises(ValueError, match="holds 'length' but not 'noise', which the model would take at the starting"):
        ogp.to_arviz(own, mcmc, {"length": fitted["length"]}, X, Y)
    assert ogp.to_arviz(own, mcmc, fitted, X, Y)["posterior"]["f.u0"].shape == (1, 3, M)
