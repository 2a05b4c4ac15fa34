"""Quantile regression: closed forms beside dense integrals, and the quantile that comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.test_util import check_grads
from numpy.testing import assert_allclose
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy.stats import norm

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods

Y = np.array([0.3, -1.2, 2.0, 0.0, 40.0])
MEAN = np.array([0.1, 0.5, 2.0, -3.0, 1.0])
QUANTILE = np.array([0.5, 0.1, 0.9, 0.02, 0.7])


def build(scale, sd, dtype=float):
    mean = jnp.asarray(MEAN, dtype)
    m = ogp.Marginals(mean, jnp.full_like(mean, sd**2), jnp.zeros_like(mean))
    return likelihoods.AsymmetricLaplace(m, jnp.asarray(scale, dtype), jnp.asarray(QUANTILE, dtype))


def dense(scale, sd):
    """E[log p] and log E[p] by the trapezoid rule, on nodes that are dense about the peak of q, and about the kink."""
    found = []
    for y, m, tau in zip(Y, MEAN, QUANTILE, strict=True):
        about_kink = y + min(scale, sd) * 1e-3 * np.sinh(np.linspace(-18, 18, 400_001))
        f = np.unique(np.concatenate([m + sd * np.linspace(-14, 14, 400_001), about_kink]))
        log_q = norm.logpdf(f, m, sd)
        log_p = np.log(tau * (1 - tau) / scale) - (y - f) / scale * (tau - (y < f))
        top = (log_q + log_p).max()
        found.append(
            (np.trapezoid(np.exp(log_q) * log_p, f), top + np.log(np.trapezoid(np.exp(log_q + log_p - top), f)))
        )
    return np.array(found).T


@pytest.mark.parametrize("scale, sd", [(0.02, 0.2), (0.5, 0.5), (2.0, 0.01), (1e-3, 1.0)])
def test_closed_forms_equal_dense_integrals(scale, sd):
    expected, predictive = dense(scale, sd)
    y = jnp.asarray(Y)
    got = jax.jit(lambda d: (d.log_prob(y), d.log_predictive(y)))
    log_prob, log_predictive = got(build(scale, sd))
    assert_allclose(log_prob, expected, rtol=1e-6)
    assert_allclose(log_predictive, predictive, rtol=1e-6)
    single = jax.jit(lambda d: (d.log_prob(y.astype("float32")), d.log_predictive(y.astype("float32"))))
    for value, exact in zip(single(build(scale, sd, jnp.float32)), (expected, predictive), strict=True):
        assert value.dtype == jnp.float32
        assert_allclose(value, exact, rtol=2e-5)


def test_density_moments_and_support_are_those_of_numpyro():
    d, f = build(0.4, 0.3), jnp.asarray(MEAN)
    given = dist.AsymmetricLaplaceQuantile(f, 0.4, QUANTILE)
    assert_allclose(d.log_density(f, Y), given.log_prob(Y), rtol=1e-12)
    assert_allclose(d.mean, given.mean, rtol=1e-12)
    assert_allclose(d.variance, given.variance + 0.09, rtol=1e-12)
    exact = build(0.4, 0.0)
    assert_allclose(exact.log_prob(Y), given.log_prob(Y), rtol=1e-7)
    assert_allclose(exact.log_predictive(Y), given.log_prob(Y), rtol=1e-7)
    assert d.support is dist.constraints.real


def test_half_is_laplace_of_twice_the_scale():
    m = build(1.0, 0.3).marginals
    ours, laplace = likelihoods.AsymmetricLaplace(m, 0.2), likelihoods.Laplace(m, 0.4)
    for method in ("log_prob", "log_predictive"):
        assert_allclose(getattr(ours, method)(Y), getattr(laplace, method)(Y), rtol=1e-9)


def test_gradients_are_finite_differences_also_at_no_variance():
    def total(mean, variance, scale, quantile):
        d = likelihoods.AsymmetricLaplace(ogp.Marginals(mean, variance, 0 * variance), scale, quantile)
        return d.log_prob(Y).sum() + d.log_predictive(Y).sum()

    at = jnp.asarray(MEAN + 0.01), jnp.full(5, 0.09), jnp.asarray(0.2), jnp.asarray(QUANTILE)
    check_grads(jax.jit(total), at, order=1, modes=["rev"], rtol=1e-5)
    gradients = jax.jit(jax.grad(total, (0, 1, 2, 3)))(at[0].astype("float32"), jnp.zeros(5, "float32"), *at[2:])
    assert all(np.isfinite(g).all() for g in gradients)


def test_bad_parameters_are_refused():
    m = build(1.0, 0.3).marginals
    for quantile in (0.0, 1.0, 90.0):
        with pytest.raises(ValueError, match="`quantile` must be between 0 and 1"):
            likelihoods.AsymmetricLaplace(m, 0.2, quantile)
    with pytest.raises(ValueError, match="`scale` must be positive"):
        likelihoods.AsymmetricLaplace(m, 0.0)


def test_in_a_scan_and_behind_a_mask():
    m = build(0.4, 0.3).marginals
    steps = jnp.stack([jnp.zeros(5), jnp.ones(5)])
    y = jnp.where(jnp.arange(5) < 3, jnp.asarray(Y), jnp.nan)

    def model():
        def step(carry, shift):
            with numpyro.handlers.mask(mask=jnp.arange(5) < 3):
                numpyro.sample("y", likelihoods.AsymmetricLaplace(m + shift, 0.4, QUANTILE), obs=y)
            return carry, None

        scan(step, 0, steps)

    site = numpyro.handlers.trace(numpyro.handlers.seed(model, 0)).get_trace()["y"]
    by_hand = [likelihoods.AsymmetricLaplace(m + shift, 0.4, QUANTILE).log_prob(Y)[:3] for shift in steps]
    got = site["fn"].log_prob(site["value"])
    assert_allclose(got[:, :3], by_hand, rtol=1e-12)
    assert_allclose(got[:, 3:], 0)


@pytest.mark.parametrize("residual", ["prior", "tight"])
def test_quantile_regression_finds_the_quantile(residual):
    rng = np.random.default_rng(0)
    X = jnp.asarray(rng.uniform(size=(400, 1)))
    y = jnp.asarray(np.exp(rng.normal(size=400)))  # its quantile at 0.8 is exp(0.8416) = 2.32, its mean 1.65

    def model(X, y):
        f = ogp.gp("f", 4.0 * kernels.RBF(3.0), jnp.linspace(0, 1, 4)[:, None])
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", likelihoods.AsymmetricLaplace(f(X), 0.3, 0.8), obs=y)

    guide = ogp.AutoSparseGP(model, residual=residual)
    svi = SVI(model, guide, optax.adam(0.05), TraceMeanField_ELBO())
    result = svi.run(jax.random.PRNGKey(0), 300, X, y, progress_bar=False)
    f = ogp.posterior(model, guide, result.params, X, y)["f"](X)
    share = float((y < f.mean).mean())
    assert abs(share - 0.8) < 0.03
