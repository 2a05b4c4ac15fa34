"""Likelihoods that are classes of their own against values that GPflow computed, or that were integrated exactly (case 02)."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax.scipy.special import ndtr
from numpy.testing import assert_allclose
from numpyro.infer import TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import GaussHermite, kernels, likelihoods
from numpyro_orthgp.likelihoods.links import PROBABILITY_LINKS, ProbabilityLink
from tests.test_golden_svgp import PARAMETERIZATIONS, RULES, stored_marginals

KEYS = ("variational_expectations", "predict_log_density", "predict_mean", "predict_var")
TIMES = {
    "exponential_exp": lambda m, p, **options: likelihoods.Exponential(m, **options),
    "gamma_exp": lambda m, p, **options: likelihoods.Gamma(m, p["shape"], **options),
}
# Compiling is most of what these tests cost.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
each = pytest.mark.parametrize("parameterization", PARAMETERIZATIONS)


@pytest.fixture
def load(golden):
    return lambda name: json.loads((golden / f"case02_svgp_{name}.json").read_text())


def values(d, y):
    return quick(lambda d: (d.log_prob(y), d.log_predictive(y), d.mean, d.variance))(d)


@each
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TIMES)
def test_times(load, name, rule, parameterization):
    case = load(name)
    out, true = case["outputs"][parameterization], case["crosscheck"][parameterization]["true"]
    d = TIMES[name](stored_marginals(out), case["inputs"]["likelihood"], integrator=RULES[rule])
    for key, got in zip(KEYS, values(d, np.array(case["inputs"]["y"])[:, 0]), strict=True):
        # all but the predictive density is in closed form
        reference = (out[rule] if key == "predict_log_density" else true)[key]
        assert_allclose(got, np.ravel(reference), rtol=1e-8, atol=1e-8, err_msg=key)


@pytest.mark.parametrize("name", TIMES)
def test_elbo_and_gradients_of_times(load, name):
    case = load(name)
    inputs, out = case["inputs"], case["outputs"]["whitened"]["gh20"]
    X, y = np.array(inputs["X"]), np.array(inputs["y"])[:, 0]

    def model(v):
        f = ogp.gp("f", v["variance"] * kernels.Matern52(v["lengthscales"]), v["Z"], jitter=0.0)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", TIMES[name](f(X), inputs["likelihood"]), obs=y)

    def negative_elbo(v):
        params = {"f.u0_loc": v["q_mu"][:, 0], "f.u0_scale_tril": v["q_sqrt"][0]}
        guide = lambda v: ogp.gp_posterior("f", len(inputs["Z"]))  # noqa: E731
        return TraceMeanField_ELBO().loss(jax.random.PRNGKey(0), params, model, guide, v)

    at = {key: jnp.asarray(inputs[key], float) for key in ("variance", "lengthscales", "Z", "q_mu", "q_sqrt")}
    loss, gradient = quick(jax.value_and_grad(negative_elbo))(at)
    assert_allclose(-loss, out["elbo"], rtol=1e-8)
    assert gradient.keys() == out["elbo_grad"].keys()
    for key, reference in out["elbo_grad"].items():
        got = -gradient[key]
        assert_allclose(jnp.tril(got) if key == "q_sqrt" else got, reference, rtol=1e-6, atol=1e-8, err_msg=key)


@each
@pytest.mark.parametrize("rule", RULES)
def test_beta_with_the_link_of_gpflow(load, rule, parameterization, monkeypatch):
    def p(f):
        return ndtr(f) * (1 - 2e-3) + 1e-3

    link = ProbabilityLink(p, lambda f: 1 - p(f), lambda f: jnp.log(p(f)), lambda f: jnp.log1p(-p(f)))
    monkeypatch.setitem(PROBABILITY_LINKS, "probit", link)
    case = load("beta_probit_gpflow")
    out = case["outputs"][parameterization]
    scale = case["inputs"]["likelihood"]["scale"]
    d = likelihoods.Beta(stored_marginals(out), scale, "probit", integrator=RULES[rule])
    for key, got in zip(KEYS, values(d, np.array(case["inputs"]["y"])[:, 0]), strict=True):
        assert_allclose(got, np.ravel(out[rule][key]), rtol=1e-8, atol=1e-8, err_msg=key)


@each
def test_ordinal_with_the_exact_link(load, parameterization):
    case = load("ordinal_gpflow")
    exact, p = case["crosscheck"][parameterization]["exact_link"], case["inputs"]["likelihood"]
    m = stored_marginals(case["outputs"][parameterization]) * (1 / p["sigma"])  # here the noise has scale one
    d = likelihoods.Ordinal(m, np.array(p["bin_edges"]) / p["sigma"], integrator=GaussHermite(100))
    y = np.array(case["inputs"]["y"])[:, 0].astype(int)
    got = dict(zip(KEYS, values(d, y), strict=True))
    for key, value in got.items():
        assert_allclose(value, np.ravel(exact[key]), rtol=1e-8, atol=1e-8, err_msg=key)
    elbo = got["variational_expectations"].sum() - case["outputs"][parameterization]["prior_kl"]
    assert_allclose(elbo, exact["elbo"], rtol=1e-8)


@each
def test_robustmax_with_the_exact_link(load, parameterization):
    case = load("multiclass_robustmax")
    out, exact = case["outputs"][parameterization], case["crosscheck"][parameterization]["exact_link"]
    epsilon = case["inputs"]["likelihood"]["epsilon"]
    d = likelihoods.Categorical(stored_marginals(out), "robustmax", epsilon, integrator=GaussHermite(100))
    y = np.array(case["inputs"]["y"])[:, 0].astype(int)
    expectation, predictive, probs = quick(lambda d: (d.log_prob(y), d.log_predictive(y), d.probs))(d)
    assert_allclose(expectation, exact["variational_expectations"], rtol=1e-8)
    assert_allclose(predictive, exact["predict_log_density"], rtol=1e-8)
    assert_allclose(probs, exact["predict_mean"], rtol=1e-8)
    assert_allclose(probs - probs**2, exact["predict_var"], rtol=1e-8)
    assert_allclose(expectation.sum() - out["prior_kl"], exact["elbo"], rtol=1e-8)
