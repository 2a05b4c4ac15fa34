"""Products with lower-triangular matrices, which leave out most of the zeros.

A large matrix is cut into strips, each multiplied as far as its last entry on or first entry below the diagonal; forward and
backward. Small products gain nothing, since they run below the speed of large ones.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from operator import add
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.math.linalg import copied_transpose, linear_matmul, matmul, plain_matmul, transpose
from numpyro_orthgp.types import Array

__all__ = [
    "linear_in_left", "linear_in_right", "linear_transposed", "lower_matmul", "lower_matmul_transposed", "lower_of_product",
]  # fmt: skip

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
        _padded(linear_matmul(L[..., s.start :, s.start : s.end], s.part, sliced=True), -2, before=s.start)
        for s in _strips(dB, -2)
    )
    return reduce(add, products)


def linear_transposed(L: Array, dE: Array) -> Array:
    """``L.T @ dE`` for lower-triangular ``L`` and a tangent ``dE``, lower triangular. Backward: the lower triangle of ``L @ G``."""
    M = L.shape[-1]
    products = [
        (plain_matmul(transpose(s.part[..., : s.end]), e.part[..., : s.end]), M - s.end)
        for s, e in zip(_strips(L, -2), _strips(dE, -2), strict=True)
    ]
    return reduce(add, [_padded(_padded(product, -1, after=rest), -2, after=rest) for product, rest in products])


@jax.custom_jvp
def lower_matmul_transposed(L: Array, B: Array) -> Array:
    """``L.T @ B`` for lower-triangular ``L``, in full precision on every device.

    :param L: shape (..., M, M), zero above the diagonal.
    :param B: shape (..., M, B).
    """
    products = [
        plain_matmul(copied_transpose(s.part[..., s.start :, :], sliced=True), B[..., s.start :, :])
        for s in _strips(L, -1)
    ]
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


def _strips(A: Array, axis: int) -> list[_Strip]:
    size = A.shape[axis]
    num = max(1, min(_MAX_STRIPS, size * jnp.finfo(A.dtype).bits // _MIN_BITS))
    step = -(-size // (8 * num)) * 8
    sizes = [min(step, size - start) for start in range(0, size, step)]
    # `split` and not slices: backward it is a concatenation, not a sum of padded arrays.
    parts = lax.split(A, sizes, A.ndim + axis)
    return [_Strip(end - size, end, part) for size, end, part in zip(sizes, accumulate(sizes), parts, strict=True)]


def _padded(A: Array, axis: int, *, before: int = 0, after: int = 0) -> Array:
    widths = [(0, 0)] * A.ndim
    widths[axis] = (before, after)
    return jnp.pad(A, widths)
