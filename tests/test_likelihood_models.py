"""Likelihoods inside models: several functions, fixed effects, plates within plates, minibatches, parameters that are learned."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy import stats
from scipy.special import expit

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

N, M = 11, 4
RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (N, 1))
Z = np.linspace(-2, 2, M)[:, None]
Y = RNG.normal(size=N)
COUNTS = RNG.poisson(2.0, (N, 3))
FIXED = RNG.normal(size=(N, 2))
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
# Compiling is most of what these tests cost.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def function(name, num_latents=None, lengthscale=0.7):
    return ogp.gp(name, 0.8 * kernels.Matern52(lengthscale), Z, num_latents=num_latents)


def two_functions(X, y):
    f, g = function("f"), function("g", lengthscale=1.5)
    both = ogp.stack([f(X), g(X)])
    with numpyro.plate("data", len(X)):
        noise = lambda h: dist.Normal(h[..., 0], 0.2 + jnp.exp(h[..., 1]))  # noqa: E731
        numpyro.sample("y", ogp.Likelihood(both, noise, integrator=ogp.GaussHermite(30)), obs=y)


def heteroskedastic(X, y):
    both = ogp.stack([function("f")(X), function("g", lengthscale=1.5)(X)])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihoods.HeteroskedasticGaussian(both), obs=y)


def fixed_effects(X, y):
    beta = numpyro.param("beta", jnp.array([0.5, -1.0]))
    f = function("f")
    with numpyro.plate("data", len(X)):
        noise = lambda f: dist.StudentT(5.0, f, 0.7)  # noqa: E731
        numpyro.sample("y", ogp.Likelihood(f(X) + FIXED @ beta, noise, integrator=ogp.GaussHermite(60)), obs=y)


def nested_plates(X, y):
    f = function("f", num_latents=3)
    scale = numpyro.param("scale", jnp.array([0.5, 1.0, 2.0]), constraint=dist.constraints.positive)
    with numpyro.plate("data", len(X), dim=-2), numpyro.plate("outputs", 3, dim=-1):
        numpyro.sample("y", likelihoods.NegativeBinomial(f(X), 2.0, scale, integrator=ogp.GaussHermite(60)), obs=y)


def integral(mean, variance, log_density):
    """E[log p(y | f)] for f of shape (N,) or (N, P), each y on its own."""
    f = mean + np.sqrt(variance) * NODES.reshape(-1, *(1,) * mean.ndim)
    return np.tensordot(WEIGHTS, log_density(f), 1)


def log_two(m):
    f = m["f"].mean + np.sqrt(m["f"].variance) * NODES[:, None, None]
    g = m["g"].mean + np.sqrt(m["g"].variance) * NODES[None, :, None]
    terms = stats.norm.logpdf(Y, f, 0.2 + np.exp(g))
    return np.einsum("s,t,stn->", WEIGHTS, WEIGHTS, terms)


def log_heteroskedastic(m):
    f = m["f"].mean + np.sqrt(m["f"].variance) * NODES[:, None, None]
    g = m["g"].mean + np.sqrt(m["g"].variance) * NODES[None, :, None]
    return np.einsum("s,t,stn->", WEIGHTS, WEIGHTS, stats.norm.logpdf(Y, f, np.exp(g)))


def log_fixed(m):
    mean = np.asarray(m["f"].mean) + FIXED @ [0.5, -1.0]
    return integral(mean, np.asarray(m["f"].variance), lambda f: stats.t.logpdf(Y, 5.0, f, 0.7)).sum()


def log_nested(m):
    def log_density(f):
        mu = np.exp(f) * [0.5, 1.0, 2.0]
        return stats.nbinom.logpmf(COUNTS, 2.0, 2.0 / (2.0 + mu))

    return integral(np.asarray(m["f"].mean), np.asarray(m["f"].variance), log_density).sum()


MODELS = {
    "two functions": (two_functions, Y, log_two, {"f": None, "g": None}),
    "heteroskedastic": (heteroskedastic, Y, log_heteroskedastic, {"f": None, "g": None}),
    "fixed effects": (fixed_effects, Y, log_fixed, {"f": None}),
    "nested plates": (nested_plates, COUNTS, log_nested, {"f": 3}),
}


def guide_of(**num_latents):
    """One Gaussian for each function; any arguments."""

    def guide(*_):
        for name, P in num_latents.items():
            ogp.gp_posterior(name, M, num_latents=P)

    return guide


def gaussian_params(name, num_latents):
    """Some means and factors for the Gaussian of a function."""
    rng, batch = np.random.default_rng(len(name)), () if num_latents is None else (num_latents,)
    factors = np.tril(0.3 * rng.normal(size=(*batch, M, M)) + 0.8 * np.eye(M))
    return {f"{name}.u0_loc": jnp.asarray(rng.normal(size=(*batch, M))), f"{name}.u0_scale_tril": jnp.asarray(factors)}


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_the_sum_of_its_parts(name):
    model, y, expected_log_density, functions = MODELS[name]
    guide = guide_of(**functions)
    params = {k: v for f, P in functions.items() for k, v in gaussian_params(f, P).items()}
    sites = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace(X, y)
    params |= {name: site["value"] for name, site in sites.items() if site["type"] == "param"}

    @quick
    def evaluate(params):
        loss = TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, X, y)
        fitted = ogp.posterior(model, guide, params, X, y)
        return loss, {f: fitted[f](X) for f in functions}

    loss, marginals = evaluate(params)
    kl = 0.0
    for f in functions:
        factors = np.asarray(params[f"{f}.u0_scale_tril"]).reshape(-1, M, M)
        for mean, L in zip(np.atleast_2d(params[f"{f}.u0_loc"]), factors, strict=True):
            S = L @ L.T
            kl += (np.trace(S) + mean @ mean - M - np.linalg.slogdet(S)[1]) / 2
    assert_allclose(loss, kl - expected_log_density(marginals), rtol=1e-6)


def test_minibatches_of_censored_times_average_to_all_of_them():
    """An array that goes with the data, like which times are censored, is cut up with it."""
    times, censored = np.exp(Y), RNG.uniform(size=N) < 0.4

    def model(X, y, censored, N):
        f = function("f")
        k = numpyro.param("k", 1.3, constraint=dist.constraints.positive)
        with numpyro.plate("data", N, subsample_size=len(X)):
            numpyro.sample("y", likelihoods.Weibull(f(X), k, censored), obs=y)

    guide, params = guide_of(f=None), gaussian_params("f", None)

    @quick
    def loss(X, y, censored):
        return TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, X, y, censored, N)

    parts = [loss(X[i : i + 1], times[i : i + 1], censored[i : i + 1]) for i in range(N)]
    assert_allclose(np.mean(parts), loss(X, times, censored), rtol=1e-9)


def test_cutpoints_are_learned_as_an_ordered_vector():
    x = np.linspace(-2, 2, 60)[:, None]
    grades = np.digitize(2 * x[:, 0] + 0.3 * np.random.default_rng(0).normal(size=60), [-2.0, 0.0, 2.0])

    def model(x, y=None):
        cutpoints = numpyro.param("cutpoints", jnp.array([-0.5, 0.0, 0.5]), constraint=dist.constraints.ordered_vector)
        f = ogp.gp("f", 2.0 * kernels.RBF(1.5), Z)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", likelihoods.Ordinal(f(x), cutpoints), obs=y)

    guide = guide_of(f=None)
    svi = SVI(model, guide, optax.adam(0.1), TraceMeanField_ELBO())
    params = quick(lambda: svi.run(jax.random.PRNGKey(0), 200, x, grades, progress_bar=False).params)()
    cutpoints = np.asarray(params["cutpoints"])
    assert (np.diff(cutpoints) > 0.3).all() and cutpoints[-1] - cutpoints[0] > 1.5

    @quick
    def predict(params):
        m = ogp.posterior(model, guide, params, x, grades)["f"](x)
        return likelihoods.Ordinal(m, params["cutpoints"]).probs

    assert (predict(params).argmax(-1) == grades).mean() > 0.9


def test_a_warp_that_is_learned_is_a_parameter_like_others():
    y = np.exp(1.5 * np.sin(2 * X[:, 0]) + 0.5)

    def loss(a):
        m = ogp.Marginals(jnp.asarray(np.sin(2 * X[:, 0])), jnp.full(N, 0.05), jnp.full(N, 0.01))
        warp = [dist.transforms.AffineTransform(a[0], jnp.exp(a[1])), dist.transforms.ExpTransform()]
        return -likelihoods.Transformed(likelihoods.Gaussian(m, 0.2), warp).log_prob(y).sum()

    @quick
    def descend(a):
        return jax.lax.fori_loop(0, 400, lambda i, a: a - 2e-4 * jax.grad(loss)(a), a)

    shift, log_factor = descend(jnp.zeros(2))
    assert_allclose([shift, np.exp(log_factor)], [0.5, 1.5], atol=0.25)


def test_given_values_the_likelihood_integrates_what_inducing_points_leave():
    """As under NUTS and Predictive."""
    y = (RNG.uniform(size=N) < expit(2 * X[:, 0])).astype(int)

    def model(X, y=None):
        f = function("f")
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.Binomial(f(X), 1, "cloglog"), obs=y)

    conditioned = numpyro.handlers.substitute(model, {"f.u0": jnp.asarray(RNG.normal(size=M))})
    d = numpyro.handlers.trace(numpyro.handlers.seed(conditioned, 0)).get_trace(X, y)["y"]["fn"]
    f = np.asarray(d.marginals.mean) + np.sqrt(np.asarray(d.marginals.variance)) * NODES[:, None]
    p = -np.expm1(-np.exp(f))
    expected = np.tensordot(WEIGHTS, np.where(y == 1, np.log(p), -np.exp(f)), 1)
    assert_allclose(d.log_prob(y), expected, rtol=1e-6)
