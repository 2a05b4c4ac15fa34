"""Squared distances between two sets of points: by products where that is fast, by differences where needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_orthgp.math.linalg import clip_rounding
from numpyro_orthgp.math.products import plain_matmul, transpose
from numpyro_orthgp.types import Array

__all__ = ["are_few", "centre", "distance_factors", "middle_of", "squared_distance", "squared_distance_by_differences"]

# Up to here differences, unrolled into one fused pass, cost no more than products and round less (measured on a CPU,
# with gradients).
_FEW_DIMENSIONS = 3


def centre(X1: Array, X2: Array) -> tuple[Array, Array]:
    """Move both sets by a place in the middle of ``X1``, so that norms are no larger than the spread of the data.

    No gradient passes through the place: what is computed from the result must not depend on where the origin is.
    If ``X1`` and ``X2`` are the same object, so are the two results.

    :param X1: shape (..., n, D). ``X2`` may hold rows that are far from all others, which cost others no digits.
    :param X2: shape (..., m, D).
    :return: the moved points, shapes (..., n, D) and (..., m, D).
    """
    origin = middle_of(X1)
    moved = X1 - _as_row(origin, X1)
    return moved, moved if X2 is X1 else X2 - _as_row(origin, X2)


def middle_of(X: Array) -> Array:
    """A place within most of the points, shape (D,), without a gradient: of nine points the middle of three middles of three. One
    point that is far from all others would move a mean, and others would lose digits.

    :param X: shape (..., n, D).
    """
    rows = lax.stop_gradient(X).reshape(-1, X.shape[-1])
    if not len(rows):
        return jnp.zeros_like(rows, shape=X.shape[-1:])
    # One by one: XLA fuses these, and not a gather.
    few = [rows[i] for i in np.linspace(0, len(rows) - 1, 9).round().astype(int)]
    return _middle(*(_middle(*few[i : i + 3]) for i in (0, 3, 6)))


def _middle(a: Array, b: Array, c: Array) -> Array:
    return jnp.maximum(jnp.minimum(a, b), jnp.minimum(jnp.maximum(a, b), c))


def _as_row(x: Array, X: Array) -> Array:
    """(D,) with as many axes as ``X`` has, as those want who let JAX refuse to add axes."""
    return x.reshape((1,) * (X.ndim - 1) + x.shape)


def squared_distance(X1: Array, X2: Array, scale: Array) -> Array:
    r"""Squared scaled distances :math:`|a|^2 + |b|^2 - 2 a^\top b`, :math:`a = x / s`, :math:`b = y / s`, centred.

    The rounding error is about eps times the largest squared norm: use `squared_distance_by_differences` where the
    square root's slope at zero would magnify it. (In few dimensions this function takes differences too, as they cost
    no more.) If ``X1`` and ``X2`` are the same object the diagonal is exactly zero, its derivatives too.

    :param X1: shape (..., n, D).
    :param X2: shape (..., m, D); leading axes broadcast against those of ``X1``.
    :param scale: the unit :math:`s` of each dimension, broadcasts against ``X1``: shape (), (D,) or (..., 1, D).
    :return: shape (..., n, m).
    """
    if are_few(X1.shape[-1]):
        return squared_distance_by_differences(X1, X2, scale)
    left, right = distance_factors(X1, X2, scale)
    r2 = plain_matmul(transpose(left), right)  # (..., n, m)
    if X2 is X1:
        r2 = jnp.where(jnp.eye(X1.shape[-2], dtype=bool), 0, r2)
    return clip_rounding(r2)


def are_few(num_dims: int) -> bool:
    """Whether squared distances in so many dimensions are taken by differences and have no factors."""
    return num_dims <= _FEW_DIMENSIONS


def distance_factors(X1: Array, X2: Array, scale: Array) -> tuple[Array, Array]:
    r"""Two factors whose product, the first transposed, are the squared scaled distances, rounding errors and all.

    They lie as few long rows, since products with many short ones, which the backward pass would take, are slow on CPUs.

    :param X1: shape (..., n, D).
    :param X2: shape (..., m, D).
    :param scale: as in :func:`squared_distance`.
    :return: shapes (..., D + 2, n) and (..., D + 2, m).
    """
    X1, X2 = centre(X1, X2)
    A = transpose(X1 / scale)
    B = A if X2 is X1 else transpose(X2 / scale)
    # Norms as two more rows: the sums and, backward, their reductions become part of the products.
    return (
        jnp.concatenate([A, *_norm_and_one(A)], axis=-2),
        jnp.concatenate([-2 * B, *_norm_and_one(B)[::-1]], axis=-2),
    )


def _norm_and_one(A: Array) -> tuple[Array, Array]:
    norm = jnp.square(A).sum(axis=-2, keepdims=True)
    return norm, jnp.ones_like(norm)


def squared_distance_by_differences(X1: Array, X2: Array, scale: Array) -> Array:
    r"""Squared scaled distances :math:`\sum_d (x_d - y_d)^2 / s_d^2`, accurate however close two points are.

    Points are subtracted before they are scaled, so that equal ones have distance exactly 0 however the compiler fuses
    the operations.

    :param X1: shape (..., n, D).
    :param X2: shape (..., m, D); leading axes broadcast against those of ``X1``.
    :param scale: the unit :math:`s` of each dimension, broadcasts against ``X1``: shape (), (D,) or (..., 1, D).
    :return: shape (..., n, m).
    """
    inverse = jnp.broadcast_to(1 / scale, (*jnp.shape(scale)[:-1], X1.shape[-1]))

    def square(x: Array, y: Array, inverse: Array) -> Array:
        return jnp.square((x[..., :, None] - y[..., None, :]) * (inverse[..., None] if inverse.ndim else inverse))

    if are_few(X1.shape[-1]):
        total = square(X1[..., 0], X2[..., 0], inverse[..., 0])
        for d in range(1, X1.shape[-1]):
            total += square(X1[..., d], X2[..., d], inverse[..., d])
        return total

    @jax.checkpoint  # recompute the differences in the backward pass: no (n, m, D) array is ever stored
    def add(total: Array, columns: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + square(*columns), None

    columns = tuple(jnp.moveaxis(array, -1, 0) for array in (X1, X2, inverse))
    return lax.scan(add, jnp.zeros_like(square(*(column[0] for column in columns))), columns)[0]
