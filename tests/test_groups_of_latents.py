"""Groups of rows whose inputs are uncertain: the expected residual within groups, collapsed and on minibatches."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels
from tests import oracles
from tests.test_gplvm import KEY, averaged, dense_gplvm, elbo, gplvm, guide_at

N, D = 9, 3
RNG = np.random.default_rng(5)
Y, LOC, SCALE = jnp.asarray(RNG.normal(size=(N, D))), RNG.normal(size=(N, 2)), RNG.uniform(0.1, 0.6, (N, 2))
Z = RNG.normal(size=(4, 2))
SEEN = RNG.uniform(size=(N, D)) < 0.7
ELL = np.array([0.9, 1.4])
K = oracles.rbf(1.3, ELL)


@pytest.fixture(scope="module")
def residual():
    return oracles.expected_residual(K, LOC, SCALE, Z)


def charge(R, noise, seen, size):
    total = 0.0
    for d in range(D):
        for first in range(0, N, size):
            i = [n for n in range(first, min(first + size, N)) if seen[n, d]]
            scale = np.sqrt(noise[i, d])
            total += np.linalg.slogdet(np.eye(len(i)) + R[np.ix_(i, i)] / np.outer(scale, scale))[1]
    return total


def dense(R, size, seen, noise):
    """The row by row bound with another charge for the residual."""
    infinite = np.where(seen, noise, np.inf)
    loose = dense_gplvm(K, np.asarray(Y), LOC, SCALE, Z, infinite, "titsias2009")
    return loose + (np.sum(seen * np.diag(R)[:, None] / noise) - charge(R, noise, seen, size)) / 2


@pytest.mark.parametrize(("size", "gaps"), [(1, True), (4, True), (N, False)])
def test_collapsed_bound(residual, size, gaps):
    seen = SEEN if gaps else np.ones((N, D), bool)
    expected = dense(residual, size, seen, np.full((N, D), 0.16))
    for block_size in (None, 4)[: 2 if size == 4 else 1]:
        model = partial(gplvm, bound="titsias2025", group_size=size, block_size=block_size, observed=seen)
        np.testing.assert_allclose(elbo(model, guide_at(model, LOC, SCALE), Y, jnp.asarray(Z)), expected, rtol=1e-9)


def with_groups(size, seen=True, **options):
    model = partial(averaged, observed=seen, **options)
    return model, guide_at(model, LOC, SCALE, residual="tight", group_size=size)


@pytest.mark.parametrize(("size", "gaps"), [(4, True), (20, False)])
def test_moments_on_minibatches_at_the_best_q(size, gaps):
    """At the collapsed bound's q the two are equal: noise per entry, masks, ragged ends."""
    seen = SEEN if gaps else np.ones((N, D), bool)
    noise = np.random.default_rng(1).uniform(0.3, 0.6, (N, D)) if gaps else 0.4
    model = partial(gplvm, bound="titsias2025", group_size=size, observed=seen, noise=jnp.asarray(noise))
    collapsed = elbo(model, guide_at(model, LOC, SCALE), Y, jnp.asarray(Z))
    X = ogp.LatentInputs(jnp.asarray(LOC), jnp.asarray(LOC), jnp.asarray(SCALE))
    kernel = 1.3 * kernels.RBF(jnp.asarray(ELL))
    fitted = ogp.CollapsedGP(kernel, X, jnp.asarray(Z), noise, jitter=0.0, observed=seen, group_size=size)
    (q,) = jax.jit(lambda: fitted.posterior(Y).beliefs)()
    params = {"f.u0_loc": q.loc, "f.u0_scale_tril": jnp.broadcast_to(q.scale_tril, (D, 4, 4))}
    other, guide = with_groups(size, seen, noise=jnp.asarray(noise))
    np.testing.assert_allclose(elbo(other, guide, Y, jnp.asarray(Z), params=params), collapsed, rtol=1e-9)


def test_a_natural_step_ends_on_the_collapsed_bound():
    model = partial(gplvm, bound="titsias2025", group_size=4)
    guide = guide_at(averaged, LOC, SCALE, natural=True, residual="tight", group_size=4)
    svi = SVI(averaged, guide, ogp.natural_gradient(optax.sgd(0.0), 1.0), TraceMeanField_ELBO())

    @jax.jit
    def step():
        state = svi.update(svi.init(KEY, Y, jnp.asarray(Z)), Y, jnp.asarray(Z))[0]
        return svi.evaluate(state, Y, jnp.asarray(Z))

    np.testing.assert_allclose(-step(), elbo(model, guide_at(model, LOC, SCALE), Y, jnp.asarray(Z)), rtol=1e-8)


def at(dtype, size, spread, name="titsias2025", noise=0.4):
    X = ogp.LatentInputs(*(jnp.asarray(a, dtype) for a in (LOC, LOC, spread * SCALE)))
    kernel = kernels.RBF(jnp.asarray(ELL, dtype)) + kernels.Linear(jnp.asarray(0.5, dtype))
    gp = ogp.CollapsedGP(
        kernel, X, jnp.asarray(Z, dtype), jnp.asarray(noise, dtype), bound=name, group_size=size, jitter=1e-5
    )
    return gp.log_prob(jnp.asarray(Y, dtype))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(2, 3), st.floats(0.0, 2.0), st.floats(0.2, 1.0))
def test_bounds_are_in_order(size, factor, spread, noise):
    fine, coarse, diagonal = (float(at("float64", s, spread, noise=noise)) for s in (size, factor * size, None))
    loose, whole = (
        float(at("float64", None, spread, "titsias2009", noise)),
        float(at("float64", N, spread, noise=noise)),
    )
    assert loose <= diagonal <= fine + 1e-8 <= coarse + 2e-8 <= whole + 3e-8


def test_known_inputs_give_the_groups_of_known_inputs(size=4):
    """The limit of no uncertainty, by another path."""
    kernel = kernels.RBF(jnp.asarray(ELL)) + kernels.Linear(jnp.asarray(0.5))
    known = ogp.CollapsedGP(kernel, jnp.asarray(LOC), jnp.asarray(Z), 0.4, group_size=size, jitter=1e-5).log_prob(Y)
    np.testing.assert_allclose(float(at("float64", size, 0.0)), float(known), rtol=1e-8)


def test_float32(size=4):
    (exact, slope), (value, slope32) = (
        jax.value_and_grad(lambda s, d=d: at(d, size, s))(jnp.asarray(1.0, d)) for d in ("float64", "float32")
    )
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    np.testing.assert_allclose(slope32, slope, rtol=2e-2)


def test_kernels_without_closed_expectations_are_refused():
    message = "between uncertain inputs is known for sums and products of RBF.*got Matern32"
    model = partial(gplvm, bound="titsias2025", kernel=kernels.Matern32(1.0), group_size=4)
    with pytest.raises(ValueError, match=message):
        elbo(model, guide_at(model, LOC, SCALE), Y, jnp.asarray(Z))
    model, guide = with_groups(4, kernel=kernels.Matern32(1.0))
    with pytest.raises(ValueError, match=message):
        elbo(model, guide, Y, jnp.asarray(Z))
