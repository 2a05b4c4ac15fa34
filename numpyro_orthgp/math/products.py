"""Products of matrices, in full precision on every device and fast, forward and backward.

Whatever is tuned to how XLA multiplies is here; the rest of the package writes products as on a board.

Triangular matrices leave out most of the zeros: a large one is cut into strips, each multiplied as far as its last entry on or
first entry below the diagonal. Small products gain nothing, since they run below the speed of large ones.

**Products forward are products backward.** XLA folds a transpose into the product that uses it. Its CPU backend then runs that
product at down to half speed in float64. So ``matmul`` and ``matmul_transposed`` have derivative rules of their own, with a
copied transpose in float64. ``diagonal`` has a mask for a derivative where JAX has a scatter.

**Strips.** Whiteners and roots of S are triangular, so half of a dense product with them is zeros. With three strips a third of
the operations is left out, forward and in both derivatives, and in the derivative of the inverse factor. More strips, or strips
of fewer than 256 rows (128 in float64), make products too small to run at full speed, and programs that take longer to compile.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.types import Array

__all__ = [
    "PRECISION", "combine", "combine_columns", "copied_transpose", "diagonal", "gram", "gram_transposed", "linear_in_left",
    "linear_in_right", "linear_matmul", "linear_transposed", "lower_matmul", "lower_matmul_transposed", "lower_of_product",
    "matmul", "matmul_transposed", "plain_matmul", "plain_matmul_lower", "transpose",
]  # fmt: skip

# Accelerators round float32 products to TF32 or bfloat16 unless told otherwise; kernel matrices do not survive that.
PRECISION = lax.Precision.HIGHEST

# Rows of a half from which on a gram matrix is multiplied by halves: smaller products run below the speed of large ones.
_HALVED_ROWS = 128


# ---------------------------------------------------------------- dense matrices


@jax.custom_jvp
def matmul(A: Array, B: Array) -> Array:
    """``A @ B`` in full precision on every device."""
    return plain_matmul(A, B)


@jax.custom_jvp
def matmul_transposed(A: Array, B: Array) -> Array:
    """``A.T @ B`` in full precision on every device."""
    return plain_matmul(copied_transpose(A), B)


def linear_matmul(A: Array, B: Array) -> Array:
    """``matmul`` for derivative rules, in which ``B`` is a tangent: the backward pass, its transpose, is a plain product."""
    return plain_matmul(transpose(copied_transpose(A)), B)


def plain_matmul(A: Array, B: Array) -> Array:
    """``A @ B`` in full precision on every device, for derivative rules: XLA chooses how to transpose it.

    Many matrices that meet one are one product, forward and backward: their rows are stacked.
    """
    if A.ndim > 2 and B.ndim == 2:
        return jnp.matmul(A.reshape(-1, A.shape[-1]), B, precision=PRECISION).reshape(*A.shape[:-1], B.shape[-1])
    return jnp.matmul(A, B, precision=PRECISION)


def transpose(A: Array) -> Array:
    """The transposes of matrices, shape (..., B, M) of (..., M, B)."""
    return jnp.swapaxes(A, -1, -2)


def copied_transpose(A: Array) -> Array:
    """:func:`transpose`, in float64 as an array of its own. Left to itself XLA makes it part of the product, which on CPUs then
    takes up to twice as long; float32 gains nothing."""
    return lax.optimization_barrier(transpose(A)) if A.dtype == jnp.float64 else transpose(A)


@matmul.defjvp
def _matmul_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (A, B), (dA, dB) = primals, tangents
    return matmul(A, B), plain_matmul(dA, B) + linear_matmul(A, dB)


@matmul_transposed.defjvp
def _matmul_transposed_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (A, B), (dA, dB) = primals, tangents
    return matmul_transposed(A, B), plain_matmul(transpose(dA), B) + plain_matmul(transpose(A), dB)


def combine(weights: Array, A: Array) -> Array:
    """The rows of ``A`` summed with weights, in full precision.

    :param weights: shape (..., M).
    :param A: shape (..., M, B).
    :return: shape (..., B).
    """
    if weights.ndim > 1 and A.ndim == 2:
        return matmul(weights, A)
    return plain_matmul(weights[..., None, :], A)[..., 0, :]


def combine_columns(A: Array, weights: Array) -> Array:
    """The columns of ``A`` summed with weights, as :func:`combine` sums rows.

    :param A: shape (..., B, M).
    :param weights: shape (..., M).
    :return: shape (..., B).
    """
    return combine(weights, transpose(A))


@jax.custom_jvp
def diagonal(A: Array) -> Array:
    """Diagonals of matrices, shape (..., M). The derivative is an elementwise pass, not JAX's scatter."""
    # Every (M + 1)-th entry: `jnp.diagonal` is a gather, which takes longer to compile.
    M = A.shape[-1]
    return A.reshape(*A.shape[:-2], M * M)[..., :: M + 1]


@diagonal.defjvp
def _diagonal_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    eye = jnp.eye(tangents[0].shape[-1], dtype=bool)
    return diagonal(*primals), jnp.sum(jnp.where(eye, tangents[0], 0), -1)


@jax.custom_jvp
def gram(A: Array, weights: Array) -> Array:
    r"""The weighted outer product :math:`A \,\mathrm{diag}(w) A^\top`, shape (..., M, M).

    Its derivative knows that the result is symmetric, so the backward pass takes one product where two are written.

    :param A: shape (..., M, B).
    :param weights: shape (..., B).
    """
    half = A.shape[-2] // 16 * 8
    if half < _HALVED_ROWS:
        return matmul(A * weights[..., None, :], transpose(A))
    # The quarter above the diagonal is that below it.
    top, bottom = A[..., :half, :], A[..., half:, :]
    first = matmul(top * weights[..., None, :], transpose(top))
    rest = matmul(bottom * weights[..., None, :], transpose(A))
    first = jnp.concatenate([first, transpose(rest[..., :half])], axis=-1)
    return jnp.concatenate([first, rest], axis=-2)


@gram.defjvp
def _gram_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (A, w), (dA, dw) = primals, tangents
    half = matmul(dA * w[..., None, :] + A * (dw / 2)[..., None, :], transpose(A))
    return gram(A, w), half + transpose(half)


@jax.custom_jvp
def gram_transposed(A: Array) -> Array:
    r"""The product :math:`A^\top A`, shape (..., B, B); its derivative, like that of :func:`gram`, takes one product backward.

    :param A: shape (..., M, B).
    """
    return matmul_transposed(A, A)


@gram_transposed.defjvp
def _gram_transposed_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    half = plain_matmul(transpose(primals[0]), tangents[0])
    return gram_transposed(*primals), half + transpose(half)


# ---------------------------------------------------------------- triangular matrices

# Fewest bits of a strip's columns (256 rows in float32, 128 in float64) and most strips: beyond that smaller products lose
# what fewer operations gain (measured on two cores).
_MIN_BITS = 8192
_MAX_STRIPS = 3


class _Strip(NamedTuple):
    """Rows or columns ``start`` to ``end`` of a matrix."""

    start: int
    end: int
    part: Array


@jax.custom_jvp
def lower_matmul(L: Array, B: Array) -> Array:
    """``L @ B`` for lower-triangular ``L``, in full precision on every device.

    :param L: shape (..., M, M), zero above the diagonal.
    :param B: shape (..., M, B).
    """
    return jnp.concatenate([matmul(s.part[..., : s.end], B[..., : s.end, :]) for s in _strips(L, -2)], axis=-2)


@lower_matmul.defjvp
def _lower_matmul_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (L, B), (dL, dB) = primals, tangents
    return lower_matmul(L, B), linear_in_left(dL, B) + linear_in_right(L, dB)


# For derivative rules, in which an argument is a tangent: the transposes, which are what a backward pass runs, are strips too.


def linear_in_left(dL: Array, B: Array) -> Array:
    """``dL @ B`` for a tangent ``dL``, lower triangular. Backward: the lower triangle of ``G @ B.T``."""
    return jnp.concatenate([plain_matmul(s.part[..., : s.end], B[..., : s.end, :]) for s in _strips(dL, -2)], axis=-2)


def linear_in_right(L: Array, dB: Array) -> Array:
    """``L @ dB`` for lower-triangular ``L`` and a tangent ``dB``. Backward: ``L.T @ G``."""
    products = (
        _padded(linear_matmul(L[..., s.start :, s.start : s.end], s.part), -2, before=s.start) for s in _strips(dB, -2)
    )
    return reduce(add, products)


def linear_transposed(L: Array, dE: Array) -> Array:
    """``L.T @ dE`` for lower-triangular ``L`` and a tangent ``dE``, lower triangular. Backward: the lower triangle of ``L @ G``."""
    M = L.shape[-1]
    products = [
        (plain_matmul(transpose(s.part[..., : s.end]), e.part[..., : s.end]), M - s.end)
        for s, e in zip(_strips(L, -2), _strips(dE, -2, L.dtype), strict=True)
    ]
    return reduce(add, [_padded(_padded(product, -1, after=rest), -2, after=rest) for product, rest in products])


@jax.custom_jvp
def lower_matmul_transposed(L: Array, B: Array) -> Array:
    """``L.T @ B`` for lower-triangular ``L``, in full precision on every device.

    :param L: shape (..., M, M), zero above the diagonal.
    :param B: shape (..., M, B).
    """
    products = [plain_matmul(copied_transpose(s.part[..., s.start :, :]), B[..., s.start :, :]) for s in _strips(L, -1)]
    return jnp.concatenate(products, axis=-2)


@lower_matmul_transposed.defjvp
def _lower_matmul_transposed_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (L, B), (dL, dB) = primals, tangents
    from_L = [plain_matmul(transpose(s.part[..., s.start :, :]), B[..., s.start :, :]) for s in _strips(dL, -1)]
    from_B = [
        _padded(plain_matmul(transpose(L[..., s.start : s.end, : s.end]), s.part), -2, after=L.shape[-1] - s.end)
        for s in _strips(dB, -2)
    ]
    return lower_matmul_transposed(L, B), jnp.concatenate(from_L, axis=-2) + sum(from_B)


def lower_of_product(A: Array, L: Array) -> Array:
    """The lower triangle of ``A @ L.T`` for lower-triangular ``L`` and a tangent ``A``; entries above the diagonal are of no
    meaning."""
    M = L.shape[-1]
    parts = [
        _padded(plain_matmul(s.part[..., : s.end], transpose(L[..., : s.end, : s.end])), -1, after=M - s.end)
        for s in _strips(A, -2)
    ]
    return jnp.concatenate(parts, axis=-2)


def plain_matmul_lower(A: Array, L: Array) -> Array:
    """``A @ L`` for lower-triangular ``L``, without a derivative rule."""
    products = [plain_matmul(A[..., s.start :], s.part[..., s.start :, :]) for s in _strips(L, -1)]
    return jnp.concatenate(products, axis=-1)


def _strips(A: Array, axis: int, dtype: Any = None) -> list[_Strip]:
    """
    :param dtype: that of the matrix whose strips they must match; by default that of A.
    """
    size = A.shape[axis]
    num = max(1, min(_MAX_STRIPS, size * jnp.finfo(dtype or A.dtype).bits // _MIN_BITS))
    step = -(-size // (8 * num)) * 8
    sizes = [min(step, size - start) for start in range(0, size, step)]
    # `split` and not slices: backward it is a concatenation, not a sum of padded arrays.
    parts = lax.split(A, sizes, A.ndim + axis)
    return [_Strip(end - size, end, part) for size, end, part in zip(sizes, accumulate(sizes), parts, strict=True)]


def _padded(A: Array, axis: int, *, before: int = 0, after: int = 0) -> Array:
    widths = [(0, 0)] * A.ndim
    widths[axis] = (before, after)
    return jnp.pad(A, widths)
