"""Sites that take the mean or the variance of a function as numbers: `check` names them, and no others."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.plugged import plugged_of
from numpyro_orthgp.diagnostics.replay import look
from numpyro_orthgp.diagnostics.subject import Subject

KEY = random.PRNGKey(0)
X = jnp.linspace(0.0, 1.0, 12)[:, None]
Z = jnp.linspace(0.0, 1.0, 4)[:, None]
Y = jnp.sin(6 * X[:, 0])


def model_of(observe):
    def model(X, y=None):
        f, g = ogp.gp("f", kernels.RBF(0.3), [Z, Z + 0.1]), ogp.gp("g", kernels.RBF(0.5), Z)
        observe(f, g, X, y)

    return model


def sees(fn, y):
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", fn, obs=y)


def plugged(observe, guide=ogp.AutoSparseGP, **options):
    model = model_of(observe)
    guide = guide(model, **options)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params, arguments = svi.get_params(svi.init(KEY, X, Y)), Arguments((X, Y), {})
    layout = look(model, arguments, GuideDraws(guide, params, arguments, KEY), fitted=True, whole=False)
    return plugged_of(Subject(model, guide, params, arguments, layout, KEY), ["f", "g"])


def of_closure(f, scale):
    return likelihoods.Likelihood(f, lambda values: dist.Normal(values, scale))


def averages(f, X):
    return f(X).sample().reshape(-1, 2).mean(1)


def latent_nodes():
    return numpyro.sample("e", dist.Normal(0, 1).expand([12]).to_event(1))


PLUGGED = {
    "mean": (lambda f, g, X, y: sees(dist.Normal(f(X).mean, 0.1), y), {"y": ("f",)}),
    "variance": (
        lambda f, g, X, y: sees(dist.Normal(f(X).sample(), jnp.sqrt(g(X).variance + 0.1)), y),
        {"y": ("g",)},
    ),
    "noise of ours": (
        lambda f, g, X, y: sees(likelihoods.Gaussian(f(X), jnp.exp(g(X).mean)), y),
        {"y": ("g",)},
    ),
    "an offset of ours": (lambda f, g, X, y: sees(likelihoods.Gaussian(f(X) + g(X).mean, 0.1), y), {"y": ("g",)}),
    "an offset of its own": (lambda f, g, X, y: sees(likelihoods.Gaussian(f(X) - f(X).mean, 0.1), y), {"y": ("f",)}),
    "a factor of its own": (
        lambda f, g, X, y: sees(likelihoods.Gaussian(2.0 + f(X) / jnp.sqrt(f(X).variance), 0.1), y),
        {"y": ("f",)},
    ),
    "weights of its own, stacked": (
        lambda f, g, X, y: sees(
            likelihoods.Gaussian((ogp.stack([f(X) * f(X).mean, g(X)]) @ jnp.ones((2, 1)))[..., 0], 0.1), y
        ),
        {"y": ("f",)},
    ),
    "inputs of its own": (
        lambda f, g, X, y: sees(likelihoods.Gaussian(f(X + f(X).mean[:, None]), 0.1), y),
        {"y": ("f",)},
    ),
    "the weight of a row": (
        lambda f, g, X, y: handlers.scale(sees, scale=1 / (1 + f(X).variance))(likelihoods.Gaussian(f(X), 0.1), y),
        {"y": ("f",)},
    ),
    "in the function of a likelihood": (
        lambda f, g, X, y: sees(of_closure(f(X), jnp.exp(g(X).mean)), y),
        {"y": ("g",)},
    ),
    "what is observed": (lambda f, g, X, y: sees(likelihoods.Gaussian(g(X), 0.1), y - f(X).mean), {"y": ("f",)}),
    "inputs of another function": (
        lambda f, g, X, y: sees(likelihoods.Gaussian(g(f(X).mean[:, None]), 0.1), y),
        {"y": ("f",)},
    ),
    "nodes of a latent site": (
        lambda f, g, X, y: sees(dist.Normal(g(X).sample() + f(X).at(latent_nodes()), 0.1), y),
        {"y": ("f",)},
    ),
    "nodes of a parameter, of a stack": (
        lambda f, g, X, y: sees(
            dist.Normal(ogp.stack([f(X), g(X)]).at(numpyro.param("e", jnp.ones((12, 2)))).sum(-1), 0.1), y
        ),
        {"y": ("f", "g")},
    ),
    "both, after a product": (
        lambda f, g, X, y: sees(dist.Normal(f(X).mean * g(X).mean, 0.1), y),
        {"y": ("f", "g")},
    ),
}


@pytest.mark.parametrize("kind", PLUGGED)
def test_moments_as_numbers_are_named(kind):
    observe, expected = PLUGGED[kind]
    assert plugged(observe) == expected


def factor_of_expectation(f, g, X, y):
    numpyro.factor("known", likelihoods.Gaussian(f(X), 0.1).log_prob(jnp.sin(6 * X[:, 0])).sum())
    sees(likelihoods.Gaussian(g(X), 0.1), y)


def with_a_latent_site(f, g, X, y):
    w = numpyro.sample("w", dist.Normal(f(X[:1]).sample()[0], 1.0))
    numpyro.deterministic("curve", f(X).mean)
    sees(likelihoods.Gaussian(g(X) + w, 0.1), y)


def of_pairs(f, g, X, y):
    numpyro.sample("y", dist.Normal(averages(f, X), 0.1).to_event(1), obs=Y[:6])


RIGHT = {
    "likelihoods": lambda f, g, X, y: sees(likelihoods.HeteroskedasticGaussian(ogp.stack([f(X), g(X)])), y),
    "draws": lambda f, g, X, y: sees(dist.Normal(f(X).sample() + g(X).independent().sample(), 0.1), y),
    "draws by nodes": lambda f, g, X, y: sees(
        dist.Normal(f(X).at(random.normal(numpyro.prng_key(), (12,))) + latent_nodes(), 0.1), y
    ),
    "operands": lambda f, g, X, y: sees(likelihoods.Gaussian(f(X) * g(X).sample() + X[:, 0], 0.1), y),
    "averages": of_pairs,
    "a layer": lambda f, g, X, y: sees(likelihoods.Gaussian(g(f(X).independent().sample()[:, None]), 0.1), y),
    "a factor": factor_of_expectation,
    "latent and deterministic sites": with_a_latent_site,
    "joint": lambda f, g, X, y: sees(likelihoods.Gaussian(g(X) + numpyro.sample("h", f.joint(X)), 0.1), y),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_is_not(kind):
    assert plugged(RIGHT[kind]) == {}


def test_of_values_the_mean_is_one_too():
    """Of a guide that draws inducing variables the mean given these is no moment of q, but a draw."""
    observe = PLUGGED["mean"][0]
    assert plugged(observe, analytic=False) == {}
    assert plugged(observe, AutoNormal) == {}


def test_a_slope_that_is_no_number_tells_nothing():
    """The root of a negative number, which `where` does not take, makes the derivative NaN."""

    def observe(f, g, X, y):
        scale = jnp.where(X[:, 0] >= 0, 0.1, jnp.sqrt(f(X).mean - 100.0))
        sees(dist.Normal(g(X).sample(), scale), y)

    assert plugged(observe) == {}


def test_tightened_and_masked():
    def observe(f, g, X, y):
        with numpyro.handlers.mask(mask=jnp.arange(len(X)) > 3):
            sees(likelihoods.StudentT(f(X) * 2.0, 4.0, 0.3), y)

    assert plugged(observe, residual="tight") == {}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_loss_of_the_mean_is_above_the_evidence(dtype):
    """Why it is said: the objective is the largest joint density of y and the mean, which may exceed log p(y)."""
    x, y = X.astype(dtype), Y.astype(dtype)
    k, s = kernels.RBF(dtype(0.3)), 0.3

    def model(x, y):
        f = ogp.gp("f", k, x[::2])
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x).mean, s), obs=y)

    guide = ogp.AutoSparseGP(model, covariance="diagonal")
    fit = ogp.fit(
        SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO()), KEY, (x, y), num_steps=800, progress_bar=False
    )
    cov = k(x, x) + s**2 * jnp.eye(len(x), dtype=dtype)
    evidence = dist.MultivariateNormal(jnp.zeros(len(x), dtype), cov).log_prob(y)
    assert -fit.losses[-1] > evidence + 1.0
    report = ogp.check(model, guide, fit.params, x, y, num_samples=25)
    assert report.plugged == {"y": ("f",)} and "y takes moments of f as numbers" in report.advice[0]


def test_the_loss_with_a_mean_of_its_own_is_above_the_evidence():
    """Half of f is its mean, whose variance the bound leaves out."""
    x = np.linspace(0.0, 3.0, 8)[:, None]
    y = np.sin(2 * x[:, 0])
    covariance = np.exp(-0.5 * (x - x.T) ** 2 / 0.49) + 0.3**2 * np.eye(8)
    evidence = -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1])

    def model(x, y):
        f = ogp.gp("f", kernels.RBF(0.7), x)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", likelihoods.Gaussian((f(x) + f(x).mean) / 2, 0.3), obs=y)

    guide, x, y = ogp.AutoSparseGP(model), jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    svi = SVI(model, guide, optax.adam(0.03), TraceMeanField_ELBO())
    fit = ogp.fit(svi, KEY, (x, y), num_steps=600, progress_bar=False)
    assert -fit.losses[-1] > evidence + 1.0
    report = ogp.check(model, guide, fit.params, x, y, num_samples=25)
    assert report.plugged == {"y": ("f",)} and "write f(centred(X, over))" in report.advice[0]


def test_the_loss_with_latent_nodes_is_above_the_evidence():
    """The guide has a Gaussian of its own for nodes that are a site, so each row takes the value of f that it likes."""
    k, s = kernels.Matern12(0.8), 0.3
    x = jnp.linspace(0.0, 5.0, 12)[:, None]
    y = jnp.sin(2 * x[:, 0]) + 0.2 * random.normal(KEY, (12,))

    def model(x, y=None):
        f = ogp.gp("f", k, x[::3])
        e = latent_nodes()
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(f(x).at(e), s), obs=y)

    guide = ogp.AutoSparseGP(model, hyper=AutoNormal)
    optim = optax.adam(optax.cosine_decay_schedule(0.03, 2000))
    fit = ogp.fit(SVI(model, guide, optim, TraceMeanField_ELBO()), KEY, (x, y), num_steps=2000, progress_bar=False)
    evidence = dist.MultivariateNormal(jnp.zeros(12), k(x, x) + s**2 * jnp.eye(12)).log_prob(y)
    assert -fit.losses[-500:].mean() > evidence + 0.2
    report = ogp.check(model, guide, fit.params, x, y, num_samples=25)
    assert report.plugged == {"y": ("f",)} and "f(X).at(e) with a latent site e" in report.advice[0]
