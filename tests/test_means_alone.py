"""`check` names sites that take f.joint(X).mean, the mean given the inducing variables, without the covariance."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.contrib.control_flow import scan
from numpyro.infer import HMC, MCMC, SVI, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.means_alone import advice_on_means_alone, means_alone_of
from numpyro_orthgp.diagnostics.replay import look
from numpyro_orthgp.diagnostics.subject import Subject

N, NOISE = 6, 0.4
X = jnp.linspace(0.0, 5.0, N)[:, None]
Z = jnp.array([[1.0], [4.0]])
Y = jnp.sin(X[:, 0])


def model_of(observe):
    def model(X, y):
        f = ogp.gp("f", kernels.RBF(1.2), Z)
        h = ogp.gp("h", kernels.RBF(1.2), X)
        observe(f, h, X, y)

    return model


def sees(fn, y):
    with numpyro.plate("data", N):
        numpyro.sample("y", fn, obs=y)


def in_a_loop(f, h, X, y):
    def step(carry, row):
        x, y = row
        numpyro.sample("y", dist.Normal(f.joint(x[None]).mean[0], NOISE), obs=y)
        return carry, None

    scan(step, 0.0, (X, y))


def of_both(f, h, X, y):
    j = f.joint(X)
    numpyro.sample("y", dist.MultivariateNormal(j.mean, j.covariance_matrix + NOISE**2 * jnp.eye(N)), obs=y)


def of_noise(f, h, X, y):
    j = f.joint(X)
    sees(likelihoods.Gaussian(h(X) + j.mean, jnp.sqrt(j.variance + NOISE**2)), y)


def latent(f, h, X, y):
    sees(dist.Normal(numpyro.sample("v", f.joint(X)), NOISE), y)


ALONE = {
    "a mean": lambda f, h, X, y: sees(dist.Normal(f.joint(X).mean, NOISE), y),
    "an offset": lambda f, h, X, y: sees(likelihoods.Gaussian(h(X) + f.joint(X).mean, NOISE), y),
    "inputs": lambda f, h, X, y: sees(likelihoods.Gaussian(h(f.joint(X).mean[:, None]), NOISE), y),
    "an average": lambda f, h, X, y: sees(dist.Normal(f.joint(ogp.Average(X[:, None])).mean, NOISE), y),
    "steps of scan": in_a_loop,
    "a map": lambda f, h, X, y: sees(dist.Normal(lax.map(lambda x: f.joint(x[None]).mean[0], X), NOISE), y),
}
RIGHT = {
    "mean and covariance": of_both,
    "the variance as noise": of_noise,
    "a latent site": latent,
    "draws of it": lambda f, h, X, y: sees(dist.Normal(f.joint(X).sample(numpyro.prng_key()), NOISE), y),
    "points that leave nothing": lambda f, h, X, y: sees(dist.Normal(h.joint(X).mean, NOISE), y),
    "nothing observed": lambda f, h, X, y: (
        numpyro.deterministic("m", f.joint(X).mean),
        sees(likelihoods.Gaussian(f(X), NOISE), y),
    ),
}


def fitted(observe, of=ogp.AutoSparseGP):
    model = model_of(observe)
    guide = of(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    return model, guide, svi.get_params(svi.init(random.PRNGKey(0), X, Y))


def named(observe, of=ogp.AutoSparseGP):
    model, guide, params = fitted(observe, of)
    arguments = Arguments((X, Y), {})
    layout = look(model, arguments, GuideDraws(guide, params, arguments, random.PRNGKey(0)), fitted=True, whole=False)
    return means_alone_of(Subject(model, guide, params, arguments, layout, random.PRNGKey(0)), ["f", "h"])


@pytest.mark.parametrize("kind", ALONE)
def test_a_mean_without_its_covariance_is_named(kind):
    found = named(ALONE[kind])
    assert list(found) == ["y"] and list(found["y"]) == ["f"]
    known = kind not in ("steps of scan", "a map")
    (words,) = advice_on_means_alone(found)
    assert np.isnan(found["y"]["f"]) != known and (", up to " in words) == known


DRAWN = {
    "AutoNormal": AutoNormal,
    "analytic=False": lambda model: ogp.AutoSparseGP(model, analytic=False),
    "a mean field": lambda model: ogp.AutoSparseGP(model),
}
OF_MARGINALS = {
    "a mean": (True, lambda f, h, X, y: sees(dist.Normal(f(X).mean, NOISE), y)),
    "an average": (True, lambda f, h, X, y: sees(dist.Normal(f(ogp.Average(X[:, None])).mean, NOISE), y)),
    "inputs": (True, lambda f, h, X, y: sees(likelihoods.Gaussian(h(f(X).mean[:, None]), NOISE), y)),
    "the variance as noise": (
        False,
        lambda f, h, X, y: sees(dist.Normal((m := f(X)).mean, (m.variance + 1) ** 0.5), y),
    ),
    "a likelihood": (False, lambda f, h, X, y: sees(likelihoods.Gaussian(f(X), NOISE), y)),
    "draws": (False, lambda f, h, X, y: sees(dist.Normal(f(X).sample(), NOISE), y)),
    "points that leave nothing": (False, lambda f, h, X, y: sees(dist.Normal(h(X).mean, NOISE), y)),
}


@pytest.mark.parametrize("kind", OF_MARGINALS)
@pytest.mark.parametrize("guide", DRAWN)
def test_means_of_marginals_if_the_guide_draws_inducing_variables(guide, kind):
    """Under a guide that a fit integrates over, f(X).mean is that of q: `plugged` names it, with other words."""
    alone, observe = OF_MARGINALS[kind]
    found = named(observe, DRAWN[guide])
    assert list(found) == (["y"] if alone and guide != "a mean field" else [])
    if found:
        assert found["y"]["f"] > 0.3


def test_means_of_tasks_if_the_guide_draws_inducing_variables():
    def model(X, y):
        f = ogp.gp("f", kernels.RBF(1.2), Z, num_latents=2)
        sees(dist.Normal(f(ogp.Tasks(X, jnp.arange(N) % 2)).mean, NOISE), y)

    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params = svi.get_params(svi.init(random.PRNGKey(0), X, Y))
    arguments = Arguments((X, Y), {})
    layout = look(model, arguments, GuideDraws(guide, params, arguments, random.PRNGKey(0)), fitted=True, whole=False)
    found = means_alone_of(Subject(model, guide, params, arguments, layout, random.PRNGKey(0)), ["f"])
    assert found["y"]["f"] > 0.3


def test_the_page_says_it():
    report = ogp.check(*fitted(ALONE["a mean"]), X, Y, num_samples=25)
    assert report.means_alone["y"].keys() == {"f"}
    assert "y takes the mean of f given its inducing variables, f.joint(X).mean," in report.advice[0]


def test_the_share_is_that_of_the_prior():
    """As in a formula that knows nothing of this package."""
    K = lambda A, B: np.exp(-((np.asarray(A) - np.asarray(B).T) ** 2) / 2 / 1.2**2)  # noqa: E731
    left = 1 - np.einsum("nm,nm->n", K(X, Z), np.linalg.solve(K(Z, Z), K(Z, X)).T)
    assert named(ALONE["a mean"])["y"]["f"] == pytest.approx(left.max(), abs=1e-4)


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_right_is_not_named(kind):
    assert named(RIGHT[kind]) == {}


@pytest.mark.parametrize("kind", ["mean", "likelihood", "both"])
def test_to_arviz_says_what_a_model_for_mcmc_leaves_out(kind):
    observed = {
        "mean": lambda m: dist.Normal(m.mean, NOISE),
        "likelihood": lambda m: likelihoods.Gaussian(m, NOISE),
        "both": lambda m: dist.Normal(m.mean, jnp.sqrt(m.variance + NOISE**2)),
    }

    def model(X, y):
        f = ogp.gp("f", kernels.RBF(1.2), Z)
        numpyro.deterministic("mean", f(X).mean)
        sees(observed[kind](f(X)), y)

    mcmc = MCMC(HMC(model, trajectory_length=0.1), num_warmup=1, num_samples=1, progress_bar=False)
    mcmc.run(random.PRNGKey(0), X, Y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ogp.to_arviz(model, mcmc, None, X, Y, posterior_predictive=False, log_likelihood=False)
    said = [str(w.message) for w in caught if "is missing in the model that was sampled" in str(w.message)]
    K = lambda A, B: np.exp(-((np.asarray(A) - np.asarray(B).T) ** 2) / 2 / 1.2**2)  # noqa: E731
    left = 1 - np.einsum("nm,nm->n", K(X, Z), np.linalg.solve(K(Z, Z), K(Z, X)).T)
    assert len(said) == (kind == "mean")
    assert all(f"up to {100 * left.max():.0f} % of the prior variance" in words for words in said)


def test_the_loss_is_no_bound():
    """What is named: at the best q the loss of the mean alone lies below the negative log evidence, and that of both does not."""
    K = lambda A, B: np.exp(-((np.asarray(A, float) - np.asarray(B, float).T) ** 2) / 2 / 1.2**2)  # noqa: E731
    C = K(X, X) + NOISE**2 * np.eye(N)
    A = np.linalg.solve(np.linalg.cholesky(K(Z, Z)), K(Z, X))
    y = np.array([0.1, 0.9, 0.5, -0.3, -0.8, -0.6])  # near the span of the two points
    y = A.T @ np.linalg.lstsq(A.T, y, rcond=None)[0]

    def evidence(C):
        return -(y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1]) / 2

    expected = {"a mean": evidence(A.T @ A + NOISE**2 * np.eye(N)), "mean and covariance": evidence(C)}
    assert expected["a mean"] > evidence(C) + 1
    S = np.linalg.inv(np.eye(2) + A @ A.T / NOISE**2)  # the posterior of u beneath the mean alone
    for kind, q in {"a mean": S, "mean and covariance": None}.items():
        R = C - A.T @ A  # of y given u
        S = q if q is not None else np.linalg.inv(np.eye(2) + A @ np.linalg.solve(R, A.T))
        m = S @ A @ (y / NOISE**2 if q is not None else np.linalg.solve(R, y))
        params = {"f.u0_loc": m, "f.u0_scale_tril": np.linalg.cholesky(S)}
        params |= {"h.u0_loc": np.zeros(N), "h.u0_scale_tril": np.eye(N)}
        model = model_of((ALONE | RIGHT)[kind])
        guide = ogp.AutoSparseGP(model)
        SVI(model, guide, optax.sgd(0.0), TraceMeanField_ELBO()).init(random.PRNGKey(0), X, Y)
        params = {name: jnp.asarray(value, float) for name, value in params.items()}
        losses = jax.jit(
            lambda keys, model=model, guide=guide, params=params: lax.map(
                lambda key: TraceMeanField_ELBO().loss(key, params, model, guide, X, jnp.asarray(y, float)), keys
            )
        )(random.split(random.PRNGKey(1), 400))
        assert -losses.mean() == pytest.approx(expected[kind], abs=5 * float(losses.std()) / 20 + 1e-3)
