"""Inducing points at the centres of clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_orthgp.errors import check_inputs, check_integer, check_is_key, is_concrete
from numpyro_orthgp.foreign import as_numpy
from numpyro_orthgp.init.counts import check_count, few_rows
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["kmeans"]

_BLOCK_ENTRIES = 2**22  # distances held at once: rows of X times centres
MOST_ON_DISK = 2**17  # rows that are read of an array on disk


@broadcasting
def kmeans(rng_key: PRNGKey, X: Array, num: int, *, num_iters: int = 30, categories: Sequence[int] = ()) -> Array:
    r"""Centres of k-means clusters, a good default for inducing points.

    Seeds are chosen by k-means++: each further seed is drawn with probability proportional to the squared distance
    from the seeds so far, and is the best of a few draws. Then come ``num_iters`` rounds of Lloyd's algorithm. A
    cluster that loses all its points moves to one of the points that are farthest from their centres. Memory is
    a few times that of ``X``, plus a block of about four million distances. Of an array on disk (``np.memmap``, or of h5py, zarr or
    ``training.columns``) with more than 131072 rows so many random ones are read.

    Centres are means, which make no sense for category or task indices. List such columns in ``categories``: a centre then has the
    most frequent category of its rows. Two rows that differ in a category are as far apart as two typical rows in a column of
    standard deviation one (k-prototypes [2]). Alternatively, :func:`greedy_variance` picks rows of ``X``.

    If ``X`` has fewer than ``num`` distinct rows, some centres coincide, but all are finite.

    >>> import jax
    >>> from numpyro_orthgp import init
    >>> X = jax.random.uniform(jax.random.PRNGKey(0), (500, 2))
    >>> init.kmeans(jax.random.PRNGKey(1), X, 20).shape
    (20, 2)

    :param rng_key: key for the seeds. The same key gives the same centres.
    :param X: inputs, shape (N, D). Distances are Euclidean, so first scale columns with different units.
    :param num: number of centres, from 1 to N.
    :param num_iters: rounds of Lloyd's algorithm.
    :param categories: columns of ``X`` that contain categories, with any codes. Negative numbers count from the end.
    :return: shape (num, D), dtype of ``X``.
    :raises TypeError: if ``X`` is not floating-point or ``num`` not an integer.
    :raises ValueError: if ``X`` is not finite of shape (N, D), ``num`` is not from 1 to N, or ``X`` lacks a column in
        ``categories``; also with ``categories`` under ``jit``, where categories cannot be counted.

    **References:**
        1. Arthur, Vassilvitskii. k-means++: The Advantages of Careful Seeding. 2007.
        2. Huang. Extensions to the k-Means Algorithm for Clustering Large Data Sets with Categorical Values. 1998.
    """
    check_is_key(rng_key)
    check_count("num", num, next(iter(getattr(X, "shape", ())), 0) or None)
    X = few_rows(X, max(MOST_ON_DISK, num), random.fold_in(rng_key, num))
    X = check_inputs("X", _no_categories(as_numpy("X", X)))
    check_count("num", num, X.shape[0])
    check_count("num_iters", num_iters, None)
    columns = _columns(categories, X.shape[1])
    if not columns:
        return _kmeans(rng_key, X, int(num), int(num_iters))
    if not is_concrete(X):
        raise ValueError(
            "Under `jit` categories cannot be counted: call init.kmeans(..., categories=...) outside of it."
        )
    return _prototypes(rng_key, X, int(num), int(num_iters), columns)


def _columns(categories: Sequence[int], D: int) -> list[int]:
    columns = [check_integer("categories", c, least=None) for c in categories]
    if any(not -D <= c < D for c in columns):
        raise ValueError(f"`categories` must name columns in 0..{D - 1} of X with D = {D}; got {list(categories)}.")
    return sorted({c % D for c in columns})


def _prototypes(rng_key: PRNGKey, X: Array, num: int, num_iters: int, columns: list[int]) -> Array:
    """k-prototypes. Categories become columns of zeros and ones, whose means are the shares of each category."""
    numbers = [d for d in range(X.shape[1]) if d not in columns]
    levels = [np.unique(np.asarray(X[:, c])) for c in columns]
    shares = [(X[:, c, None] == of_column).astype(X.dtype) for c, of_column in zip(columns, levels, strict=True)]
    centres = _kmeans(rng_key, jnp.concatenate([X[:, np.array(numbers, int)], *shares], 1), num, num_iters)
    ends = np.cumsum([len(numbers), *map(len, levels)])
    prototypes = jnp.zeros((num, X.shape[1]), X.dtype).at[:, np.array(numbers, int)].set(centres[:, : len(numbers)])
    for c, of_column, a, b in zip(columns, levels, ends, ends[1:], strict=False):
        prototypes = prototypes.at[:, c].set(jnp.asarray(of_column)[centres[:, a:b].argmax(1)])
    return prototypes


def _no_categories(X: Any) -> Any:
    """
    :raises TypeError: for integers and truth values: they may be codes, which have no mean.
    """
    dtype = getattr(X, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, bool)):
        raise TypeError(
            f"`X` must have a floating dtype; got {dtype}. Numbers that are measured or counted: jnp.asarray(X, float). Codes of "
            "categories have no means: name their columns, init.kmeans(key, jnp.asarray(X, float), num, categories=[...]), or take "
            "init.greedy_variance(kernel, X, num), which picks rows of X. Both keep categories whole, as kernels.Coregion needs."
        )
    return X


@partial(jax.jit, static_argnames=("num", "num_iters"))
def _kmeans(rng_key: PRNGKey, X: Array, num: int, num_iters: int) -> Array:
    # Centred data lose fewer digits when squared distances are expanded into products.
    shift = X.mean(axis=0)
    X = X - shift
    centres = lax.fori_loop(0, num_iters, lambda _, C: _lloyd(X, C), _seeds(rng_key, X, num))
    return centres + shift


def _seeds(rng_key: PRNGKey, X: Array, num: int) -> Array:
    """k-means++ seeds, shape (num, D). Rows are drawn with probability proportional to squared distance from previous seeds.

    Each turn draws a few rows, and keeps the one with the smallest remaining sum of squared distances.
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
    """One round: rows go to the nearest centre, centres to the mean of their rows, empty clusters to far rows."""
    sums, counts, nearest = _assign(X, centres)
    empty = counts == 0
    means = sums / jnp.maximum(counts, 1)[:, None].astype(X.dtype)

    def reseed(means: Array) -> Array:
        farthest = lax.top_k(nearest, centres.shape[0])[1]
        turn = jnp.cumsum(empty) - 1  # the j-th empty cluster takes the j-th farthest row
        return jnp.where(empty[:, None], X[farthest[turn]], means)

    return lax.cond(empty.any(), reseed, lambda means: means, means)


def _assign(X: Array, centres: Array) -> tuple[Array, Array, Array]:
    """Sums (num, D) and counts (num,) of the rows nearest to each centre, and each row's squared distance (N,)."""
    (N, D), num = X.shape, centres.shape[0]
    size = min(N, max(1, _BLOCK_ENTRIES // num))
    blocks = -(-N // size)
    padding = blocks * size - N
    rows = jnp.pad(X, ((0, padding), (0, 0))).reshape(blocks, size, D)
    real = (jnp.arange(blocks * size) < N).reshape(blocks, size)

    def block(totals: tuple[Array, Array], xs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        x, mask = xs
        distance = _squared_distance(x, centres)
        label = jnp.where(mask, distance.argmin(axis=-1), num)  # padding goes to a segment that is dropped
        sums = lax.platform_dependent(x, label, cpu=partial(_sums, num), default=partial(_ordered_sums, num))
        counts = jax.ops.segment_sum(mask.astype(jnp.int32), label, num + 1)[:num]
        return (totals[0] + sums, totals[1] + counts), distance.min(axis=-1)

    start = jnp.zeros((num, D), X.dtype), jnp.zeros(num, jnp.int32)
    (sums, counts), nearest = lax.scan(block, start, (rows, real))
    return sums, counts, nearest.reshape(-1)[:N]


def _sums(num: int, X: Array, label: Array) -> Array:
    return jax.ops.segment_sum(X, label, num + 1)[:num]


def _ordered_sums(num: int, X: Array, label: Array) -> Array:
    """:func:`_sums`, whose order is not left to chance: GPUs scatter rows as threads happen to come."""
    return matmul((label == jnp.arange(num)[:, None]).astype(X.dtype), X)


def _squared_distance(X: Array, C: Array) -> Array:
    """Squared distances from products, shape (n, m), without an array of shape (n, m, D)."""
    return jnp.maximum((X**2).sum(-1)[:, None] - 2 * matmul(X, C.T) + (C**2).sum(-1), 0.0)
