"""From data to the sums that a collapsed bound needs, at once or block by block.

``lax.scan`` computes the sums over blocks of rows, one by one and again for the gradient, so memory is that of one block.
The total is not part of the checkpointed function, or every block's total would be kept. Missing entries and noise per entry are
precisions, zero where missing. Beyond 2^22 entries per matrix (2^25 for expectations) blocks are the default on all devices. On two
CPU cores they took less time than one big block: computing a block twice in the cache is faster than writing it to memory and
reading it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_orthgp.collapsed.bounds import Bound, Moments, Statistics, best_mean, statistics
from numpyro_orthgp.functions.groups import covariance_of_groups
from numpyro_orthgp.functions.prior import expect_covariances
from numpyro_orthgp.functions.projection import Block, project, residual_variance
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.kernels.expectations import psi0
from numpyro_orthgp.math.blocks import sum_blocks
from numpyro_orthgp.math.grouped import cut_groups, gram_of_groups
from numpyro_orthgp.math.linalg import join
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike, NumPoints

__all__ = ["Prior", "Rows", "project_inputs", "sum_over_points", "without_orthogonal"]

# Most values of A kept for the gradient, 64 MB in float32; beyond this, memory would grow with the data.
MAX_KEPT = 2**24

# Dtypes in which sums of squares over many rows have errors of nats.
_COARSE = (jnp.float32, jnp.bfloat16, jnp.float16)

# Rows per inducing variable for the offset.
_ROWS_PER_POINT = 1

# In float32 a direction beyond Hermite factors counts if it exceeds rounding errors of sums over all rows times this.
_SMALLEST_SEEN = 10.0


class Prior(NamedTuple):
    """The prior with its sets, and the Gaussians of sets that are not integrated out.

    :param given: Gaussians or values of all sets except the first; ``None`` if all sets are optimized.
    :param num_points: quadrature nodes for kernel expectations without closed form.
    :param magnified: as for :func:`~numpyro_orthgp.functions.prior.expect_covariances`.
    """

    kernel: Any
    features: tuple[Feature, ...]
    blocks: tuple[Block, ...]
    given: tuple[Whitened, ...] | None = None
    num_points: NumPoints = None
    magnified: ArrayLike = 1.0


class Rows(NamedTuple):
    """Data points, each field with the points first.

    :param X: inputs or their means, shape (B, D).
    :param scale: standard deviations of uncertain inputs, shape (B, D), or ``None``.
    :param Y: outputs, shape (B, C).
    :param precision: 1 / noise variance, zero where missing, shape (B,), or (B, C) if outputs differ.
    """

    X: Array
    scale: Array | None
    Y: Array
    precision: Array


def sum_over_points(
    prior: Prior, rows: Rows, bound: Bound, block_size: int | None, offset: Array | None = None
) -> Statistics:
    r"""The sums over all points, ``block_size`` rows at a time; each block is computed again for the gradient.

    Memory is then that of one block, O(M^2 + block_size M), in both directions. If the projections of all rows are few, they are
    kept for the gradient. Blocks consist of whole groups, if there are any.

    In float32 the sums are those of :math:`y - A^\top m_0`, with :math:`m_0` fitted to a few rows. The bound is the same for any
    :math:`m_0`, so it needs no derivative. With :math:`m_0 = 0` the bound would be a small difference of two large sums, with
    errors of nats if the signal is far above the noise (``benchmarks/float32_sums.py``).

    :param offset: :math:`m_0`, if it was fitted before: sums of the same offset can be added.
    """
    entries = rows.X.shape[0] * sum(math.prod(block.whitener.shape[:-1]) for block in prior.blocks)
    if rows.scale is not None:
        # The variance of all rows, since errors of all blocks add up.
        variance = jnp.mean(psi0(prior.kernel, rows.X, rows.scale, num_points=prior.num_points))
        prior = prior._replace(magnified=_SMALLEST_SEEN * (1 + variance * jnp.max(jnp.sum(rows.precision, 0))))
    if offset is None and rows.scale is None and rows.Y.dtype in _COARSE:
        offset = _offset(prior, rows, bound, block_size)
    return _sums(prior, rows, bound, block_size, offset, keep_large=entries <= MAX_KEPT)._replace(offset=offset)


def _offset(prior: Prior, rows: Rows, bound: Bound, block_size: int | None) -> Array:
    """The best mean of the whitened variables given a few rows, shape (..., M, C). It has no derivative."""
    num = len(rows.X)
    few = slice(None, None, max(1, num // (_ROWS_PER_POINT * sum(s.num for s in prior.features))))
    prior, rows = jax.tree.map(jax.lax.stop_gradient, (prior, jax.tree.map(lambda a: a[few], rows)))
    return best_mean(_sums(prior, rows, bound, block_size, None))


def _sums(
    prior: Prior, rows: Rows, bound: Bound, block_size: int | None, offset: Array | None, *, keep_large: bool = False
) -> Statistics:
    # Padding of the last block has precision zero: no observation.
    def of(rows: tuple[Array, Array | None, Array], precision: Array) -> Statistics:
        return _block(prior, Rows(*rows, precision), bound, offset)

    def of_groups(rows: tuple[Array, Array | None, Array], precision: Array) -> Statistics:
        return of(*jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (rows, precision)))

    size, group_size = block_size or rows.X.shape[0], bound.group_size
    if group_size is None:
        return sum_blocks(of, rows[:3], rows.precision, size, keep_large=keep_large)
    points, precision = jax.tree.map(lambda a: _by_groups(a, group_size, "edge"), rows[:3]), rows.precision
    precision = _by_groups(precision, group_size, "constant")  # padding of the last group has no observation
    return sum_blocks(of_groups, points, precision, -(-size // group_size), keep_large=keep_large)


def _by_groups(rows: Array, size: int, fill: str) -> Array:
    """(N, ...) to (n, G, ...)."""
    return jnp.moveaxis(cut_groups(jnp.moveaxis(rows, 0, -1), size, fill), (-2, -1), (0, 1))


def project_inputs(prior: Prior, X: Array) -> tuple[Array, ...]:
    """The projections A_i(X) of known inputs on all sets."""
    return project(prior.blocks, [s.covariance_with_inputs(prior.kernel, X) for s in prior.features])


def without_orthogonal(given: Sequence[Whitened], A: Sequence[Array], Y: Array) -> tuple[Array, Array]:
    """Outputs minus the means of the given sets, (B, C), and the variance that these sets explain, (B, 1) or (B, C)."""
    explained = jnp.zeros((Y.shape[0], 1), Y.dtype)
    for q, Ai in zip(given, A, strict=True):
        mean = jnp.einsum("...mb,...m->...b", Ai, q.loc, precision=PRECISION)
        Y = Y - jnp.atleast_2d(mean).T
        W = q.spread(Ai)
        if W is not None:
            explained = explained + jnp.atleast_2d(jnp.sum(W**2, -2)).T
    return Y, explained


def _block(prior: Prior, rows: Rows, bound: Bound, offset: Array | None) -> Statistics:
    Y, precision = rows.Y, rows.precision
    if rows.scale is not None:
        moments = _uncertain(prior, rows.X, rows.scale, bound.group_size)
        explained = jnp.zeros((Y.shape[0], 1), Y.dtype)
    else:
        A = project_inputs(prior, rows.X)
        residual = residual_variance(prior.kernel(rows.X), A)
        Y, explained = without_orthogonal(prior.given or (), A[1:] if prior.given else (), Y)
        moments = Moments(A[0] if prior.given is not None else join(A, -2, event_dim=2), residual)
        if bound.group_size is not None:
            groups = covariance_of_groups(prior.kernel, rows.X, gram_of_groups(A, bound.group_size), residual)
            moments = moments._replace(groups=groups)
    explained = jnp.broadcast_to(explained, Y.shape)
    if precision.ndim == 1 and moments.residual.ndim == 1:
        return statistics(moments, Y, precision, explained.sum(-1), bound, offset)
    # If noise, mask or kernel differ between outputs, these get a leading axis instead of columns.
    precision = jnp.broadcast_to(precision.T, (Y.shape[1], Y.shape[0]))
    return statistics(moments, Y.T[..., None], precision, explained.T, bound, offset)


def _uncertain(prior: Prior, loc: Array, scale: Array, group_size: int | None) -> Moments:
    psi = expect_covariances(prior.kernel, prior.features, prior.blocks, loc, scale, prior.num_points, prior.magnified)
    groups = None
    if group_size is not None:
        groups = covariance_of_groups(prior.kernel, loc, gram_of_groups([psi.first], group_size), psi.residual, scale)
    return Moments(
        psi.first, psi.residual, psi.centred, psi.second, psi.outer, psi.factors, psi.kept, psi.spread, groups
    )
