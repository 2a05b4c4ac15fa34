"""Formulas of likelihoods that a user has written: `check` compares them with the distribution of y of the same class."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.formulas import advice_on_formulas, formulas_of
from numpyro_orthgp.diagnostics.replay import look
from numpyro_orthgp.diagnostics.subject import Subject
from tests.test_quadratic import Logistic

KEY = random.PRNGKey(0)
X = jnp.linspace(0.0, 1.0, 12)[:, None]
Y = jnp.exp(jnp.sin(6 * X[:, 0]))


class Rate(likelihoods.ExpectedLikelihood):
    """E[f - y e^f] in closed form; half of the variance is what one forgets."""

    half = 2.0

    def conditional(self, f):
        return dist.Exponential(jnp.exp(f))

    def expected_log_density(self, y):
        m = self.marginals
        return m.mean - y * jnp.exp(m.mean + m.variance / self.half)


class TooSmall(Rate):
    half = 4.0


class TooLarge(Rate):
    half = 1.0


class Score(likelihoods.ExpectedLikelihood):
    """A score in place of the density, where predictions would take it for one."""

    def conditional(self, f):
        return dist.Normal(f, 1.0)

    def log_density(self, f, y):
        return jnp.exp(self.conditional(f).log_prob(y))


class Predicted(likelihoods.Gaussian):
    """Another objective."""

    def log_prob(self, value):
        return self.log_predictive(value)


class Two(likelihoods.ExpectedLikelihood):
    """The closed form of HeteroskedasticGaussian."""

    def conditional(self, f):
        return dist.Normal(f[..., 0], jnp.exp(f[..., 1]))

    def expected_log_density(self, y):
        (a, g), (v, w) = (jnp.moveaxis(part, -1, 0) for part in (self.marginals.mean, self.marginals.variance))
        return -jnp.log(2 * jnp.pi) / 2 - g - ((y - a) ** 2 + v) * jnp.exp(2 * w - 2 * g) / 2


def found(kind, num_latents=None, residual="prior", y=Y):
    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(0.3), X[::3], num_latents=num_latents)
        with numpyro.plate("data", len(X)), numpyro.handlers.mask(mask=jnp.arange(len(X)) > 0):
            numpyro.sample("y", kind(f(X)), obs=y)

    guide = ogp.AutoSparseGP(model, residual=residual)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    params, arguments = svi.get_params(svi.init(KEY, X, y)), Arguments((X, y), {})
    layout = look(model, arguments, GuideDraws(guide, params, arguments, KEY), fitted=True, whole=False)
    return formulas_of(Subject(model, guide, params, arguments, layout, KEY))


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_a_right_formula_is_silent(residual):
    assert found(Rate, residual=residual) == {}
    assert found(Two, num_latents=2, residual=residual) == {}
    assert found(lambda f: likelihoods.Gaussian(f, 0.3), residual=residual) == {}


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_a_wrong_one_is_measured(residual):
    """At q = prior of variance one: E[y e^f] is y e^(1/2) where e^(1/4) or e^1 were written. The first row is masked."""
    y = np.asarray(Y)[1:].mean()
    for kind, written in ((TooSmall, 0.25), (TooLarge, 1.0)):
        above = found(kind, residual=residual)
        np.testing.assert_allclose(above["y"], y * (np.exp(0.5) - np.exp(written)), rtol=1e-6)
        assert len(list(advice_on_formulas(above))) == (written < 0.5)


def test_other_objectives_and_bounds():
    assert found(Score)["y"] > 0.1
    assert found(lambda f: Predicted(f, 0.3))["y"] > 0.1
    assert found(lambda f: Logistic(3.0 * f), y=(Y > 1).astype(int))["y"] < -0.01  # its bound is below


def test_check_says_it():
    def model(X, y=None):
        f = ogp.gp("f", kernels.RBF(0.3), X[::3])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", TooSmall(f(X)), obs=y)

    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(0.01), TraceMeanField_ELBO())
    report = ogp.check(model, guide, svi.get_params(svi.init(KEY, X, Y)), X, Y, num_samples=25)
    assert "nats per point above the expectation of its density" in str(report)
    assert any("`conditional` gives, so the loss is no bound on log p(y)" in line for line in report.advice)
