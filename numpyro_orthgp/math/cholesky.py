"""Cholesky factors that never fail silently, and their inverses at the speed of matrix products.

**Why the inverse.** With L^-1 everything of size M^2 B is a matrix product, forward and backward. Against solves that costs
about half a digit of float32 gradients (measured on kin40k, lengthscales 1 to 10).

**Why by halves.** LAPACK's factor runs at a third of the speed of products or less, and large ones start threads that take the
cores from XLA's (:mod:`~numpyro_orthgp.math.triangular`). So it gets blocks of 64 rows. The block beside the diagonal is multiplied
with the inverse of the one above it and refined once. Without the refinement ill-conditioned float32 matrices lose their
definiteness earlier; with it they fail where LAPACK fails and lose as many digits (``tests/test_linalg.py``, where LAPACK alone is
the oracle).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.math.linalg import add_jitter
from numpyro_orthgp.math.products import (
    linear_in_right,
    lower_matmul,
    lower_of_product,
    matmul,
    plain_matmul,
    transpose,
)
from numpyro_orthgp.math.triangular import (
    beside,
    block,
    half,
    inverse_lower,
    join_lower,
    one_by_one,
    plain_inverse,
    solve_right,
)
from numpyro_orthgp.types import Array

__all__ = [
    "change_of_inverse", "inverse_cholesky", "inverse_factor", "relative_carrier", "rescue_jitter", "root_of_inverse",
    "safe_cholesky",
]  # fmt: skip


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
    return _cholesky(K, scale)


@jax.jit  # called outside of any other, each of its many small operations would be compiled by itself
def _cholesky(K: Array, scale: Array) -> Array:
    return _retried(lambda K: _factor(K)[0], K, scale)[0]


@safe_cholesky.defjvp
def _safe_cholesky_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # dL = L Phi(L^-1 dK L^-T) with Phi the lower triangle, its diagonal halved. Using the factor that was returned,
    # whatever jitter it took, keeps failed attempts (NaN) out of the derivative. `scale` moves only rescue jitter.
    K, scale = primals
    dK, _ = tangents
    L = safe_cholesky(K, scale)
    W = inverse_lower(L)
    change = matmul(W, matmul((dK + transpose(dK)) / 2, transpose(W)))
    return L, matmul(L, _lower_half(change))


@jax.custom_jvp
def inverse_cholesky(K: Array, scale: Array) -> Array:
    r"""The inverse :math:`W = L^{-1}` of :func:`safe_cholesky`'s factor, lower triangular.

    Solving with L by a product with W makes nearly everything a matrix product, forward and backward; factors and triangular
    solves run far below the speed of those on every kind of device. The derivative takes K to be a symmetric function of what
    it depends on.

    :param K: symmetric matrices, shape (..., M, M).
    :param scale: as for :func:`safe_cholesky`.
    """
    return _inverse_cholesky(K, scale)[0]


def rescue_jitter(K: Array, scale: Array) -> Array:
    """What :func:`inverse_cholesky` adds to the diagonal of ``K``, relative to ``scale``: zero where it needs nothing.

    :return: shape (...).
    """
    return _inverse_cholesky(K, scale)[1]


def root_of_inverse(K: Array, scale: Array | None = None) -> Array:
    r"""The lower-triangular T with :math:`T T^\top = K^{-1}`, shape (..., M, M).

    :math:`T = J L^{-T} J` with J the reversal of axes and :math:`L L^\top = J K J`.

    :param scale: as for :func:`safe_cholesky`. Without it there is no extra jitter: T holds NaN where K is not positive definite,
        and has no derivative rule.
    """
    reversed_K = _reversed(K)
    W = inverse_factor(reversed_K) if scale is None else inverse_cholesky(reversed_K, scale)
    return _reversed(transpose(W))


def _reversed(K: Array) -> Array:
    return jnp.flip(K, axis=(-2, -1))


@jax.jit
def _inverse_cholesky(K: Array, scale: Array) -> tuple[Array, Array]:
    return _retried(lambda K: _factor(K)[1], K, scale)


@inverse_cholesky.defjvp
def _inverse_cholesky_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    W = inverse_cholesky(*primals)
    return W, change_of_inverse(W, tangents[0])


def inverse_factor(K: Array, of_rows: bool = False) -> Array:
    """One attempt, without extra jitter: NaN where ``K`` is not numerically positive definite. It has no derivative rule.

    :param of_rows: K has a batch axis of rows, which may be on several devices; of matrices that are one block none is moved.
    """
    if of_rows and K.shape[-1] <= block():
        return one_by_one(lambda K: plain_inverse(_small_factor(K)), K, of_rows=True)
    return one_by_one(lambda K: _factor(K)[1], K)


def change_of_inverse(W: Array, dK: Array) -> Array:
    """The derivative of an inverse factor W along a symmetric change of its matrix."""
    return lower_matmul(_relative_change(W, dK), W)


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


def _retried(factor: Callable[[Array], Array], K: Array, scale: Array) -> tuple[Array, Array]:
    """``factor(K)``; where it failed, that of K + noise I with as much as it takes; and noise / scale.

    One loop for all attempts, so that the factor is compiled once.

    :param factor: from matrices to matrices, which hold NaN where it failed.
    """
    scale = jnp.broadcast_to(scale, K.shape[:-2])
    unit = jnp.asarray(jnp.finfo(K.dtype).eps * K.shape[-1], K.dtype)

    def attempt(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        relative, old, used, bad = state
        new = one_by_one(factor, add_jitter(K, relative * scale))
        if scale.ndim:
            new = jnp.where(bad[..., None, None], new, old)
        failed = ~jnp.isfinite(new[..., -1, :]).all(axis=-1)  # a block that fails spoils all rows below
        return jnp.maximum(10 * relative, unit), new, jnp.where(bad, relative, used), failed

    def go_on(state: tuple[Array, Array, Array, Array]) -> Array:
        relative, _, _, bad = state
        return (relative < 1) & bad.any()

    none = jnp.zeros(scale.shape, K.dtype)
    start = (jnp.zeros((), K.dtype), jnp.zeros_like(K), none, jnp.ones(scale.shape, bool))
    _, found, used, _ = lax.while_loop(go_on, attempt, start)
    return found, used


def _factor(K: Array) -> tuple[Array, Array]:
    """The Cholesky factor and its inverse; they hold NaN where it does not exist."""
    M = K.shape[-1]
    if M <= block():
        L = _small_factor(K)
        return L, inverse_lower(L)
    h = half(M)
    L1, W1 = _factor(K[..., :h, :h])
    across = solve_right(K[..., h:, :h], L1, W1)
    L2, W2 = _factor(K[..., h:, h:] - plain_matmul(across, transpose(across)))
    return join_lower(L1, across, L2), join_lower(W1, beside(L1, across, W1, W2), W2)


def _small_factor(K: Array) -> Array:
    # Transposed, since LAPACK goes by columns: or XLA would first copy all of K, which may be a block of a matrix, for it.
    return lax.linalg.cholesky(transpose(K), symmetrize_input=False)


def _lower_half(S: Array) -> Array:
    """Phi: the lower triangle with its diagonal halved."""
    return jnp.tril(S) * (1 - jnp.eye(S.shape[-1], dtype=S.dtype) / 2)
