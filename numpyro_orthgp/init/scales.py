"""Initial lengthscales."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.init.counts import check_count, few_rows, subset
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["median_lengthscale"]


@broadcasting
def median_lengthscale(X: Array, *, num_points: int = 1000, rng_key: PRNGKey | None = None, ard: bool = False) -> Array:
    r"""The median heuristic: the lengthscale is a typical distance between inputs.

    It is the median Euclidean distance between pairs of distinct rows. With ``ard``, each column has its own value:
    the median absolute difference times :math:`\sqrt{D}`, so that typical scaled distances are of order one in any
    dimension.

    If the median is zero (a mostly constant column, many equal rows), the median of the positive distances is used,
    or 1.0 if there are none (a constant column). The result is positive and finite.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import init
    >>> X = jnp.array([[0.0, 0.0], [1.0, 10.0], [2.0, 20.0]])
    >>> print(init.median_lengthscale(X).round(2), init.median_lengthscale(X, ard=True).round(2))
    10.05 [ 1.41 14.14]

    :param X: inputs, shape (N, D).
    :param num_points: if ``X`` has more rows than this, a random subset of this many rows is used. Of an array on disk only these
        are read.
    :param rng_key: key for the subset; by default ``jax.random.key(0)``.
    :param ard: one lengthscale per column instead of one for all.
    :return: shape () or, with ``ard``, (D,); units and dtype of ``X``.
    :raises TypeError: if ``X`` is not floating-point.
    :raises ValueError: if ``X`` is not finite of shape (N, D) or ``num_points`` is not positive.
    """
    check_count("num_points", num_points, None)
    X = check_inputs("X", few_rows(X, num_points, rng_key))
    return _median_lengthscale(subset(X, num_points, rng_key), bool(ard))


@partial(jax.jit, static_argnames="ard")
def _median_lengthscale(X: Array, ard: bool) -> Array:
    D = X.shape[1]
    typical = lax.map(lambda x: _typical_distance(x[:, None]), X.T) * D**0.5 if ard else _typical_distance(X)
    return jnp.where(typical > 0, typical, 1.0).astype(X.dtype)


def _typical_distance(X: Array) -> Array:
    """Median distance between rows. If it is zero, the median of the positive distances; zero if there are none."""
    X = X - X[0]
    size = jnp.abs(X).max()  # keeps squares from overflowing or vanishing
    X = X / jnp.where(size > 0, size, 1.0)
    # From differences, one row at a time: the distance of equal rows must be zero, not rounding error.
    distances = jnp.sort(lax.map(lambda x: safe_sqrt(((X - x) ** 2).sum(axis=-1)), X).ravel())

    def median_beyond(skipped: int | Array) -> Array:
        # Every pair occurs twice, which does not change the median. The first N zeros are distances of rows to themselves.
        low, high = (distances.size - 1 + skipped) // 2, (distances.size + skipped) // 2
        return (distances[low] + distances[jnp.minimum(high, distances.size - 1)]) / 2

    median = median_beyond(X.shape[0])
    return size * jnp.where(median > 0, median, median_beyond((distances == 0).sum()))
