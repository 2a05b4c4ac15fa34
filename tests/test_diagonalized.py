"""Functions in the coordinates in which q's covariances are diagonal are the functions that they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from numpy.testing import assert_allclose
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods, online
from numpyro_orthgp.gaussians.family import Full
from tests import problems
from tests.test_online import gaussian
from tests.test_paths import CASES, MATERN, B, D, full, function, mean_only, three_sets

diagonalized = jax.jit(lambda f: f.diagonalized())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_moments_and_derivatives(rng, case):
    f, X, *_ = case(rng, jnp.asarray(rng.uniform(-2, 2, (B, D))))
    turned = diagonalized(f)
    assert not any(isinstance(q, Full) for q in turned.beliefs)

    def moments(f, X):
        marginals, joint = f(X), f.joint(X)
        return marginals.mean, marginals.explained, marginals.residual, joint.mean, joint.covariance_matrix

    @jax.jit
    def values(f, X):
        return moments(f, X), jax.grad(lambda X: sum(jnp.sum(jnp.sin(m)) for m in moments(f, X)))(X)

    for a, b in zip(*(jax.tree.leaves(values(g, X)) for g in (turned, f)), strict=True):
        assert_allclose(a, b, rtol=1e-8, atol=1e-9)


def test_points_enough_for_triangular_products_in_strips(rng):
    """Of the function, and of what grows out of it."""
    f = function(MATERN, problems.sets(rng, [260]), [full(rng, 260)], jitter=1e-6)
    X, y = (jnp.asarray(a) for a in problems.data(rng, B))

    @jax.jit
    def moments(f):
        grown = online.condition(f, X, y, gaussian, num_steps=1)
        return [(m.mean, m.explained, m.residual) for m in (f(X), grown(X + 0.1))]

    for a, b in zip(*(jax.tree.leaves(moments(g)) for g in (diagonalized(f), f)), strict=True):
        assert_allclose(a, b, rtol=1e-7, atol=1e-8)


def test_float32_loses_no_digits(rng):
    """Where q is narrow, and points are so close that a cache of L^-T (I - S) L^-1 would be noise. Of several functions, since
    rounding is a matter of luck: errors of residuals are 3 to 5 times those of the triangular whitener, others 1 to 1.6."""
    at = jax.jit(lambda f, X: f(X))
    errors = []
    for _ in range(6):
        Z, X = np.sort(rng.uniform(-2, 2, (40, 1)), 0), jnp.asarray(rng.uniform(-2, 2, (50, 1)))
        q = full(rng, 40)
        exact = function(MATERN, [Z], [Full(q.loc, 1e-4 * q.scale_tril)], jitter=1e-6)
        single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), exact)
        truth, plain, turned = (at(f, X.astype(f.beliefs[0].loc.dtype)) for f in (exact, single, diagonalized(single)))
        assert turned.explained.dtype == jnp.float32
        for name in ("mean", "explained", "residual"):
            a, b, c = (np.asarray(getattr(m, name), float) for m in (truth, plain, turned))
            errors.append([np.abs(b - a).max() + 3e-7 * np.abs(a).max(), np.abs(c - a).max()])
    plain, turned = np.reshape(errors, (6, 3, 2)).sum(0).T
    assert np.all(turned < [3 * plain[0], 3 * plain[1], 6 * plain[2]]), (plain, turned)


def test_one_product_less(rng):
    """Of M x M with M x B, as the compiler counts operations."""
    Z = rng.uniform(-2, 2, (64, D))
    f = function(MATERN, [Z], [full(rng, 64)])
    X = jnp.asarray(rng.uniform(-2, 2, (4096, D)))

    def flops(f):
        return jax.jit(lambda f, X: f(X).variance).lower(f, X).cost_analysis()["flops"]

    product = 2 * 64 * 64 * 4096
    assert flops(f) - flops(diagonalized(f)) > 0.9 * product


def test_growing_a_function(rng):
    """Conditioning, compressing and remembering need not know; starting a guide does, and says so."""
    X, y = (jnp.asarray(a) for a in problems.data(rng, 8))
    f = three_sets(rng, X).f
    turned = diagonalized(f)
    points = jnp.asarray(problems.sets(rng, [5])[0])

    @jax.jit
    def grown(g):
        conditioned = online.condition(g, X, y, gaussian, num_steps=2)
        marginals = conditioned(points), online.compress(g, points)(X), conditioned.diagonalized()(points)
        return [(m.mean, m.variance) for m in marginals]

    for a, b in zip(*(jax.tree.leaves(grown(g)) for g in (turned, f)), strict=True):
        assert_allclose(a, b, rtol=1e-7, atol=1e-8)
    ratio = jax.jit(online.memory.log_ratio)
    now = function(MATERN, problems.sets(rng, (5,)), [full(rng, 5)])
    single = function(MATERN, problems.sets(rng, (4,)), [full(rng, 4)])
    assert_allclose(ratio(now, diagonalized(single)), ratio(now, single), rtol=1e-8)
    assert_allclose(online.divergences(turned), online.divergences(f), rtol=1e-8)
    with pytest.raises(ValueError, match=r"diagonalized\(\) returned"):
        online.start_from("f", turned)


def test_twice_is_once(rng):
    f = mean_only(rng, jnp.asarray(rng.uniform(-2, 2, (B, D)))).f
    once = diagonalized(f)
    for a, b in zip(jax.tree.leaves(diagonalized(once)), jax.tree.leaves(once), strict=True):
        assert_allclose(a, b)


def test_a_fit_leaves_the_function_as_it_is():
    """At the start all eigenvalues of S are equal, and a derivative of its decomposition would be NaN."""
    X = jnp.linspace(0.0, 1.0, 6)[:, None]

    def model(turn):
        f = ogp.gp("f", MATERN, X[::2, :1] * jnp.ones(D))
        m = (f.diagonalized() if turn else f)(X * jnp.ones(D))
        numpyro.sample("y", likelihoods.Gaussian(m, 0.3).to_event(1), obs=jnp.sin(X[:, 0]))

    params = []
    for turn in (True, False):
        svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.1), TraceMeanField_ELBO())
        params.append(svi.run(jax.random.PRNGKey(0), 3, turn, progress_bar=False).params)
    assert all(bool(jnp.isfinite(p).all()) for p in params[0].values())
    for name in params[1]:
        assert_allclose(params[0][name], params[1][name], rtol=1e-12)
