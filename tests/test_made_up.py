"""A kernel, a feature, a likelihood, a family of q and a residual that the package has never seen, through every public entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpy.testing import assert_allclose
from numpyro.infer import MCMC, NUTS, SVI, Predictive, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods, online, plots
from tests.made_up import Angle, Averages, Cauchy, Oscillator, Reflected, cauchy, shrunk

matplotlib.use("Agg")

N = 40
KEY = random.PRNGKey(0)
X = jnp.linspace(-2.0, 2.0, N)[:, None]
Y = jnp.asarray(np.sin(2 * np.asarray(X[:, 0])) + 0.2 * np.random.default_rng(0).normal(size=N))
X_NEW = jnp.linspace(-1.5, 1.5, 7)[:, None]


def model(X, y=None):
    lengthscale = numpyro.param("lengthscale", jnp.asarray(0.9), constraint=dist.constraints.positive)
    averages = Averages(numpyro.param("centres", jnp.linspace(-1.8, 1.8, 4)[:, None]))
    f = ogp.gp("f", 1.2 * Cauchy(lengthscale), [jnp.linspace(-2.0, 2.0, 6)[:, None], averages])
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", Angle(f(X), 0.3), obs=y)


def by_points(X, y=None):
    """As above, of points and a plain function."""
    lengthscale = numpyro.param("lengthscale", jnp.asarray(0.9), constraint=dist.constraints.positive)
    f = ogp.gp("f", cauchy(lengthscale), [jnp.linspace(-2.0, 2.0, 6)[:, None], jnp.linspace(-1.7, 1.7, 4)[:, None]])
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", Angle(f(X), 0.3), obs=y)


def hand_guide(X, y=None):
    ogp.gp_posterior("f", [6, 4], covariance=[Reflected, "full"], residual=shrunk)


def svi_of(model, guide=None, rate=0.02):
    guide = guide or ogp.AutoSparseGP(model, covariance=Reflected, residual=shrunk)
    return SVI(model, guide, optax.adam(rate), TraceMeanField_ELBO())


@pytest.fixture(scope="module")
def fit():
    svi = svi_of(model)
    return svi, svi.run(KEY, 300, X, Y, progress_bar=False)


@pytest.fixture(scope="module")
def f(fit):
    return ogp.posterior(model, fit[0].guide, fit[1].params, X, Y)["f"]


def dense(f):
    """Mean and covariance of q(f) at X_NEW from the definition of its parts, in NumPy: K^-1 and all."""
    k, sets, qs = f.kernel, f.features, f.beliefs
    K = np.block([[np.asarray(a.covariance(k, b)) for b in sets] for a in sets])
    K = K + np.diag(np.concatenate([np.broadcast_to(b.jitter, (s.num,)) for b, s in zip(f.blocks, sets, strict=True)]))
    L, C = np.linalg.cholesky(K), np.concatenate([np.asarray(s.covariance_with_inputs(k, X_NEW)) for s in sets])
    A = np.linalg.solve(L, C)
    S = np.zeros_like(K)
    start = 0
    for q in qs:
        u = np.asarray(q.direction) / np.linalg.norm(q.direction)
        H = np.eye(len(u)) - 2 * np.outer(u, u)
        S[start : start + len(u), start : start + len(u)] = H @ np.diag(np.asarray(q.scale) ** 2) @ H
        start += len(u)
    m = np.concatenate([np.asarray(q.loc) for q in qs])
    return A.T @ m, np.asarray(k(X_NEW, X_NEW)) - A.T @ A + A.T @ S @ A


def test_fits_predict_what_the_definition_says(fit, f):
    svi, run = fit
    assert run.losses[-1] < run.losses[0] - 10
    assert {"f.u0_loc", "f.u0_scale", "f.u0_direction", "f.u1_direction", "f_shrink", "centres"} <= set(run.params)
    mean, cov = dense(f)
    assert_allclose(f(X_NEW).mean, mean, atol=1e-6)
    assert_allclose(f(X_NEW).variance, np.diag(cov), atol=1e-6)
    assert_allclose(f.joint(X_NEW).covariance_matrix, cov, atol=1e-6)
    turned = f.diagonalized()
    assert_allclose(turned(X_NEW).variance, np.diag(cov), atol=1e-6)
    draws = Predictive(model, guide=svi.guide, params=run.params, num_samples=200)(random.PRNGKey(1), X_NEW)
    assert draws["y"].shape == (200, 7) and bool((jnp.abs(draws["y"]) <= jnp.pi).all())
    assert svi.guide.median(run.params)["f.u1"].shape == (4,)
    assert svi.guide.sample_posterior(KEY, run.params, X, Y)["f.u0"].shape == (6,)


def test_guides_by_hand_and_draws(fit):
    svi = svi_of(model, hand_guide)
    params = svi.get_params(svi.init(KEY, X, Y))
    assert {"f.u0_direction", "f.u1_scale_tril", "f_shrink"} <= set(params)
    sampled = ogp.AutoSparseGP(model, covariance=Reflected, analytic=False)
    run = SVI(model, sampled, optax.adam(0.02), TraceMeanField_ELBO()).run(KEY, 5, X, Y, progress_bar=False)
    assert np.isfinite(run.losses).all()


def test_the_library_fits_and_checks(fit):
    svi, run = fit
    result = ogp.fit(svi, KEY, (X, Y), num_steps=20, batch_size=10, progress_bar=False)
    assert np.isfinite(result.losses).all()
    report = str(ogp.check(model, svi.guide, run.params, X, Y))
    assert "f" in report
    assert ogp.khat(model, svi.guide, run.params, X, Y, num_samples=100).khat < 2
    data = ogp.to_arviz(model, svi.guide, run.params, X, Y, num_samples=20)
    assert data.posterior["f.u0"].shape == (1, 20, 6)


def test_growing(f):
    assert online.divergences(f).shape == (2,)
    assert online.drop_sets(f, 1e-9).num_inducing == 10
    start = online.start_from("f", f)
    assert {n: v.shape for n, v in start.items()} == {
        f"f.u{i}_{part}": (size,) for i, size in enumerate((6, 4)) for part in ("loc", "scale", "direction")
    }
    smaller = online.compress(f, X_NEW)
    assert_allclose(smaller(X_NEW).mean, f(X_NEW).mean, atol=2e-2)
    grown = online.condition(smaller, X_NEW[:2] + 0.1, jnp.array([0.5, -0.5]), lambda f: Angle(f, 0.3))
    assert grown.num_inducing == 9
    moved = grown(X_NEW[:2] + 0.1).mean - f(X_NEW[:2] + 0.1).mean
    assert np.isfinite(moved).all() and (jnp.abs(moved) > 1e-3).all()

    def next_model(X, y):
        g = ogp.gp("f", 1.2 * Cauchy(0.9), X_NEW)
        online.remember("f_past", g, f)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", Angle(g(X), 0.3), obs=y)

    svi = SVI(next_model, ogp.AutoSparseGP(next_model, covariance=Reflected), optax.adam(0.02), TraceMeanField_ELBO())
    assert np.isfinite(svi.run(KEY, 5, X, Y, progress_bar=False).losses).all()


def test_starting_again_from_a_function(f):
    svi = svi_of(model)
    state = svi.init(KEY, X, Y, init_params=online.start_from("f", f))
    again = ogp.posterior(model, svi.guide, svi.get_params(state) | {"lengthscale": f.kernel.kernel.lengthscale}, X, Y)[
        "f"
    ]
    assert_allclose(again.beliefs[0].lower_root(), f.beliefs[0].lower_root(), atol=1e-6)


def test_functions_of_functions(fit):
    def deep(X, y=None):
        f = ogp.gp("f", Cauchy(1.0), X_NEW)
        g = ogp.gp("g", Cauchy(0.8), X_NEW)
        layers = ogp.DeepGP([f, g])
        particles, weights = layers.particles(X, 2, rng_key=numpyro.prng_key())  # of one draw of q for each point
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", Angle(layers(X), 0.3), obs=y)
            numpyro.sample("z", likelihoods.Mixture(Angle(particles, 0.3), weights), obs=y)

    guide = ogp.AutoSparseGP(deep, covariance=Reflected, residual={"g": shrunk})
    run = SVI(deep, guide, optax.adam(0.02), TraceMeanField_ELBO()).run(KEY, 5, X, Y, progress_bar=False)
    functions = ogp.posterior(deep, guide, run.params, X, Y)
    particles, weights = ogp.DeepGP([functions["f"], functions["g"]]).particles(X_NEW, 3, rng_key=random.PRNGKey(2))
    predicted = likelihoods.Mixture(Angle(particles, 0.3), weights)
    assert np.isfinite(predicted.log_prob(jnp.zeros(7))).all()


def test_nuts_and_other_guides():
    def bayesian(X, y):
        f = ogp.gp("f", Cauchy(numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.3))), Averages(X_NEW))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", Angle(f(X), 0.3), obs=y)

    mcmc = MCMC(NUTS(bayesian), num_warmup=20, num_samples=10, progress_bar=False)
    mcmc.run(KEY, X, Y)
    assert np.isfinite(mcmc.get_samples()["f.u0"]).all()
    data = ogp.to_arviz(bayesian, mcmc, None, X, Y)
    assert data.posterior["f.u0"].shape == (1, 10, 7)


def test_collapsed_bounds_and_latent_inputs():
    bounds = [ogp.CollapsedGP(Cauchy(0.9), X, s, 0.3).log_prob(Y) for s in (Averages(X_NEW, width=0.0), X_NEW)]
    assert_allclose(*bounds, rtol=1e-4)

    def orthogonal(X, y):
        v = ogp.orthogonal("f", Averages(X_NEW))
        numpyro.sample("y", ogp.CollapsedGP(Cauchy(0.9), X, [X[::8], Averages(X_NEW)], 0.3, orthogonal=v), obs=y)

    guide = ogp.AutoSparseGP(orthogonal, covariance=Reflected)
    run = SVI(orthogonal, guide, optax.adam(0.02), TraceMeanField_ELBO()).run(KEY, 5, X, Y, progress_bar=False)
    assert np.isfinite(run.losses).all()
    assert np.isfinite(ogp.posterior(orthogonal, guide, run.params, X, Y)["y"](X_NEW).mean).all()

    def gplvm(y):
        with numpyro.plate("rows", N):
            Z = ogp.latent_inputs("Z", N, 1)
        f = ogp.gp("f", Cauchy(0.9), X_NEW)
        numpyro.sample("y", likelihoods.Gaussian(f.expected(Z), 0.3).to_event(1), obs=y)

    guide = ogp.AutoSparseGP(gplvm, covariance=Reflected, latents={"Z": X})
    run = SVI(gplvm, guide, optax.adam(0.02), TraceMeanField_ELBO()).run(KEY, 5, Y, progress_bar=False)
    assert np.isfinite(run.losses).all()
    g = ogp.posterior(gplvm, guide, run.params, Y)["f"]
    assert np.isfinite(g(X_NEW).mean).all()


def test_latents_of_new_rows():
    f = ogp.CollapsedGP(Cauchy(0.9), X, X_NEW, 0.3).posterior(jnp.stack([Y, -Y], -1))
    found = ogp.infer_latents(f, jnp.array([[0.9, -0.9]]), lambda f: Angle(f, 0.3))
    assert found.loc.shape == (1, 1) and jnp.abs(f(found.loc).mean - jnp.array([0.9, -0.9])).max() < 0.3


def test_pictures(f):
    ax = plots.function(f, data=(X, Y), likelihood=lambda f: Angle(f, 0.3), rng_key=KEY)
    assert ax.lines


def test_what_is_not_known_is_said(f):
    with pytest.raises(TypeError, match="Averages"):
        f.sample_paths(KEY, 2)
    points = ogp.CollapsedGP(Cauchy(0.9), X, X_NEW, 0.3).posterior(Y)
    with pytest.raises(TypeError, match="Cauchy"):
        points.sample_paths(KEY, 2)
    with pytest.raises(TypeError, match="`condition` needs a function whose sets are inducing points"):
        online.condition(f, X_NEW[:1], Y[:1], lambda f: Angle(f, 0.3))
    svi = svi_of(model, ogp.AutoSparseGP(model, covariance=Reflected, natural=True))
    with pytest.raises(ValueError, match="natural steps are not known for the covariance 'reflected'"):
        svi.init(KEY, X, Y)
    svi = svi_of(model, ogp.AutoSparseGP(model, residual=lambda name, shape, dtype: jnp.ones(3, dtype)))
    with pytest.raises(ValueError, match=r"The residual's v of `f` must have shape \(\); got \(3,\)"):
        svi.init(KEY, X, Y)
    with pytest.raises(ValueError, match="Unknown `residual` 'loose'"):
        ogp.AutoSparseGP(model, residual="loose")


def test_plain_functions_as_kernels():
    svi = svi_of(by_points)
    run = svi.run(KEY, 20, X, Y, progress_bar=False)
    f = ogp.posterior(by_points, svi.guide, run.params, X, Y)["f"]
    expected = 2.5 * kernels.Constant(1.0)(X_NEW)
    assert (f(X_NEW).variance < expected).all()
    grown = online.condition(f, X_NEW[:2], jnp.array([0.5, -0.5]), lambda f: Angle(f, 0.3))
    assert np.isfinite(grown(X_NEW).mean).all()
    assert "f" in str(ogp.check(by_points, svi.guide, run.params, X, Y))


@pytest.mark.parametrize("dtype, tol", [(jnp.float64, 1e-8), (jnp.float32, 3e-5)])
def test_a_functional_has_the_covariances_that_derivatives_of_the_kernel_say(dtype, tol):
    """f'' + w^2 f of an RBF with lengthscale one, whose derivatives are Hermite polynomials times the kernel."""
    Z, times = (jnp.linspace(0.0, 3.0, n, dtype=dtype)[:, None] for n in (6, 8))
    L = Oscillator(times, jnp.linspace(1.0, 2.0, 8, dtype=dtype))
    with numpyro.handlers.seed(rng_seed=0):
        f = ogp.gp("f", kernels.RBF(jnp.ones((), dtype)), Z)
        values = np.asarray(f.values[0], float)
        on_term = ogp.gp("g", kernels.RBF(1.0).named("a") + 1.0, Z).term("a")(L)
        as_set = ogp.gp("h", kernels.RBF(1.0), [Z, L])(times)
    z, t, w2 = (np.asarray(a, float).ravel() for a in (Z, times, L.w**2))

    def derivative(order, a, b):
        d = np.subtract.outer(a, b)
        return {0: 1, 2: d**2 - 1, 4: d**4 - 6 * d**2 + 3}[order] * np.exp(-(d**2) / 2)

    K = derivative(0, z, z) + np.diag(np.broadcast_to(np.asarray(f.blocks[0].jitter, float), 6))
    A = np.linalg.solve(np.linalg.cholesky(K), derivative(2, z, t) + w2 * derivative(0, z, t))
    cov = derivative(4, t, t) + np.add.outer(w2, w2) * derivative(2, t, t) + np.outer(w2, w2) * derivative(0, t, t)
    marginals, size = f(L), np.diag(cov).max()
    assert marginals.mean.dtype == dtype and on_term.shape == as_set.shape == (8,)
    assert_allclose(marginals.mean, A.T @ values, atol=tol * np.sqrt(size))
    assert_allclose(marginals.variance, np.diag(cov - A.T @ A), atol=tol * size)
    with pytest.raises(ValueError, match="Matern32 has first derivatives only"), numpyro.handlers.seed(rng_seed=0):
        ogp.gp("f", kernels.Matern32(1.0), Z)(L)


class OnlyDensity(dist.Normal):
    """A distribution without draws."""

    def sample(self, key, sample_shape=()):
        raise NotImplementedError


def test_what_needs_draws_of_a_distribution_that_has_none_says_so():
    """Predictive ended in a NotImplementedError without a word."""

    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(0.9), X_NEW)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", ogp.Likelihood(f(X), lambda f: OnlyDensity(f, 0.3)), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.02), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y))
    with pytest.raises(ValueError, match=r"OnlyDensity, .* has no draws .* Define its `sample\(key, sample_shape\)`"):
        Predictive(model, guide=svi.guide, params=params, num_samples=2)(KEY, X_NEW)
    kept = ogp.to_arviz(model, svi.guide, params, X, Y, num_samples=2, posterior_predictive=False)
    assert kept.log_likelihood["y"].shape == (1, 2, N)


class Lost(likelihoods.ExpectedLikelihood):
    """Its noise is in no list of fields."""

    def __init__(self, marginals, scale):
        self.scale = scale
        super().__init__(marginals)

    def conditional(self, f):
        return dist.Normal(f, self.scale)


class Summed(likelihoods.ExpectedLikelihood):
    """Sums over rows by itself."""

    def conditional(self, f):
        return dist.Normal(f, 1.0)

    def expected_log_density(self, y):
        return super().expected_log_density(y).sum()


def test_what_a_likelihood_forgot_is_said():
    """The first ended in the words of Python, the second in a loss that was N times as large."""
    f = ogp.Marginals(jnp.zeros(3), jnp.ones(3), jnp.ones(3))
    assert Lost(f, 0.3).log_prob(jnp.zeros(3)).shape == (3,)
    rebuilt = jax.jit(lambda scale: Lost(f, scale))(0.3)
    for call in (lambda: rebuilt.log_prob(jnp.zeros(3)), lambda: rebuilt.mean):
        with pytest.raises(AttributeError, match=r"Lost has no attribute 'scale'.*named in `pytree_data_fields`"):
            call()
    with pytest.raises(ValueError, match=r"`expected_log_density` of Summed .* shape \(3,\); got \(\)"):
        Summed(f).log_prob(jnp.zeros(3))


class Transposed:
    """Its covariance with inputs is transposed."""

    num, dtype, cross = 4, jnp.dtype("float64"), 0.0

    def covariance(self, kernel, other):
        return jnp.eye(4) + self.cross * jnp.triu(jnp.ones((4, 4)), 1)

    def covariance_with_inputs(self, kernel, X):
        return 0.1 * jnp.ones((len(X), 4))


class Asymmetric(Transposed):
    cross = 0.5


def test_what_is_wrong_about_a_feature_is_said():
    """The first ended in the words of JAX, the second in numbers."""
    with numpyro.handlers.seed(rng_seed=0):
        with pytest.raises(ValueError, match=r"Transposed must have shape \(..., M, B\) = \(4, 7\).*got \(7, 4\)"):
            ogp.gp("f", Cauchy(0.9), Transposed())(X_NEW)
        with pytest.raises(ValueError, match=r"`covariance` of Asymmetric must be symmetric; got 0.5 for the inducing"):
            ogp.gp("f", Cauchy(0.9), Asymmetric())
