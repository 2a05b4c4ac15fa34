"""Mixtures of normal distributions that errors of predictions are of."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from numpyro_orthgp.tabular.mixtures import STANDARD, Mixture, fit_mixture, moments_of

SKEWED = Mixture(np.array([0.7, 0.2, 0.1]), np.array([-0.3, 0.2, 2.0]), np.array([0.3, 1.0, 2.5]))


def draws(mixture: Mixture, num: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    which = rng.choice(len(mixture.weights), num, p=mixture.weights)
    return mixture.locs[which] + mixture.scales[which] * rng.normal(size=num)


def test_densities_and_probabilities_are_those_of_the_components():
    z = np.linspace(-4, 9, 41)
    each = [stats.norm(m, s) for m, s in zip(SKEWED.locs, SKEWED.scales, strict=True)]
    density = sum(w * law.pdf(z) for w, law in zip(SKEWED.weights, each, strict=True))
    np.testing.assert_allclose(SKEWED.log_density(z), np.log(density), rtol=1e-12)
    np.testing.assert_allclose(SKEWED.cdf(z), sum(w * law.cdf(z) for w, law in zip(SKEWED.weights, each, strict=True)))
    np.testing.assert_allclose(STANDARD.quantile(np.array([0.1, 0.5])), stats.norm.ppf([0.1, 0.5]))
    assert STANDARD.is_standard and not SKEWED.is_standard
    assert SKEWED.log_density(np.array([-np.inf])) == -np.inf and SKEWED.cdf(-np.inf) == 0


@given(st.lists(st.floats(1e-6, 1 - 1e-6), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_quantiles_are_where_the_probability_is(levels, seed):
    rng = np.random.default_rng(seed)
    mixture = Mixture(rng.dirichlet(np.ones(3)), rng.normal(size=3), rng.lognormal(size=3))
    found = mixture.quantile(np.array(levels))
    np.testing.assert_allclose(mixture.cdf(found), levels, rtol=1e-6, atol=1e-9)
    assert mixture.quantile(np.array(levels[0])).shape == ()


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("xp", [np, jnp])
def test_moments_are_integrals(is_log, xp):
    loc, scale = np.array([0.3, -1.0]), np.array([0.5, 0.2])
    mean, sd = moments_of(SKEWED, xp.asarray(loc), xp.asarray(scale), is_log, xp)
    for i in range(2):

        def moment(z, power, i=i):
            y = loc[i] + scale[i] * z
            return (np.exp(y) if is_log else y) ** power * np.exp(SKEWED.log_density(np.array([z]))[0])

        first, second = (integrate.quad(moment, -40, 40, (power,), limit=400)[0] for power in (1, 2))
        np.testing.assert_allclose(mean[i], first, rtol=1e-5 if xp is jnp else 1e-9)
        np.testing.assert_allclose(sd[i], np.sqrt(second - first**2), rtol=1e-5 if xp is jnp else 1e-7)


@given(st.floats(-30, 30), st.floats(1e-3, 30))
def test_moments_of_large_numbers_keep_their_digits(loc, scale):
    """No difference of squares."""
    mean, sd = moments_of(STANDARD, np.array([1e6 * loc]), np.array([scale]), False)
    np.testing.assert_allclose([mean[0], sd[0]], [1e6 * loc, scale], rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_normal_errors_stay_normal(seed):
    rng = np.random.default_rng(seed)
    assert fit_mixture(rng.normal(size=1000)).is_standard and fit_mixture(rng.normal(size=60)).is_standard
    wide = fit_mixture(2 * rng.normal(size=1000))
    assert len(wide.weights) == 1 and wide.locs[0] == 0 and abs(wide.scales[0] - 2) < 0.2


@pytest.mark.parametrize(
    "law", [SKEWED, Mixture(np.array([0.9, 0.1]), np.zeros(2), np.array([0.5, 5.0]))], ids=["skewed", "outliers"]
)
def test_what_draws_are_of_is_found(law):
    found, new = fit_mixture(draws(law, 4000)), draws(law, 20_000, 1)
    assert found.log_density(new).mean() > law.log_density(new).mean() - 0.005
    assert abs(found.weights.sum() - 1) < 1e-12
    assert (found.locs == 0).all() == (law.locs == 0).all()  # means of their own only where they pay


def test_student_t_errors_have_their_coverage():
    """As of two parameters that are right: degrees of freedom and scale."""
    rng = np.random.default_rng(0)
    found, new = fit_mixture(0.5 * rng.standard_t(3, size=2000)), 0.5 * rng.standard_t(3, size=50_000)
    for level in (0.5, 0.8, 0.95):
        lower, upper = found.quantile(np.array([0.5 - level / 2, 0.5 + level / 2]))
        assert abs(np.mean((lower < new) & (new < upper)) - level) < 0.025
    assert found.log_density(new).mean() > stats.t.logpdf(new, 3, scale=0.5).mean() - 0.02


def test_a_single_row_has_no_component_of_its_own():
    """A density without bound on one row, or on equal ones, is no better description."""
    rng = np.random.default_rng(0)
    z = np.concatenate([rng.normal(size=300), [7.0]])
    assert fit_mixture(z).scales.min() > 0.02
    assert np.isfinite(fit_mixture(np.repeat(rng.normal(size=30), 10)).log_density(z)).all()
    assert np.isfinite(fit_mixture(np.zeros(50)).scales).all()
