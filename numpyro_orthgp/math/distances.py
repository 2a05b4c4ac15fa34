"""Squared distances between two sets of points, by products where they are fast and by differences where they
must be.

Both forms keep their digits far from the origin: inputs are centred first (`centre`), which changes no
distance.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.math.linalg import matmul
from numpyro_orthgp.types import Array

__all__ = ["centre", "squared_distance", "squared_distance_by_differences"]

# Up to here differences cost no more than products (measured, with gradients) and round less.
_FEW_DIMENSIONS = 2
# Up to here the loop over dimensions is unrolled into one fused pass; beyond it compiling would take too
# long.
_MAX_UNROLLED = 16


def centre(X1: Array, X2: Array) -> tuple[Array, Array]:
    """Move both sets by the mean of ``X2``, so that norms are no larger than the spread of the data.

    No gradient passes through the mean: what is computed from the result must not depend on where the origin
    is. If ``X1`` and ``X2`` are the same object, so are the two results.

    :param X1: shape (..., n, D).
    :param X2: shape (..., m, D).
    :return: the moved points, shapes (..., n, D) and (..., m, D).
    """
    origin = lax.stop_gradient(X2.mean(axis=tuple(range(X2.ndim - 1))))
    moved = X1 - origin
    return moved, moved if X2 is X1 else X2 - origin


@jax.custom_jvp
def _clip_rounding(r2: Array) -> Array:
    # What is cut off is rounding error, not part of the function: the derivative passes untouched. (That of
    # `maximum` would be 0 or 1/2 at coincident points, where second derivatives need 1.)
    return jnp.maximum(r2, 0)


_clip_rounding.defjvp(lambda primals, tangents: (_clip_rounding(*primals), tangents[0]))


def squared_distance(X1: Array, X2: Array) -> Array:
    r"""Squared Euclidean distances :math:`|x|^2 + |y|^2 - 2 x^\top y`, never negative.

    The absolute rounding error is about eps times the largest squared norm, so give centred inputs, and use
    `squared_distance_by_differences` where the square root's slope at zero would magnify it. If ``X1`` and
    ``X2`` are the same object the diagonal is exactly zero, its derivatives too.

    :param X1: shape (..., n, D).
    :param X2: shape (..., m, D); leading axes broadcast against those of ``X1``.
    :return: shape (..., n, m).
    """
    if X1.shape[-1] <= _FEW_DIMENSIONS:
        return squared_distance_by_differences(X1, X2)
    cross = matmul(X1, jnp.swapaxes(X2, -1, -2))  # (..., n, m)
    norms1 = jnp.square(X1).sum(axis=-1)[..., :, None]
    norms2 = jnp.square(X2).sum(axis=-1)[..., None, :]
    r2 = _clip_rounding(norms1 + norms2 - 2 * cross)
    if X2 is X1:
        r2 = jnp.where(jnp.eye(X1.shape[-2], dtype=bool), 0, r2)
    return r2


def squared_distance_by_differences(X1: Array, X2: Array) -> Array:
    r"""Squared Euclidean distances :math:`\sum_d (x_d - y_d)^2`, relatively accurate however close two points
    are.

    :param X1: shape (..., n, D).
    :param X2: shape (..., m, D); leading axes broadcast against those of ``X1``.
    :return: shape (..., n, m).
    """
    num_dims = X1.shape[-1]
    if num_dims <= _MAX_UNROLLED:
        squares = (jnp.square(X1[..., :, None, d] - X2[..., None, :, d]) for d in range(num_dims))
        total = next(squares)
        for square in squares:
            total = total + square
        return total
    return jnp.square(X1[..., :, None, :] - X2[..., None, :, :]).sum(axis=-1)
