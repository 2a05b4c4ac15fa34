"""Starting points: where to put inducing points and latent inputs, and what lengthscale to begin with.

Everything here runs once, before training, on arrays in and arrays out; nothing is differentiated.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_orthgp.errors import check_floating, check_inputs
from numpyro_orthgp.math.linalg import (
    add_jitter,
    default_jitter,
    matmul,
    safe_cholesky,
    safe_sqrt,
    solve_lower,
)
from numpyro_orthgp.types import Array, KernelLike, PRNGKey

__all__ = ["greedy_variance", "kmeans", "median_lengthscale", "pca"]

_BLOCK_ENTRIES = 2**22  # distances held at once: rows of X times centres


def kmeans(rng_key: PRNGKey, X: Array, num: int, *, num_iters: int = 30) -> Array:
    r"""Centres of k-means clusters, a good default for inducing points.

    Seeding by k-means++ (further seeds are drawn with probability proportional to the squared distance from
    the seeds so far, the best of a few draws each time), then ``num_iters`` rounds of Lloyd's algorithm. A
    cluster that loses all its points is put on one of the points farthest from their own centres. Memory is
    a few times that of ``X`` plus a block of about four million distances.

    With fewer distinct rows than ``num`` some centres coincide; they are finite all the same.

    :param rng_key: key for the seeding; the same key gives the same centres.
    :param X: inputs, shape (N, D); scale its columns first if their units differ, as distances are Euclidean.
    :param num: how many centres, from 1 to N.
    :param num_iters: rounds of Lloyd's algorithm.
    :return: shape (num, D), dtype of ``X``.
    :raises TypeError: if ``X`` is not floating or ``num`` not an integer.
    :raises ValueError: if ``X`` is not finite of shape (N, D), or ``num`` is not from 1 to N.

    **References:**
        1. Arthur, Vassilvitskii. k-means++: The Advantages of Careful Seeding. 2007.
    """
    X = check_inputs("X", X)
    _check_count("num", num, X.shape[0])
    _check_count("num_iters", num_iters, None)
    return _kmeans(rng_key, X, int(num), int(num_iters))


def greedy_variance(
    kernel: KernelLike,
    X: Array,
    num: int,
    *,
    given: Array | Sequence[Array] | None = None,
    max_points: int = 20_000,
    rng_key: PRNGKey | None = None,
    threshold: float = 0.0,
) -> Array:
    r"""Rows of ``X`` picked one by one where the prior, given the points so far, is least certain.

    .. math:: x_{m+1} = \arg\max_x \; k(x, x) - k_m(x)^\top K_m^{-1} k_m(x)

    with :math:`m` running over ``given`` and the points already picked: pivoted Cholesky, so that the trace
    of the residual covariance shrinks fast. With ``given=Z`` it finds orthogonal points ``O`` where ``Z``
    leaves most variance. Work is O(N num^2) and memory O(N num), plus O(N M) for M given points.

    Once no conditional variance is above ``threshold`` times the largest prior variance (or above rounding
    error) there is nothing left to learn: the points still due are the rows not yet picked of largest
    remaining variance. So the answer always holds ``num`` finite, distinct rows of ``X``, but ``num`` could
    have been smaller.

    :param kernel: ``kernel(X1, X2) -> (..., n, m)`` and ``kernel(X) -> (..., n)``. With leading (latent) axes
        each latent is conditioned by itself, and the variances are summed over latents.
    :param X: candidate points, shape (N, D).
    :param num: how many points to pick, from 1 to the number of candidates.
    :param given: points already there, shape (M, D), or a list of such arrays; converted to the dtype of ``X``.
    :param max_points: if ``X`` has more rows than this, a random subset of this many rows is used.
    :param rng_key: key of that subset; ``jax.random.key(0)`` if not given. Otherwise the answer is
        deterministic.
    :param threshold: relative conditional variance below which conditioning stops, from 0 to 1.
    :return: shape (num, D), dtype of ``X``.
    :raises TypeError: if ``X`` or ``given`` is not floating, or ``num`` not an integer.
    :raises ValueError: if shapes do not match or ``num`` is not from 1 to the number of candidates.

    **References:**
        1. Burt, Rasmussen, van der Wilk. Convergence of Sparse Variational Inference in Gaussian Processes
        Regression. 2020.
    """
    X = check_inputs("X", X)
    _check_count("num", num, X.shape[0])
    _check_count("max_points", max_points, None)
    if num > max_points:
        raise ValueError(f"`num` must be at most `max_points` = {max_points}, the candidates kept; got {num}.")
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"`threshold` must be from 0 to 1, relative to the prior variance; got {threshold}.")
    listed: Sequence[Any] = given if isinstance(given, list | tuple) else [] if given is None else [given]
    sets = [check_inputs("given", Z, X.shape[1]).astype(X.dtype) for Z in listed]
    X = _subset(X, max_points, rng_key)
    # The kernel may be any callable, so it is closed over; one program compiles faster than its many small steps.
    pivots = jax.jit(partial(_pivots, kernel, num=int(num), threshold=float(threshold)))
    return X[pivots(X=X, given=jnp.concatenate(sets) if sets else None)]


def median_lengthscale(X: Array, *, num_points: int = 1000, rng_key: PRNGKey | None = None, ard: bool = False) -> Array:
    r"""The median heuristic: a lengthscale of the size of typical distances between inputs.

    The median Euclidean distance between pairs of distinct rows; with ``ard`` one value per column, the
    median absolute difference times :math:`\sqrt{D}` (so that typical scaled distances stay of order one in
    any dimension).

    A median of zero (a mostly constant column, many equal rows) says nothing about scale: then the median of
    the positive distances stands in, and 1.0 where there are none (a constant column). The answer is positive
    and finite.

    :param X: inputs, shape (N, D).
    :param num_points: if ``X`` has more rows than this, a random subset of this many rows is used.
    :param rng_key: key of that subset; ``jax.random.key(0)`` if not given.
    :param ard: one lengthscale per column instead of one for all.
    :return: shape () or, with ``ard``, (D,); units and dtype of ``X``.
    :raises TypeError: if ``X`` is not floating.
    :raises ValueError: if ``X`` is not finite of shape (N, D) or ``num_points`` is not positive.
    """
    X = check_inputs("X", X)
    _check_count("num_points", num_points, None)
    return _median_lengthscale(_subset(X, num_points, rng_key), bool(ard))


def pca(Y: Array, dim: int) -> Array:
    r"""Scores on the leading principal components, each of unit variance: where the latent inputs of a GP-LVM start.

    Missing entries (NaN) count as the mean of their column. A component without any variance scores zero. The sign of a
    component is that which makes the largest of its loadings positive.

    :param Y: data, shape (N, D); scale its columns first if their units differ.
    :param dim: number of components Q, from 1 to the smaller of N and D.
    :return: shape (N, Q), dtype of ``Y``.
    :raises TypeError: if ``Y`` is not floating or ``dim`` not an integer.
    :raises ValueError: if ``Y`` does not have shape (N, D) or holds infinity, or ``dim`` is out of range.

    **References:**
        1. Lawrence. Probabilistic non-linear principal component analysis with Gaussian process latent variable
        models. 2005. Sec. 2.
    """
    missing = jnp.isnan(check_floating("Y", Y))
    Y = check_inputs("Y", jnp.where(missing, 0, Y))
    _check_count("dim", dim, min(Y.shape))
    return _pca(Y, missing, int(dim))


@partial(jax.jit, static_argnames="dim")
def _pca(Y: Array, missing: Array, dim: int) -> Array:
    count = jnp.maximum((~missing).sum(axis=0), 1)
    centred = jnp.where(missing, 0, Y - Y.sum(axis=0) / count)
    U, sizes, loadings = jnp.linalg.svd(centred, full_matrices=False)
    U, sizes, loadings = U[:, :dim], sizes[:dim], loadings[:dim]
    largest = jnp.take_along_axis(loadings, jnp.abs(loadings).argmax(axis=1)[:, None], axis=1)[:, 0]
    present = sizes > jnp.finfo(Y.dtype).eps * max(Y.shape) * sizes[0]
    return U * jnp.where(present, jnp.sign(largest), 0) * Y.shape[0] ** 0.5


def _check_count(name: str, value: Any, N: int | None) -> None:
    """Refuse anything but an integer from 1 to ``N`` (no upper end if None)."""
    try:
        count = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"`{name}` must be an integer; got {value!r} of type {kind}.") from None
    if N is None and count < 1:
        raise ValueError(f"`{name}` must be at least 1; got {count}.")
    if N is not None and not 1 <= count <= N:
        raise ValueError(f"`{name}` must be between 1 and N = {N}, the number of rows of `X`; got {count}.")


def _subset(X: Array, size: int, rng_key: PRNGKey | None) -> Array:
    """``X``, or ``size`` of its rows drawn without replacement if it has more."""
    if X.shape[0] <= size:
        return X
    key = random.key(0) if rng_key is None else rng_key
    return X[random.choice(key, X.shape[0], (size,), replace=False)]


@partial(jax.jit, static_argnames="ard")
def _median_lengthscale(X: Array, ard: bool) -> Array:
    D = X.shape[1]
    typical = lax.map(lambda x: _typical_distance(x[:, None]), X.T) * D**0.5 if ard else _typical_distance(X)
    return jnp.where(typical > 0, typical, 1.0).astype(X.dtype)


def _typical_distance(X: Array) -> Array:
    """Median distance between rows; of the positive distances where that is zero, and zero if there are none."""
    X = X - X[0]
    size = jnp.abs(X).max()  # keeps squares from overflowing or vanishing
    X = X / jnp.where(size > 0, size, 1.0)
    # By differences, one row at a time: equal rows must have distance zero, not rounding error.
    distances = jnp.sort(lax.map(lambda x: safe_sqrt(((X - x) ** 2).sum(axis=-1)), X).ravel())

    def median_beyond(skipped: int | Array) -> Array:
        # Every pair is there twice, which moves no median; the rows with themselves are the first N zeros.
        low, high = (distances.size - 1 + skipped) // 2, (distances.size + skipped) // 2
        return (distances[low] + distances[jnp.minimum(high, distances.size - 1)]) / 2

    median = median_beyond(X.shape[0])
    return size * jnp.where(median > 0, median, median_beyond((distances == 0).sum()))


# ---- k-means


@partial(jax.jit, static_argnames=("num", "num_iters"))
def _kmeans(rng_key: PRNGKey, X: Array, num: int, num_iters: int) -> Array:
    # Centred data lose fewer digits when squared distances are expanded into products.
    shift = X.mean(axis=0)
    X = X - shift
    centres = lax.fori_loop(0, num_iters, lambda _, C: _lloyd(X, C), _seeds(rng_key, X, num))
    return centres + shift


def _seeds(rng_key: PRNGKey, X: Array, num: int) -> Array:
    """k-means++, shape (num, D): rows drawn in proportion to their squared distance from those drawn before.

    Of a few rows drawn at each turn the one that leaves the smallest sum of squared distances is kept.
    """
    tries = 2 + int(math.log(num))
    keys = random.split(rng_key, num)

    def step(m: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centres, nearest = state
        cumulative = jnp.cumsum(nearest)
        draws = random.uniform(keys[m], (tries,), X.dtype) * cumulative[-1]
        rows = X[jnp.clip(jnp.searchsorted(cumulative, draws, side="right"), 0, X.shape[0] - 1)]
        left = jnp.minimum(nearest, _squared_distance(rows, X))  # (tries, N)
        best = left.sum(axis=-1).argmin()
        return centres.at[m].set(rows[best]), left[best]

    first = X[random.randint(keys[0], (), 0, X.shape[0])]
    centres = jnp.zeros((num, X.shape[1]), X.dtype).at[0].set(first)
    return lax.fori_loop(1, num, step, (centres, ((X - first) ** 2).sum(axis=-1)))[0]


def _lloyd(X: Array, centres: Array) -> Array:
    """One round: rows to their nearest centre, centres to the mean of their rows, empty ones to far rows."""
    sums, counts, nearest = _assign(X, centres)
    empty = counts == 0
    means = sums / jnp.maximum(counts, 1)[:, None].astype(X.dtype)

    def reseed(means: Array) -> Array:
        farthest = lax.top_k(nearest, centres.shape[0])[1]
        turn = jnp.cumsum(empty) - 1  # the j-th empty cluster takes the j-th farthest row
        return jnp.where(empty[:, None], X[farthest[turn]], means)

    return lax.cond(empty.any(), reseed, lambda means: means, means)


def _assign(X: Array, centres: Array) -> tuple[Array, Array, Array]:
    """Sums (num, D) and counts (num,) of the rows nearest to each centre; squared distance of each row (N,)."""
    (N, D), num = X.shape, centres.shape[0]
    size = min(N, max(1, _BLOCK_ENTRIES // num))
    blocks = -(-N // size)
    padding = blocks * size - N
    rows = jnp.pad(X, ((0, padding), (0, 0))).reshape(blocks, size, D)
    real = (jnp.arange(blocks * size) < N).reshape(blocks, size)

    def block(totals: tuple[Array, Array], xs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        x, mask = xs
        distance = _squared_distance(x, centres)
        label = jnp.where(mask, distance.argmin(axis=-1), num)  # padding: to a segment that is dropped
        sums = jax.ops.segment_sum(x, label, num + 1)[:num]
        counts = jax.ops.segment_sum(mask.astype(jnp.int32), label, num + 1)[:num]
        return (totals[0] + sums, totals[1] + counts), distance.min(axis=-1)

    start = jnp.zeros((num, D), X.dtype), jnp.zeros(num, jnp.int32)
    (sums, counts), nearest = lax.scan(block, start, (rows, real))
    return sums, counts, nearest.reshape(-1)[:N]


def _squared_distance(X: Array, C: Array) -> Array:
    """Squared distances, shape (n, m), by products: no array of shape (n, m, D)."""
    return jnp.maximum((X**2).sum(-1)[:, None] - 2 * matmul(X, C.T) + (C**2).sum(-1), 0.0)


# ---- greedy conditional variance


def _pivots(kernel: KernelLike, X: Array, given: Array | None, num: int, threshold: float) -> Array:
    """Row numbers (num,) by pivoted Cholesky of k(X, X), conditioned on the rows of ``given``."""
    N = X.shape[0]
    prior = kernel(X).reshape(-1, N)  # (P, N)
    P = prior.shape[0]
    projected = _project(kernel, X, given, P)  # (P, M, N)
    M = projected.shape[1]
    # Rounding error of the variances grows with what has been subtracted from them.
    floor = max(threshold, 10 * float(jnp.finfo(X.dtype).eps)) * prior.max(axis=-1)
    factor = jnp.concatenate([projected, jnp.zeros((P, num, N), X.dtype)], axis=1)

    def step(m: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        factor, variance, free, picks = state
        i = jnp.argmax(jnp.where(free, variance.sum(axis=0), -jnp.inf)).astype(picks.dtype)
        own = variance[:, i]
        informative = own > floor
        column = lax.dynamic_index_in_dim(factor, i, axis=2, keepdims=False)
        covariance = kernel(lax.dynamic_slice_in_dim(X, i, 1), X).reshape(P, N)
        covariance = covariance - matmul(column[:, None, :], factor)[:, 0, :]
        scale = jnp.where(informative, 1 / jnp.sqrt(jnp.where(informative, own, 1.0)), 0.0)
        row = scale[:, None] * covariance
        factor = lax.dynamic_update_slice_in_dim(factor, row[:, None, :], M + m, axis=1)
        variance = jnp.maximum(variance - row**2, 0.0)
        return factor, variance, free.at[i].set(False), picks.at[m].set(i)

    variance = jnp.maximum(prior - (projected**2).sum(axis=1), 0.0)
    start = factor, variance, jnp.ones(N, bool), jnp.zeros(num, jnp.int32)
    return lax.fori_loop(0, num, step, start)[3]


def _project(kernel: KernelLike, X: Array, given: Array | None, P: int) -> Array:
    """``L^{-1} k(given, X)``, ``L`` the factor of ``k(given, given)``: (P, M, N), M = 0 without given points."""
    if given is None:
        return jnp.zeros((P, 0, X.shape[0]), X.dtype)
    M = given.shape[0]
    K = kernel(given, given).reshape(P, M, M)
    scale = kernel(given).reshape(P, M).mean(axis=-1)
    L = safe_cholesky(add_jitter(K, default_jitter(X.dtype) * scale), scale)
    return solve_lower(L, kernel(given, X).reshape(P, M, X.shape[0]))
