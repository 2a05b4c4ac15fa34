"""Cholesky factors that never fail silently, and their inverses at the speed of matrix products.

**Why the inverse.** With L^-1 everything of size M^2 B is a matrix product, forward and backward. Against solves that costs
about half a digit of float32 gradients (measured on kin40k, lengthscales 1 to 10).

**Why by halves.** LAPACK's factor and solve run at a third of the speed of products or less. So the factor of more than 64 rows
is found by halves, down to blocks of at most 128. The block beside the diagonal is solved for, though the inverse of the one
above it is at hand: multiplied, ill-conditioned float32 matrices lose their definiteness earlier; solved, they fail where
LAPACK fails and lose as many digits (``tests/test_linalg.py``). LAPACK alone is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.math.linalg import add_jitter, one_by_one, solve_lower
from numpyro_orthgp.math.products import linear_in_right, lower_matmul, lower_of_product, matmul, transpose
from numpyro_orthgp.types import Array

__all__ = ["inverse_cholesky", "relative_carrier", "rescue_jitter", "safe_cholesky"]

# Matrices of more rows than the first are split, their parts if they have more than the second (measured on two cores); but none
# into more blocks than the third.
_UNSPLIT = 64
_BLOCK = 128
_MOST_BLOCKS = 16


@jax.custom_jvp
def safe_cholesky(K: Array, scale: Array) -> Array:
    r"""Lower Cholesky factor of ``K``, with growing jitter where ``K`` is not numerically positive definite.

    The first attempt uses ``K`` as it is (the caller has added the jitter of the policy). Each further attempt adds
    :math:`10^t \epsilon M` times ``scale`` to the diagonal, :math:`t = 0, 1, \dots` while that is less than ``scale``, of those
    matrices of a batch that failed; so a NaN is handed on only if ``K`` itself holds one or is nowhere near positive
    semidefinite.

    :param K: symmetric matrices, shape (..., M, M).
    :param scale: the size of the prior variances, shape (...); what extra jitter is relative to.
    :return: shape (..., M, M), lower triangular.
    """
    return _retried(lambda noise: one_by_one(_cholesky, K, noise), jnp.broadcast_to(scale, K.shape[:-2]))[0]


@safe_cholesky.defjvp
def _safe_cholesky_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # dL = L Phi(L^-1 dK L^-T) with Phi the lower triangle, its diagonal halved. Using the factor that was returned,
    # whatever jitter it took, keeps failed attempts (NaN) out of the derivative. `scale` moves only rescue jitter.
    K, scale = primals
    dK, _ = tangents
    L = safe_cholesky(K, scale)
    half = solve_lower(L, (dK + transpose(dK)) / 2)
    return L, matmul(L, _lower_half(solve_lower(L, transpose(half))))


@jax.custom_jvp
def inverse_cholesky(K: Array, scale: Array) -> Array:
    r"""The inverse :math:`W = L^{-1}` of :func:`safe_cholesky`'s factor, lower triangular.

    Solving with L by a product with W makes nearly everything a matrix product, forward and backward; factors and triangular
    solves run far below the speed of those on every kind of device. The derivative takes K to be a symmetric function of what
    it depends on.

    :param K: symmetric matrices, of which the lower triangles are read, shape (..., M, M).
    :param scale: as for :func:`safe_cholesky`.
    """
    return _inverse_cholesky(K, scale)[0]


def rescue_jitter(K: Array, scale: Array) -> Array:
    """What :func:`inverse_cholesky` adds to the diagonal of ``K``, relative to ``scale``: zero where it needs nothing.

    :return: shape (...).
    """
    return _inverse_cholesky(K, scale)[1]


@jax.jit  # called outside of any other, each of its many small operations would be compiled by itself
def _inverse_cholesky(K: Array, scale: Array) -> tuple[Array, Array]:
    scale = jnp.broadcast_to(scale, K.shape[:-2])
    M = K.shape[-1]
    block = max(_UNSPLIT, min(_half(M), _BLOCK), -(-M // _MOST_BLOCKS))

    def factor(block: int, noise: Array) -> Array:
        return one_by_one(partial(_by_halves, block=block), K, noise)

    # Few blocks where it hardly ever comes to, since they take time to compile.
    return _retried(partial(factor, max(block, M // 4)), scale, factor(block, jnp.zeros_like(scale)))


@inverse_cholesky.defjvp
def _inverse_cholesky_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    W = inverse_cholesky(*primals)
    return W, lower_matmul(_relative_change(W, tangents[0]), W)


@jax.custom_jvp
def relative_carrier(K: Array, W: Array) -> Array:
    r"""Zeros whose derivative is that of ``W = inverse_cholesky(K, scale)`` relative to it, :math:`E = dW \, W^{-1}`.

    Whatever W multiplies changes by E times what comes out, :math:`dW B = E (W B)`. Backward, E's gradient is made of the product
    alone, where the gradient of W itself would have to be multiplied by :math:`W^\top` first.

    :return: shape (..., M, M); the derivative is lower triangular.
    """
    return jnp.zeros_like(W)


@relative_carrier.defjvp
def _relative_carrier_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return relative_carrier(*primals), _relative_change(primals[1], tangents[0])


def _relative_change(W: Array, dK: Array) -> Array:
    """E of dW = E W: from dL = L Phi(W dK W^T) it is -L^-1 dL."""
    return -_lower_half(lower_of_product(linear_in_right(W, dK), W))


def _cholesky(K: Array, noise: Array) -> Array:
    return lax.linalg.cholesky(add_jitter(K, noise))


def _retried(factor: Callable[[Array], Array], scale: Array, first: Array | None = None) -> tuple[Array, Array]:
    """``first``, by default ``factor(0)``; where it failed ``factor(noise)``, with as much as it takes; and noise / scale."""
    first = factor(jnp.zeros_like(scale)) if first is None else first
    unit = jnp.asarray(jnp.finfo(first.dtype).eps * first.shape[-1], first.dtype)

    def failed(L: Array) -> Array:
        return ~jnp.isfinite(L).all(axis=(-2, -1))

    def retry(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        relative, L, used, bad = state
        L = jnp.where(bad[..., None, None], factor(relative * scale), L)
        return 10 * relative, L, jnp.where(bad, relative, used), failed(L)

    def again(state: tuple[Array, Array, Array, Array]) -> Array:
        relative, _, _, bad = state
        return (relative < 1) & bad.any()

    start = (unit, first, jnp.zeros(first.shape[:-2], first.dtype), failed(first))
    _, L, used, _ = lax.while_loop(again, retry, start)
    return L, used


def _by_halves(K: Array, noise: Array, block: int) -> Array:
    """The inverse of the Cholesky factor of K + noise I; it holds NaN where the factor does not exist.

    Matrices of up to ``block`` rows are factored at once, larger ones by halves.
    """
    return _factor(K, noise, block)[1]


def _factor(K: Array, noise: Array, block: int) -> tuple[Array, Array]:
    """The factor and its inverse."""
    M = K.shape[-1]
    if M <= block:
        L = lax.linalg.cholesky(add_jitter(K, noise), symmetrize_input=False)
        return L, solve_lower(L, jnp.eye(M, dtype=K.dtype))
    half = _half(M)
    L1, W1 = _factor(K[..., :half, :half], noise, block)
    # A solve, though W1 is there: with the product the rest is no longer positive definite where K is ill conditioned.
    across = lax.linalg.triangular_solve(L1, K[..., half:, :half], left_side=False, lower=True, transpose_a=True)
    L2, W2 = _factor(K[..., half:, half:] - matmul(across, transpose(across)), noise, block)
    return _lower(L1, across, L2), _lower(W1, -matmul(W2, matmul(across, W1)), W2)


def _half(M: int) -> int:
    """Half of the rows, rounded up to a multiple of 8."""
    return -(-M // 16) * 8


def _lower(first: Array, across: Array, second: Array) -> Array:
    above = jnp.zeros_like(transpose(across))
    return jnp.block([[first, above], [across, second]])


def _lower_half(S: Array) -> Array:
    """Phi: the lower triangle with its diagonal halved."""
    return jnp.tril(S) * (1 - jnp.eye(S.shape[-1], dtype=S.dtype) / 2)
