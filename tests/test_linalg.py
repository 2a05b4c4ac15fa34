"""The jitter policy and the Cholesky factor that does not fail silently."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_orthgp.math.blocks import map_blocks, sum_blocks
from numpyro_orthgp.math.cholesky import inverse_cholesky, safe_cholesky
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, safe_sqrt
from numpyro_orthgp.math.products import (
    combine,
    diagonal,
    gram,
    gram_transposed,
    linear_matmul,
    matmul,
    matmul_transposed,
)
from numpyro_orthgp.math.triangular import solve_lower

DTYPES = [jnp.float32, jnp.float64]


def spd(rng, *batch, M=5):
    A = rng.normal(size=(*batch, M, M))
    return jnp.asarray(A @ np.swapaxes(A, -1, -2) + np.eye(M))


def test_safe_cholesky_is_cholesky_where_that_exists(rng):
    K = spd(rng, 3)
    np.testing.assert_array_equal(safe_cholesky(K, jnp.ones(3)), jnp.linalg.cholesky(K))


@pytest.mark.parametrize("M", [5, 256, 271])
def test_gram_with_its_derivatives(rng, M):
    """Matrices of 256 rows and more are multiplied by halves, these equal or not."""
    A, w, S = (jnp.asarray(rng.normal(size=shape)) for shape in ((2, M, 7), (2, 7), (2, M, M)))

    def dense(A, w):
        return jnp.einsum("pmb,pb,pnb->pmn", A, w, A)

    def results(function):
        gradient = jax.grad(lambda *args: jnp.vdot(S, function(*args)), argnums=(0, 1))
        return function(A, w), jax.jvp(function, (A, w), (jnp.cos(A), jnp.sin(w))), gradient(A, w)

    for a, b in zip(*(jax.tree.leaves(results(f)) for f in (gram, dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


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
    np.testing.assert_array_max_ulp(L[2], jnp.linalg.cholesky(fine), 1)  # a GPU's batched factor rounds otherwise


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
def test_safe_sqrt_has_forward_derivatives_of_gradients_through_loops(dtype):
    """As ``jax.hessian`` takes them; JAX forgets custom rules there."""
    x, dx = jnp.asarray([[0.0, 0.0], [0.3, -0.4]], dtype), jnp.asarray([[1.0, 2.0], [0.5, 3.0]], dtype)

    def distances(x):
        return jax.lax.map(lambda row: safe_sqrt(jnp.sum(row**2)), x)

    def gradient(loop, at):
        values = distances if loop else jax.vmap(lambda row: safe_sqrt(jnp.sum(row**2)))
        return jax.grad(lambda at: jnp.sum(at[0] * values(at[1])))(at)

    at, change = (jnp.ones((), dtype), x), (jnp.zeros((), dtype), dx)
    once, looped = (jax.jvp(lambda at, loop=loop: gradient(loop, at), (at,), (change,))[1] for loop in (False, True))
    np.testing.assert_allclose(looped[0], (0.3 * 0.5 - 0.4 * 3.0) / 0.5, rtol=1e-5)
    np.testing.assert_allclose(looped[1][1], once[1][1], rtol=1e-4)
    assert np.isfinite(looped[1]).all()
    np.testing.assert_array_equal(distances(x)[0], 0)


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


def slow_inverse(K):
    """LAPACK's factor and a solve, with nothing of ours."""
    eye = jnp.broadcast_to(jnp.eye(K.shape[-1], dtype=K.dtype), K.shape)
    return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(K), eye, lower=True)


@pytest.mark.parametrize("M", [64, 65, 128, 131, 300])  # one block; halves of unequal size; of equal size; quarters
def test_inverse_factors_by_halves(rng, M):
    K, V = spd(rng, 2, M=M), jnp.asarray(rng.normal(size=(2, M, M)))

    def value_and_gradient(inverse):
        return jax.jit(jax.value_and_grad(lambda K: jnp.sum(V * inverse((K + jnp.swapaxes(K, -1, -2)) / 2))))(K)

    def ours(K):
        return inverse_cholesky(K, jnp.ones(2))

    (value, gradient), (expected, reference) = value_and_gradient(ours), value_and_gradient(slow_inverse)
    np.testing.assert_allclose(value, expected, rtol=1e-11)
    np.testing.assert_allclose(gradient, reference, rtol=1e-7, atol=1e-10)
    W = ours(K)
    np.testing.assert_array_equal(W, jnp.tril(W))


def ill_conditioned(M, lengthscale, dtype):
    """A squared-exponential kernel of M random points, with the default jitter."""
    Z = np.random.default_rng(0).normal(size=(M, 8)) / lengthscale
    K = np.exp(-((Z[:, None] - Z) ** 2).sum(-1) / 2) + default_jitter(dtype) * np.eye(M)
    return K, jnp.asarray(K, dtype)


@pytest.mark.parametrize(("M", "lengthscale"), [(100, 4.0), (100, 8.0), (512, 2.0), (512, 4.0)])
def test_halves_are_as_accurate_as_lapack_in_float32(M, lengthscale):
    """W K W' = I to within a few times LAPACK's own error, where that is between 1e-4 and 1/5."""
    exact, K = ill_conditioned(M, lengthscale, jnp.float32)
    errors = []
    for W in (jax.jit(slow_inverse)(K), jax.jit(inverse_cholesky)(K, jnp.ones((), K.dtype))):
        W = np.asarray(W, float)
        errors.append(np.abs(W @ exact @ W.T - np.eye(M)).max())
    assert errors[1] < 4 * errors[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_singular_matrices_get_a_finite_inverse_factor(dtype, rng):
    ones = jnp.ones((200, 200), dtype)
    fine = jnp.asarray(spd(rng, M=200), dtype)
    K, scale = jnp.stack([ones, fine]), jnp.ones(2, dtype)

    def total(K):
        W = inverse_cholesky(K, scale)
        return jnp.sum(W**2), W

    gradient, W = jax.jit(jax.grad(total, has_aux=True))(K)
    assert W.dtype == dtype and bool(jnp.isfinite(W).all()) and bool(jnp.isfinite(gradient).all())
    assert float(jnp.abs(W[0] @ ones @ W[0].T).max()) < 1.01  # a contraction: noise was added, none taken away
    rtol = 1e-4 if dtype == jnp.float32 else 1e-9
    np.testing.assert_allclose(W[1], slow_inverse(fine), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_products_are_products(rng, mode):
    """Values and derivatives of what has rules of its own, against plain JAX; with axes that broadcast."""
    A, B, V = (jnp.asarray(rng.normal(size=s)) for s in ((3, 4, 5), (5, 2), (3, 4, 2)))
    w, Q = jnp.asarray(rng.normal(size=(3, 4))), jnp.asarray(rng.normal(size=(4, 4)))
    pairs = [
        (lambda A, B: V * matmul(A, B), lambda A, B: V * (A @ B)),
        (lambda A, B: V * matmul_transposed(jnp.swapaxes(A, -1, -2), B), lambda A, B: V * (A @ B)),
        (lambda A, B: gram_transposed(A @ B) @ Q[:2], lambda A, B: (A @ B).mT @ (A @ B) @ Q[:2]),
        (lambda A, B: combine(w, A) @ B, lambda A, B: jnp.einsum("pm,pmb,bk->pk", w, A, B)),
        (lambda A, B: combine(w, A[0]) @ B, lambda A, B: w @ A[0] @ B),
        (lambda A, B: diagonal(A @ B @ B.T @ A.mT + Q), lambda A, B: jnp.diagonal(A @ B @ B.T @ A.mT + Q, 0, -2, -1)),
    ]
    derivative = jax.jacrev if mode == "reverse" else jax.jacfwd
    for fast, slow in pairs:
        np.testing.assert_allclose(fast(A, B), slow(A, B), rtol=1e-12)
        for a, b in zip(derivative(fast, (0, 1))(A, B), derivative(slow, (0, 1))(A, B), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_are_linear_are_transposed(rng, dtype):
    """Backward they are products with the transpose, which is copied in float64."""
    A, B, G = (rng.normal(size=s) for s in ((300, 5), (5, 3), (300, 3)))
    product, transposed = jax.vjp(lambda B: linear_matmul(jnp.asarray(A, dtype), B), jnp.asarray(B, dtype))
    copied = "optimization_barrier" in str(jax.make_jaxpr(linear_matmul)(jnp.asarray(A, dtype), jnp.asarray(B, dtype)))
    assert copied == (dtype == jnp.float64)
    rtol = 1e-5 if dtype == jnp.float32 else 1e-13
    np.testing.assert_allclose(product, A @ B, rtol=rtol, atol=10 * rtol)
    np.testing.assert_allclose(transposed(jnp.asarray(G, dtype))[0], A.T @ G, rtol=rtol, atol=100 * rtol)


@pytest.mark.parametrize("size", [1, 3, 7, 8, 100])
def test_blocks_change_nothing(rng, size):
    rows = {"X": jnp.asarray(rng.normal(size=(8, 3))), "w": jnp.asarray(rng.normal(size=8))}

    def each(rows):
        return 1 / rows["X"] * rows["w"][:, None]  # not finite at zero: what fills a block must be like the rows

    def total(rows):
        return weighted({"X": rows["X"]}, rows["w"])

    def weighted(rows, w):
        return {"sum": each(rows | {"w": w}).sum(0)}

    def in_blocks(rows):
        return sum_blocks(weighted, {"X": rows["X"]}, rows["w"], size)

    np.testing.assert_allclose(map_blocks(each, rows, size), each(rows), rtol=1e-14)
    np.testing.assert_allclose(in_blocks(rows)["sum"], total(rows)["sum"], rtol=1e-13)
    pairs = [(in_blocks, total), (lambda rows: {"sum": map_blocks(each, rows, size)}, lambda rows: {"sum": each(rows)})]
    for blocks, whole in pairs:
        a, b = (jax.grad(lambda r, f=f: jnp.sum(f(r)["sum"] ** 2))(rows) for f in (blocks, whole))
        for name in rows:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-12)


@pytest.mark.parametrize("M", [5, 70, 140])  # batches of small matrices are one call, those of larger ones are not
def test_batches_are_factored_like_single_matrices(rng, M):
    K, B = spd(rng, 2, 3, M=M), jnp.asarray(rng.normal(size=(M, 2)))
    scale = jnp.asarray(1.0)  # of all matrices

    @jax.jit
    def batch(K):
        return safe_cholesky(K, scale), inverse_cholesky(K, scale), solve_lower(safe_cholesky(K, scale), B)

    together = batch(K)
    for i in np.ndindex(2, 3):
        for a, b in zip(together, batch(K[i]), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-9, atol=1e-12)
    gradient = jax.jit(jax.grad(lambda K: jnp.sum(jnp.sin(batch((K + K.mT) / 2)[2]))))
    np.testing.assert_allclose(gradient(K)[1, 2], gradient(K[1, 2]), rtol=1e-7, atol=1e-10)


BATCHES = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from numpyro_orthgp.math.cholesky import inverse_cholesky
A, V = np.random.default_rng(0).normal(size=(2, 2, 300, 300))
K = A @ np.swapaxes(A, -1, -2) + np.eye(300)
step = jax.jit(jax.value_and_grad(lambda K: jnp.sum(V * inverse_cholesky((K + K.mT) / 2, jnp.ones(2)))))
for _ in range(200):
    jax.block_until_ready(step(K))
print("done")
"""


def test_batches_side_by_side_do_not_wait_for_each_other():
    """Batched LAPACK calls at the same time can wait for each other's threads for ever; on two cores they soon do."""
    run = subprocess.run([sys.executable, "-c", BATCHES], capture_output=True, text=True, timeout=120)
    assert "done" in run.stdout, run.stderr[-2000:]


@pytest.mark.parametrize("M", [18, 64, 200])
def test_float32_explains_no_more_than_there_is(M):
    """Points so close that the jitter decides: |W k|^2 must not exceed the variance by more than the rounding of k."""
    points = np.linspace(-1, 1, M).astype(np.float32).astype(float)
    at = np.linspace(-1, 1, 15)
    K, k = (np.exp(-0.5 * (points[:, None] - x) ** 2) for x in (points, at))
    K += 1e-6 * np.eye(M)
    exact = np.sum(k * np.linalg.solve(K, k), 0)
    W = inverse_cholesky(jnp.asarray(K, jnp.float32), jnp.float32(1))
    explained = jnp.sum(jnp.matmul(W, jnp.asarray(k, jnp.float32), precision="highest") ** 2, 0)
    assert np.abs(explained - exact).max() < 3e-4  # 6e-4, 1.6e-2 and 1e-2 where L W = I was solved
    L = safe_cholesky(jnp.asarray(K, jnp.float32), jnp.float32(1))
    W, L = (np.asarray(a, float) for a in (W, L))
    assert np.abs(W @ L - np.eye(M)).max() < 1e-3
