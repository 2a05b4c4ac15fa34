"""Jitter policy, Cholesky factors that never fail silently, triangular solves, and products in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from numpyro_orthgp.types import Array

__all__ = [
    "add_jitter", "default_jitter", "gram", "inverse_cholesky", "join", "matmul", "safe_cholesky", "safe_sqrt",
    "solve_lower",
]  # fmt: skip

# Accelerators round float32 products to TF32 or bfloat16 unless told otherwise; kernel matrices do not survive that.
PRECISION = lax.Precision.HIGHEST

# Relative to the mean of the kernel's diagonal. Large enough for the factor to exist in nearly all cases, small
# enough not to be seen in a bound; `safe_cholesky` raises it where it is not enough.
_DEFAULT_JITTER = {"float32": 1e-6, "float64": 1e-10}


# Expectations of K(Z, x) K(x, Z) are whitened as a whole, from both sides: rounding errors grow with the inverse of the jitter
# and not with its root, times N and the ratio of signal to noise.
_JITTER_OF_EXPECTATIONS = {"float32": 1e-4, "float64": 1e-6}


def default_jitter(dtype: jnp.dtype, *, expectations: bool = False) -> float:
    """The relative jitter used when the user gives none: 1e-6 in float32, 1e-10 in float64.

    :param expectations: for kernel expectations under uncertain inputs: 1e-4 and 1e-6.
    """
    return (_JITTER_OF_EXPECTATIONS if expectations else _DEFAULT_JITTER).get(jnp.dtype(dtype).name, 1e-3)


def matmul(A: Array, B: Array) -> Array:
    """``A @ B`` in full precision on every device."""
    return jnp.matmul(A, B, precision=PRECISION)


def join(parts: Sequence[Array], axis: int, *, event_dim: int) -> Array:
    """Concatenate along ``axis``, one of the last ``event_dim``; the axes before these broadcast."""
    batch = jnp.broadcast_shapes(*(p.shape[: p.ndim - event_dim] for p in parts))
    return jnp.concatenate([jnp.broadcast_to(p, batch + p.shape[p.ndim - event_dim :]) for p in parts], axis)


@jax.custom_jvp
def gram(A: Array, weights: Array) -> Array:
    r"""The weighted outer product :math:`A \,\mathrm{diag}(w) A^\top`, shape (..., M, M).

    Its derivative knows that the result is symmetric, so the backward pass takes one product where two are written.

    :param A: shape (..., M, B).
    :param weights: shape (..., B).
    """
    return matmul(A * weights[..., None, :], jnp.swapaxes(A, -1, -2))


@gram.defjvp
def _gram_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (A, w), (dA, dw) = primals, tangents
    half = matmul(dA * w[..., None, :] + A * (dw / 2)[..., None, :], jnp.swapaxes(A, -1, -2))
    return gram(A, w), half + jnp.swapaxes(half, -1, -2)


def solve_lower(L: Array, B: Array) -> Array:
    """Solve ``L X = B`` for lower-triangular ``L``.

    :param L: shape (..., M, M).
    :param B: shape (..., M, B); leading axes broadcast against those of ``L``.
    """
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L = jnp.broadcast_to(L, batch + L.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return solve_triangular(L, B, lower=True)


@jax.custom_jvp
def safe_sqrt(x: Array) -> Array:
    """Square root of ``max(x, 0)`` whose derivatives at zero are zero rather than infinite."""
    # Not the usual pair of `where`s: XLA's CPU compiler (jaxlib 0.10.2) drops the outer one when it fuses them with a
    # product and an exponential, and a kernel's diagonal comes out wrong; tests/test_linalg.py has the case.
    return jnp.sqrt(jnp.maximum(x, 0))


@safe_sqrt.defjvp
def _safe_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    s = safe_sqrt(primals[0])
    tiny = float(jnp.finfo(s.dtype).tiny) ** 0.25  # whose square still has a finite inverse, for second derivatives
    return s, tangents[0] * jnp.sign(s) / (2 * jnp.maximum(s, tiny))


def add_jitter(K: Array, amount: Array) -> Array:
    """``K + amount I`` with ``amount`` of shape ``K.shape[:-2]``."""
    return K + amount[..., None, None] * jnp.eye(K.shape[-1], dtype=K.dtype)


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
    unit = jnp.asarray(jnp.finfo(K.dtype).eps * K.shape[-1], K.dtype)

    def failed(L: Array) -> Array:
        return ~jnp.isfinite(L).all(axis=(-2, -1))

    def retry(state: tuple[Array, Array]) -> tuple[Array, Array]:
        relative, L = state
        attempt = lax.linalg.cholesky(add_jitter(K, relative * scale))
        return 10 * relative, jnp.where(failed(L)[..., None, None], attempt, L)

    def again(state: tuple[Array, Array]) -> Array:
        relative, L = state
        return (relative < 1) & failed(L).any()

    return lax.while_loop(again, retry, (unit, lax.linalg.cholesky(K)))[1]


@safe_cholesky.defjvp
def _safe_cholesky_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # dL = L Phi(L^-1 dK L^-T) with Phi the lower triangle, its diagonal halved. Using the factor that was returned,
    # whatever jitter it took, keeps failed attempts (NaN) out of the derivative. `scale` moves only rescue jitter.
    K, scale = primals
    dK, _ = tangents
    L = safe_cholesky(K, scale)
    half = partial(lax.linalg.triangular_solve, lower=True)
    dK = (dK + jnp.swapaxes(dK, -1, -2)) / 2
    W = half(L, half(L, dK, left_side=False, transpose_a=True), left_side=True)
    return L, matmul(L, _lower_half(W))


@jax.custom_jvp
def inverse_cholesky(K: Array, scale: Array) -> Array:
    r"""The inverse :math:`W = L^{-1}` of :func:`safe_cholesky`'s factor, lower triangular.

    Solving with L by a product with W lets the forward and the backward pass be matrix products but for one factor and
    one triangular solve of size M; those two run far below the speed of products on every kind of device.

    :param K: symmetric matrices, shape (..., M, M).
    :param scale: as for :func:`safe_cholesky`.
    """
    return solve_lower(safe_cholesky(K, scale), jnp.eye(K.shape[-1], dtype=K.dtype))


@inverse_cholesky.defjvp
def _inverse_cholesky_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # dL = L Phi(W dK W^T), and so dW = -W dL W = -Phi(W dK W^T) W.
    W = inverse_cholesky(*primals)
    dK = tangents[0]
    S = matmul(matmul(W, (dK + jnp.swapaxes(dK, -1, -2)) / 2), jnp.swapaxes(W, -1, -2))
    return W, -matmul(_lower_half(S), W)


def _lower_half(S: Array) -> Array:
    """Phi: the lower triangle with its diagonal halved."""
    return jnp.tril(S) * (1 - jnp.eye(S.shape[-1], dtype=S.dtype) / 2)
