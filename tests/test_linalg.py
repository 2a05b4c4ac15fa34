"""The jitter policy and the Cholesky factor that does not fail silently."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_orthgp.math.cholesky import inverse_cholesky, safe_cholesky
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, safe_sqrt, solve_lower

DTYPES = [jnp.float32, jnp.float64]


def spd(rng, *batch, M=5):
    A = rng.normal(size=(*batch, M, M))
    return jnp.asarray(A @ np.swapaxes(A, -1, -2) + np.eye(M))


def test_safe_cholesky_is_cholesky_where_that_exists(rng):
    K = spd(rng, 3)
    np.testing.assert_array_equal(safe_cholesky(K, jnp.ones(3)), jnp.linalg.cholesky(K))


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_safe_cholesky_derivative(rng, mode):
    K, W = spd(rng, 2), jnp.asarray(rng.normal(size=(2, 5, 5)))

    def value(factor):
        return lambda K: jnp.sum(W * factor((K + jnp.swapaxes(K, -1, -2)) / 2))

    derivative = jax.grad if mode == "reverse" else jax.jacfwd
    ours = derivative(value(lambda K: safe_cholesky(K, jnp.ones(2))))(K)
    np.testing.assert_allclose(ours, derivative(value(jnp.linalg.cholesky))(K), rtol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_and_indefinite_matrices_get_a_finite_factor(dtype, rng):
    ones = jnp.ones((6, 6), dtype)  # rank one: six times the same point
    noisy = ones - 1e-6 * jnp.eye(6, dtype=dtype)  # indefinite by a little rounding
    fine = jnp.asarray(spd(rng, M=6), dtype)
    K = jnp.stack([ones, noisy, fine])

    def total(K):
        return jnp.sum(safe_cholesky(K, jnp.ones(3, dtype)) ** 2)

    L = safe_cholesky(K, jnp.ones(3, dtype))
    assert L.dtype == dtype and bool(jnp.isfinite(L).all()) and bool(jnp.isfinite(jax.grad(total)(K)).all())
    np.testing.assert_allclose(L @ jnp.swapaxes(L, -1, -2), K, atol=3e-5)
    # The healthy matrix of the batch keeps its own factor: only those that failed get more jitter.
    np.testing.assert_array_equal(L[2], jnp.linalg.cholesky(fine))


def test_nan_is_handed_on_not_hidden():
    assert bool(jnp.isnan(safe_cholesky(jnp.full((2, 2), jnp.nan), jnp.asarray(1.0))).any())


def test_vmap_and_jit(rng):
    K = spd(rng, 4)
    mapped = jax.jit(jax.vmap(safe_cholesky))(K, jnp.ones(4))
    np.testing.assert_allclose(mapped, jnp.linalg.cholesky(K), rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_jitter_by_dtype(dtype):
    assert default_jitter(dtype) == {"float32": 1e-6, "float64": 1e-10}[jnp.dtype(dtype).name]
    assert add_jitter(jnp.zeros((2, 2), dtype), jnp.asarray(0.5, dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_safe_sqrt_and_its_derivatives(dtype):
    x = jnp.asarray([-1.0, 0.0, 1e-12, 0.25, 4.0], dtype)
    np.testing.assert_allclose(safe_sqrt(x), [0, 0, 1e-6, 0.5, 2], rtol=1e-6)
    first, second = jax.grad(safe_sqrt), jax.grad(jax.grad(safe_sqrt))
    np.testing.assert_allclose(jax.vmap(first)(x), [0, 0, 5e5, 1, 0.25], rtol=1e-6)
    assert bool(jnp.isfinite(jax.vmap(second)(x)).all())
    np.testing.assert_allclose(second(x[3]), -2.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M, D", [(4, 2), (16, 2), (16, 1), (33, 2)])
def test_compiled_square_root_beside_a_cholesky_factor(rng, M, D, dtype):
    """XLA's CPU compiler got the diagonal of this matrix wrong (by a third) with the usual `where`-guarded square root."""
    Z = jnp.asarray(rng.uniform(-2, 2, (M, D)), dtype)

    def both(variance, lengthscale):
        scaled = Z / lengthscale
        s = safe_sqrt(5 * sum(jnp.square(scaled[:, None, d] - scaled[None, :, d]) for d in range(D)))
        K = variance * ((1 + s + s**2 / 3) * jnp.exp(-s))
        return K, jnp.linalg.cholesky(K + 0.01 * jnp.eye(M, dtype=dtype))

    hyper = (jnp.asarray(1.2, dtype), jnp.full(D, 0.8, dtype))
    for eager, compiled in zip(both(*hyper), jax.jit(both)(*hyper), strict=True):
        np.testing.assert_allclose(compiled, eager, atol=1e-4 if dtype == jnp.float32 else 1e-9)


def test_solve_lower_broadcasts(rng):
    L = jnp.linalg.cholesky(spd(rng, 3))
    B = jnp.asarray(rng.normal(size=(5, 2)))
    np.testing.assert_allclose(L @ solve_lower(L, B), jnp.broadcast_to(B, (3, 5, 2)), atol=1e-12)
    np.testing.assert_allclose(
        L[0] @ solve_lower(L[0], jnp.broadcast_to(B, (4, 5, 2))), jnp.broadcast_to(B, (4, 5, 2)), atol=1e-12
    )


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_products_with_the_inverse_factor_equal_solves(rng, mode):
    """The fast path (one rule, products) against the slow clear one (autodiff through factor and solve)."""
    K, B, V = spd(rng, 2), jnp.asarray(rng.normal(size=(5, 7))), jnp.asarray(rng.normal(size=(2, 5, 7)))

    def symmetric(K):
        return (K + jnp.swapaxes(K, -1, -2)) / 2

    def fast(K):
        return jnp.sum(V * (inverse_cholesky(symmetric(K), jnp.ones(2)) @ B) ** 2)

    def slow(K):
        return jnp.sum(V * solve_lower(jnp.linalg.cholesky(symmetric(K)), B) ** 2)

    np.testing.assert_allclose(fast(K), slow(K), rtol=1e-12)
    derivative = jax.grad if mode == "reverse" else jax.jacfwd
    np.testing.assert_allclose(derivative(fast)(K), derivative(slow)(K), rtol=1e-9, atol=1e-11)
