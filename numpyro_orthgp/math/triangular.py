"""Triangular systems and inverses, solved by products of matrices.

LAPACK's solves run at a third of the speed of products or less; and on CPUs OpenBLAS, whose solves jaxlib calls, starts threads for
all but small right-hand sides. Between two calls they wait for work by spinning, which takes the cores away from XLA's own threads:
a training step took up to twice as long. So LAPACK gets at most ``THREADED`` entries at a time, and only triangles of
:func:`block` rows. Larger ones are inverted by halves. A product with the inverse is refined once; then it is as precise as a solve
(``tests/test_triangular.py``, where LAPACK alone is the oracle). On GPUs blocks are larger: there each product is one more
program that is compiled and tuned, and one more launch.

**Inverses solve W L = I, not L W = I.** They whiten k = L a to W k, so their error is W L - I. It is ``eps |W| |L|`` for the one,
and the square of that for the other: in float32 64 points of a smooth kernel explained 1.6 % more than all of the variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.math.products import linear_in_left, plain_matmul, plain_matmul_lower, transpose
from numpyro_orthgp.types import Array

__all__ = [
    "BLOCK", "beside", "block", "half", "inverse_lower", "join_lower", "one_by_one", "plain_inverse", "solve_lower", "solve_right",
]  # fmt: skip

# Rows of the triangles that LAPACK has to do with (measured on two cores, for factors and inverses).
BLOCK = 64

# And libraries of GPUs: a step at M = 1024 has 65 products for 161, and 8 calls for 32 (benchmarks/ahead_of_time.py). For TPUs it
# would take a third longer to compile.
_BLOCK_ON_GPUS = 256

# Entries of a right-hand side from which on OpenBLAS starts threads.
THREADED = 1024

# Calls of LAPACK that are made instead of a product with the inverse.
_MOST_CALLS = 4

# Rows of a triangle that are solved for by one product and its refinement; of more by halves, with fewer operations.
_REFINED = 256

# Batches of smaller matrices are not spread over threads by jaxlib: seen at 16 rows in batches of 512, not at 8 in batches of 1024.
_SPREAD_ROWS = 9


@jax.custom_jvp
def solve_lower(L: Array, B: Array) -> Array:
    """Solve ``L X = B`` for lower-triangular ``L``.

    :param L: shape (..., M, M), zero above the diagonal.
    :param B: shape (..., M, B); leading axes broadcast against those of ``L``.
    """
    return _solve_lower(L, B)


@jax.jit  # one program outside of any other
def _solve_lower(L: Array, B: Array) -> Array:
    batch = jnp.broadcast_shapes(L.shape[:-2], B.shape[:-2])
    L = jnp.broadcast_to(L, batch + L.shape[-2:])
    return one_by_one(_solve, L, jnp.broadcast_to(B, batch + B.shape[-2:]))


@solve_lower.defjvp
def _solve_lower_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (L, _), (dL, dB) = primals, tangents
    X = solve_lower(*primals)
    return X, plain_matmul(inverse_lower(L), dB - plain_matmul(jnp.tril(dL), X))


@jax.custom_jvp
def inverse_lower(L: Array) -> Array:
    """The inverse of lower-triangular ``L``, shape (..., M, M)."""
    return _inverse_lower(L)


@jax.jit
def _inverse_lower(L: Array) -> Array:
    return one_by_one(plain_inverse, L)


@inverse_lower.defjvp
def _inverse_lower_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    W = inverse_lower(*primals)
    return W, -plain_matmul(plain_matmul(W, jnp.tril(tangents[0])), W)


def solve_right(B: Array, L: Array, W: Array) -> Array:
    """``B L^-T`` from the inverse W of L, as precise as a solve."""
    M = L.shape[-1]
    if M <= _REFINED:
        X = plain_matmul(B, transpose(W))
        return X + plain_matmul(B - plain_matmul(X, transpose(L)), transpose(W))
    h = half(M)
    first = solve_right(B[..., :h], L[..., :h, :h], W[..., :h, :h])
    rest = B[..., h:] - plain_matmul(first, transpose(L[..., h:, :h]))
    return jnp.concatenate([first, solve_right(rest, L[..., h:, h:], W[..., h:, h:])], axis=-1)


def block() -> int:
    """Rows of the largest triangle that is not cut into halves, where a program is traced for JAX's default device."""
    return _BLOCK_ON_GPUS if _platform() in ("gpu", "cuda", "rocm") else BLOCK


def _platform() -> str:
    # A device or the name of a platform, if the user has set one.
    device = getattr(jax.config, "jax_default_device", None)
    return jax.default_backend() if device is None else str(getattr(device, "platform", device))


def half(M: int) -> int:
    """Half of the rows, rounded up to a multiple of 8."""
    return -(-M // 16) * 8


def join_lower(first: Array, across: Array, second: Array) -> Array:
    """The lower-triangular matrix of two triangles and the block beside the second."""
    # Padded and added they are one pass. Concatenated they take longer to compile.
    a, b = across.shape[-1], across.shape[-2]
    return _placed(first, 0, b, 0, b) + _placed(across, a, 0, 0, b) + _placed(second, a, 0, a, 0)


def _placed(A: Array, above: int, below: int, left: int, right: int) -> Array:
    return jnp.pad(A, [(0, 0)] * (A.ndim - 2) + [(above, below), (left, right)])


def _solve(L: Array, B: Array) -> Array:
    M, num = B.shape[-2:]
    if M <= block() and M * num < _MOST_CALLS * THREADED:
        return _by_lapack(L, B)
    W = plain_inverse(L)
    X = plain_matmul(W, B)
    return X + plain_matmul(W, B - plain_matmul(L, X))


def plain_inverse(L: Array) -> Array:
    """:func:`inverse_lower` of all matrices at a time, without a derivative rule."""
    M = L.shape[-1]
    if M <= block():
        return transpose(_by_lapack(L, np.eye(M, dtype=L.dtype), of_rows=True))
    h = half(M)
    W1, W2 = plain_inverse(L[..., :h, :h]), plain_inverse(L[..., h:, h:])
    return join_lower(W1, beside(L[..., :h, :h], L[..., h:, :h], W1, W2), W2)


def beside(L1: Array, across: Array, W1: Array, W2: Array) -> Array:
    """The block of the inverse beside those of two triangles, refined: X of ``X L1 + W2 across = 0``."""
    wanted = -linear_in_left(W2, across)
    X = plain_matmul_lower(wanted, W1)
    return X + plain_matmul_lower(wanted - plain_matmul_lower(X, L1), W1)


def _by_lapack(L: Array, B: Array | np.ndarray, of_rows: bool = False) -> Array:
    """On CPUs a few columns at a time; elsewhere each call is a launch.

    :param of_rows: solve ``L' X = B``.
    :param B: if it is NumPy's, its parts are constants of the program, which need not be cut out there.
    """
    few = max(1, (THREADED - 1) // L.shape[-1])

    def solve(L: Array, columns: slice = slice(None)) -> Array:
        part = jnp.broadcast_to(B[..., columns], (*L.shape[:-1], *B[..., columns].shape[-1:]))
        return lax.linalg.triangular_solve(L, part, left_side=True, lower=True, transpose_a=of_rows)

    def by_parts(L: Array) -> Array:
        return jnp.concatenate([solve(L, slice(i, i + few)) for i in range(0, B.shape[-1], few)], axis=-1)

    return solve(L) if B.shape[-1] <= few else lax.platform_dependent(L, cpu=by_parts, default=solve)


def one_by_one(function: Callable[..., Array], *arrays: Array, of_rows: bool = False) -> Array:
    """``function(*arrays)``, which calls LAPACK, for a batch of matrices; all arrays have the batch axes of the first.

    On CPUs matrices take turns: of large ones that is faster than products of a batch, of small ones as fast. And jaxlib (0.10.2)
    spreads batched factors and solves over the threads of XLA's pool and waits for them in one of these: some such calls at a time
    on two cores leave no thread for the work, and all wait for ever, now and then.

    :param of_rows: the last batch axis may be cut between devices. Then each has one matrix of its own at a time, and none is
        gathered; ``function`` gets one for each device.
    """
    batch, rows = arrays[0].shape[:-2], arrays[0].shape[-1]
    if not batch or rows < _SPREAD_ROWS:
        return function(*arrays)
    together = math.gcd(batch[-1], jax.device_count()) if of_rows else 1
    return lax.platform_dependent(*arrays, cpu=partial(_in_turns, function, together), default=function)


def _in_turns(function: Callable[..., Array], together: int, *arrays: Array) -> Array:
    """``together`` at a time, evenly spread over the last batch axis; without a batch axis if it is one."""
    batch = arrays[0].shape[:-2]
    last, k = len(batch), (together,) if together > 1 else ()

    def cut(a: Array) -> Array:
        parts = jnp.moveaxis(a.reshape(*batch[:-1], together, -1, *a.shape[last:]), last - 1, last)
        return parts.reshape(-1, *k, *a.shape[last:])

    values = lax.map(lambda each: function(*each), [cut(a) for a in arrays])
    tail = values.shape[1 + len(k) :]
    parts = values.reshape(*batch[:-1], batch[-1] // together, together, *tail)
    return jnp.moveaxis(parts, last, last - 1).reshape(*batch, *tail)
