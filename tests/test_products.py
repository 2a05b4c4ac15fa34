"""Products with triangular matrices in strips: the dense products, their derivatives of all kinds, and fewer operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from numpyro_orthgp.math.products import (
    linear_in_left,
    linear_in_right,
    linear_transposed,
    lower_matmul,
    lower_matmul_transposed,
    lower_of_product,
    plain_matmul_lower,
)

# Each beside the product that it stands for; only the lower triangle of the last one's is of meaning.
PRODUCTS = {
    "plain": (lower_matmul, lambda L, B: L @ B),
    "transposed": (lower_matmul_transposed, lambda L, B: jnp.swapaxes(L, -1, -2) @ B),
    "lower": (lambda L, B: jnp.tril(lower_of_product(B, L)), lambda L, B: jnp.tril(B @ jnp.swapaxes(L, -1, -2))),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("M", [5, 256, 300, 521])  # one strip, two, two uneven ones, four uneven ones
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_and_derivatives(rng, name, M, batch):
    ours, dense = PRODUCTS[name]
    L = jnp.asarray(np.tril(rng.normal(size=(*batch, M, M))))
    B = jnp.asarray(rng.normal(size=(*batch, M, M) if name == "lower" else (M, 7)))
    dL, dB = jnp.asarray(np.tril(rng.normal(size=L.shape))), jnp.asarray(rng.normal(size=B.shape))

    @jax.jit
    def values(L, B, dL, dB):
        def results(f):
            def loss(L, B):
                return jnp.sum(jnp.sin(f(jnp.tril(L), B)))

            gradient = jax.grad(loss, (0, 1))
            return jax.jvp(f, (L, B), (dL, dB)), gradient(L, B), jax.jvp(gradient, (L, B), (dL, dB))

        return results(ours), results(dense)

    for a, b in zip(*map(jax.tree.leaves, values(L, B, dL, dB)), strict=True):
        assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="JAX counts operations of programs for CPUs")
@pytest.mark.parametrize("name", PRODUCTS)
def test_few_operations(name):
    """With three strips 6/9 of the dense product's, for each of the three products forward and backward; fewer where both factors
    are triangular."""
    M = 768
    square = jax.ShapeDtypeStruct((M, M), jnp.float32)

    def flops(f):
        def both(L, B, G):
            value, vjp = jax.vjp(f, L, B)
            return value, vjp(G)

        return jax.jit(both).lower(square, square, square).cost_analysis()["flops"]

    ours, dense = PRODUCTS[name]
    assert flops(ours) < 0.68 * flops(dense)


@pytest.mark.parametrize(("dtype", "M", "num"), [("float32", 504, 1), ("float32", 512, 2), ("float64", 256, 2)])
def test_strips_of_float64_may_be_half_as_wide(dtype, M, num):
    matrix = jax.ShapeDtypeStruct((M, M), dtype)
    assert str(jax.make_jaxpr(lower_matmul)(matrix, matrix)).count("dot_general") == num


# Maps of a tangent (the first argument), for derivative rules.
LINEAR = {
    "left": (linear_in_left, lambda dL, B: dL @ B),
    "right": (lambda dB, L: linear_in_right(L, dB), lambda dB, L: L @ dB),
    "transposed": (lambda dE, L: linear_transposed(L, dE), lambda dE, L: L.T @ dE),
    "lower": (plain_matmul_lower, lambda A, L: A @ L),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("M", [5, 256, 521])
def test_linear_maps_and_their_transposes(rng, name, M):
    ours, dense = LINEAR[name]
    tangent = np.tril(rng.normal(size=(M, M))) if name != "right" else rng.normal(size=(M, 9))
    other = rng.normal(size=(M, 9)) if name == "left" else np.tril(rng.normal(size=(M, M)))
    values = jax.jit(ours)(tangent, other)
    assert_allclose(values, dense(tangent, other), rtol=1e-9, atol=1e-9)
    G = rng.normal(size=values.shape)
    (transpose,) = jax.jit(lambda G: jax.linear_transpose(lambda x: ours(x, other), tangent)(G))(G)
    (expected,) = jax.linear_transpose(lambda x: dense(x, other), tangent)(G)
    if name != "right":  # of a lower-triangular tangent only that triangle of its gradient is of meaning
        transpose, expected = jnp.tril(transpose), jnp.tril(expected)
    assert_allclose(transpose, expected, rtol=1e-9, atol=1e-9)


def test_float32(rng):
    L, B = (jnp.asarray(rng.normal(size=(256, 256)), jnp.float32) for _ in range(2))
    L = jnp.tril(L)
    assert lower_matmul(L, B).dtype == jnp.float32
    assert_allclose(lower_matmul(L, B), np.asarray(L, float) @ np.asarray(B, float), atol=1e-4)


@pytest.mark.parametrize("kinds", [(np.float64, np.float32), (np.float32, np.float64)])
def test_factors_of_two_precisions(rng, kinds):
    """Strips depend on the dtype; 64-bit hyperparameters beside inputs in 32 bits ended in an error of `dot_general`."""
    L, E = (jnp.asarray(np.tril(rng.normal(size=(256, 256))), kind) for kind in kinds)
    B = jnp.asarray(rng.normal(size=(256, 7)), kinds[1])
    pairs = [
        (linear_transposed(L, E), jnp.tril(L.T @ E)),
        (linear_in_right(L, B), L @ B),
        (linear_in_left(L, B), L @ B),
    ]
    for ours, dense in pairs:
        assert_allclose(jnp.tril(ours) if ours.shape == L.shape else ours, dense, rtol=1e-4, atol=1e-4)
