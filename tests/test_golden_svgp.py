"""SVGP and its likelihoods against values that GPflow computed (jitter 0, float64)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import GaussHermite, QuasiMonteCarlo, kernels, likelihoods

PARAMETERIZATIONS = ("whitened", "unwhitened")
RULES = {"gh20": GaussHermite(20), "gh100": GaussHermite(100)}


class Method(NamedTuple):
    """A likelihood of a golden file: how to build it from marginals, and which of its values are in closed form here."""

    build: Callable[..., Any]
    exact_moments: bool = False
    exact_prediction: bool = False
    exact_expectation: bool = False


def _ordinal(bin_edges, sigma):
    """GPflow's ordinal likelihood, with its squashed normal distribution function and its 1e-6."""
    low, high = jnp.array([-jnp.inf, *bin_edges]), jnp.array([*bin_edges, jnp.inf])

    def cdf(x):
        return jax.scipy.special.ndtr(x) * (1 - 2e-3) + 1e-3

    def conditional(f):
        f = f[..., None]
        return _Classes(cdf((high - f) / sigma) - cdf((low - f) / sigma))

    return conditional


class _Classes(dist.Distribution):
    """Classes 0, 1, ... whose probabilities need not sum to one; the moments are the plain weighted sums."""

    pytree_data_fields = ("p",)
    support = dist.constraints.nonnegative_integer

    def __init__(self, p):
        self.p = p
        super().__init__(p.shape[:-1], ())

    def log_prob(self, value):
        shape = jnp.broadcast_shapes(self.p.shape[:-1], value.shape)
        p = jnp.broadcast_to(self.p, shape + self.p.shape[-1:])
        index = jnp.broadcast_to(value, shape)[..., None].astype(int)
        return jnp.log(jnp.take_along_axis(p, index, -1)[..., 0] + 1e-6)

    @property
    def mean(self):
        return self.p @ jnp.arange(self.p.shape[-1])

    @property
    def variance(self):
        return self.p @ jnp.arange(self.p.shape[-1]) ** 2 - self.mean**2


def _squashed_probit(f):
    return dist.BernoulliProbs(jax.scipy.special.ndtr(f) * (1 - 2e-3) + 1e-3)


def _squashed_beta(scale):
    def conditional(f):
        p = jax.scipy.special.ndtr(f) * (1 - 2e-3) + 1e-3
        return dist.Beta(scale * p, scale * (1 - p))

    return conditional


def _general(fn):
    return lambda m, inputs, **options: ogp.Likelihood(m, fn(**inputs), **options)


METHODS = {
    "gaussian": Method(lambda m, p, integrator=None: likelihoods.Gaussian(m, np.sqrt(p["variance"])), True, True, True),
    "bernoulli_logit": Method(lambda m, p, **options: likelihoods.Bernoulli(m, **options)),
    "bernoulli_probit_exact": Method(lambda m, p, **options: likelihoods.Bernoulli(m, "probit", **options), True, True),
    "poisson_exp": Method(lambda m, p, **options: likelihoods.Poisson(m, p["binsize"], **options), True, False, True),
    "exponential_exp": Method(_general(lambda: lambda f: dist.Exponential(jnp.exp(-f)))),
    "gamma_exp": Method(_general(lambda shape: lambda f: dist.Gamma(shape, jnp.exp(-f)))),
    "bernoulli_probit_gpflow": Method(_general(lambda: _squashed_probit)),
    "beta_probit_gpflow": Method(_general(_squashed_beta)),
    "ordinal_gpflow": Method(_general(_ordinal)),
}
# GPflow has closed forms for these expectations, and predictive moments, where the general likelihood integrates.
CLOSED_IN_GPFLOW = {
    "exponential_exp": ("variational_expectations",),
    "gamma_exp": ("variational_expectations",),
    "bernoulli_probit_gpflow": ("predict_mean", "predict_var", "predict_log_density"),
}


@pytest.fixture
def load(golden):
    return lambda name: json.loads((golden / f"case02_svgp_{name}.json").read_text())


def stored_marginals(out: dict[str, Any]) -> ogp.Marginals:
    mean, variance = np.array(out["f_mean"]), np.array(out["f_var"])
    if mean.shape[1] == 1:
        mean, variance = mean[:, 0], variance[:, 0]
    return ogp.Marginals(jnp.asarray(mean), jnp.asarray(variance), jnp.zeros(mean.shape))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", METHODS)
def test_likelihood_values(load, name, rule):
    case, method = load(name), METHODS[name]
    y = np.array(case["inputs"]["y"])[:, 0]
    for parameterization in PARAMETERIZATIONS:
        out = case["outputs"][parameterization]
        true = case["crosscheck"][parameterization]["true"]
        d = method.build(stored_marginals(out), case["inputs"]["likelihood"], integrator=RULES[rule])

        def compare(got, key, exact, out=out, true=true):
            closed = key in CLOSED_IN_GPFLOW.get(name, ())
            if closed and rule == "gh20":
                return  # they are compared with 100 nodes
            reference = np.ravel((true if exact else out[rule])[key])
            assert_allclose(got, reference, rtol=1e-8, atol=1e-8, err_msg=key)

        compare(d.log_prob(y), "variational_expectations", method.exact_expectation)
        compare(d.mean, "predict_mean", method.exact_moments)
        compare(d.variance, "predict_var", method.exact_moments)
        compare(d.log_predictive(y), "predict_log_density", method.exact_prediction)


@pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)
def test_softmax_values(load, parameterization):
    case = load("multiclass_softmax")
    out, y = case["outputs"][parameterization], np.array(case["inputs"]["y"])[:, 0].astype(int)
    m = stored_marginals(out)

    @jax.jit
    def by_quadrature():
        d = likelihoods.Categorical(m, integrator=GaussHermite(40))
        return d.log_prob(y), d.probs, d.log_predictive(y)

    expectation, probs, prediction = by_quadrature()
    assert_allclose(expectation, out["variational_expectations"], rtol=1e-6)
    assert_allclose(probs, out["predict_mean"], rtol=1e-6)
    assert_allclose(probs - probs**2, out["predict_var"], rtol=1e-6)
    assert_allclose(prediction, out["predict_log_density"], rtol=1e-6)

    def by_quasi_monte_carlo(key):
        with numpyro.handlers.seed(rng_seed=key):
            return likelihoods.Categorical(m, integrator=QuasiMonteCarlo(2**12)).log_prob(y)

    draws = np.asarray(jax.jit(jax.vmap(by_quasi_monte_carlo))(jax.random.split(jax.random.PRNGKey(0), 24)))
    stderr = draws.std(0, ddof=1) / np.sqrt(len(draws))
    # 40 points, Student's t with 23 degrees of freedom
    assert (np.abs(draws.mean(0) - out["variational_expectations"]) < 5 * stderr).all()
    assert stderr.max() < 5e-4


# ---------------------------------------------------------------- gp and gp_posterior


def svgp(case: dict[str, Any], name: str, integrator: Any):
    """A model and guide of one gp whose kernel and inducing points are the values they are called with."""
    inputs = case["inputs"]
    X, y = np.array(inputs["X"]), np.array(inputs["y"])[:, 0]
    P = np.shape(inputs["q_mu"])[1]
    num_latents = None if P == 1 else P

    def f_of(values):
        kernel = values["variance"] * kernels.Matern52(values["lengthscales"])
        return ogp.gp("f", kernel, values["Z"], num_latents=num_latents, jitter=0.0)

    def model(values):
        m = f_of(values)(X)
        with numpyro.plate("data", len(X)):
            if name == "multiclass_softmax":
                d = likelihoods.Categorical(m, integrator=integrator)
            else:
                d = METHODS[name].build(m, inputs["likelihood"], integrator=integrator)
            numpyro.sample("y", d, obs=y.astype(int) if name == "multiclass_softmax" else y)

    def guide(values):
        ogp.gp_posterior("f", len(inputs["Z"]), num_latents=num_latents)

    def negative_elbo(values):
        squeeze = values["q_mu"].T[0] if P == 1 else values["q_mu"].T
        factor = values["q_sqrt"][0] if P == 1 else values["q_sqrt"]
        params = {"f.u0_loc": squeeze, "f.u0_scale_tril": factor}
        return TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, values), params

    keys = ("variance", "lengthscales", "Z", "q_mu", "q_sqrt")
    return {k: jnp.asarray(inputs[k], float) for k in keys}, model, guide, negative_elbo


@pytest.mark.parametrize("name", ["gaussian", "bernoulli_logit", "bernoulli_probit_exact", "poisson_exp"])
def test_elbo_and_gradients(load, name):
    case = load(name)
    values, _, _, negative_elbo = svgp(case, name, GaussHermite(20))
    (loss, _), gradient = jax.jit(jax.value_and_grad(negative_elbo, has_aux=True))(values)
    out = case["outputs"]["whitened"]["gh20"]
    assert_allclose(-loss, out["elbo"], rtol=1e-8)
    assert gradient.keys() == out["elbo_grad"].keys()
    for key, reference in out["elbo_grad"].items():
        got = -gradient[key]
        assert_allclose(jnp.tril(got) if key == "q_sqrt" else got, reference, rtol=1e-6, atol=1e-8, err_msg=key)


def test_elbo_of_softmax(load):
    case = load("multiclass_softmax")
    values, _, _, negative_elbo = svgp(case, "multiclass_softmax", GaussHermite(40))
    assert_allclose(-jax.jit(negative_elbo)(values)[0], case["outputs"]["whitened"]["elbo"], rtol=1e-8)


@pytest.mark.parametrize("name", ["gaussian", "multiclass_robustmax"])  # one and three latent functions
def test_process_values(load, name):
    case = load(name)
    out = case["outputs"]["whitened"]
    values, model, guide, negative_elbo = svgp(case, "gaussian" if name == "gaussian" else "multiclass_softmax", None)
    X, Xtest = (np.array(case["inputs"][key]) for key in ("X", "Xtest"))

    @jax.jit
    def evaluate(values):
        f = ogp.posterior(model, guide, negative_elbo(values)[1], values)["f"]
        return [(m.mean, m.variance) for m in (f(X), f(Xtest))], f.joint(Xtest)

    marginals, joint = evaluate(values)
    for (mean, variance), suffix in zip(marginals, ("", "_test"), strict=True):
        assert_allclose(mean.reshape(len(mean), -1), out[f"f_mean{suffix}"], rtol=1e-9, atol=1e-11)
        assert_allclose(variance.reshape(len(mean), -1), out[f"f_var{suffix}"], rtol=1e-9, atol=1e-11)
    # the joint distribution holds a Cholesky factor, hence the default jitter of 1e-10 of the kernel's variance
    covariance = np.reshape(joint.covariance_matrix, np.shape(out["f_cov_test"]))
    assert_allclose(covariance, out["f_cov_test"], rtol=1e-9, atol=2e-10)
    assert_allclose(joint.mean.reshape(-1, len(Xtest)).T, out["f_mean_test"], rtol=1e-9, atol=1e-11)
