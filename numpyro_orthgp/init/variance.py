"""Inducing points where the prior's conditional variance is largest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.init.counts import check_count, few_rows, subset
from numpyro_orthgp.kernels.functions import kernel_as_pytree
from numpyro_orthgp.math.cholesky import inverse_cholesky
from numpyro_orthgp.math.compiled import can_be_compiled
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, jitter_scale
from numpyro_orthgp.math.products import lower_matmul, matmul
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array, KernelLike, PRNGKey

__all__ = ["greedy_variance", "pivots"]


@broadcasting
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
    r"""Pick rows of ``X`` one by one, each where the prior's variance given the previous points is largest.

    .. math:: x_{m+1} = \arg\max_x \; k(x, x) - k_m(x)^\top K_m^{-1} k_m(x)

    where :math:`m` denotes the points in ``given`` and those already picked. This is pivoted Cholesky: the trace
    of the residual covariance shrinks fast. With ``given=Z`` it finds orthogonal points ``O`` where ``Z``
    leaves most variance. The cost is O(N num^2) and memory O(N num), plus O(N M) for M given points.

    When all conditional variances are below ``threshold`` times the largest prior variance (or below rounding
    error), more points explain nothing. The remaining points are then the unpicked rows of largest remaining
    variance. So the result always has ``num`` finite, distinct rows of ``X``, but a smaller ``num`` would do.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import init, kernels
    >>> X = jnp.linspace(0.0, 1.0, 101)[:, None]
    >>> Z = jnp.array([[0.0], [1.0]])
    >>> print(init.greedy_variance(kernels.RBF(0.2), X, 2, given=Z).T)
    [[0.5  0.25]]

    :param kernel: ``kernel(X1, X2) -> (..., n, m)`` and ``kernel(X) -> (..., n)``. With leading (latent) axes
        each latent function is conditioned separately, and variances are summed over latent functions.
    :param X: candidate points, shape (N, D).
    :param num: number of points to pick, from 1 to the number of candidates.
    :param given: existing points, shape (M, D), or a list of such arrays; converted to the dtype of ``X``.
    :param max_points: if ``X`` has more rows than this, a random subset of this many rows is used. Of an array on disk only these
        are read.
    :param rng_key: key for the subset; by default ``jax.random.key(0)``. Nothing else is random.
    :param threshold: relative conditional variance below which conditioning stops, from 0 to 1.
    :return: shape (num, D), dtype of ``X``.
    :raises TypeError: if ``X`` or ``given`` is not floating-point, or ``num`` not an integer.
    :raises ValueError: if shapes do not match or ``num`` is not from 1 to the number of candidates.

    **References:**
        1. Burt, Rasmussen, van der Wilk. Convergence of Sparse Variational Inference in Gaussian Processes
        Regression. 2020.
    """
    check_count("max_points", max_points, None)
    whole, X = X, check_inputs("X", few_rows(X, max_points, rng_key))
    check_count("num", num, len(whole))
    if num > max_points:
        raise ValueError(f"`num` must be at most `max_points` = {max_points}, the candidates kept; got {num}.")
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"`threshold` must be from 0 to 1, relative to the prior variance; got {threshold}.")
    listed: Sequence[Any] = given if isinstance(given, list | tuple) else [] if given is None else [given]
    sets = [check_inputs("given", Z, X.shape[1]).astype(X.dtype) for Z in listed]
    X, kernel = subset(X, max_points, rng_key), kernel_as_pytree(kernel)
    options: dict[str, Any] = {
        "given": jnp.concatenate(sets) if sets else None,
        "num": int(num),
        "threshold": float(threshold),
    }
    if can_be_compiled(kernel):
        return X[_kept_pivots(kernel, X, **options)]
    return X[run_kept(partial(pivots, kernel, **options), X)]


def pivots(
    kernel: KernelLike,
    X: Array,
    given: Array | None = None,
    free: Array | None = None,
    *,
    num: int,
    threshold: float = 0.0,
) -> Array:
    """Row numbers (num,) from pivoted Cholesky of k(X, X), conditioned on the rows of ``given``.

    :param free: True for the rows that may be picked, shape (N,), at least ``num`` of them; by default all.
    """
    N = X.shape[0]
    prior = kernel(X).reshape(-1, N)  # (P, N)
    P = prior.shape[0]
    projected = _project(kernel, X, given, P)  # (P, M, N)
    M = projected.shape[1]
    # The rounding error of variances grows with the amount subtracted from them.
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
    start = factor, variance, jnp.ones(N, bool) if free is None else free, jnp.zeros(num, jnp.int32)
    return lax.fori_loop(0, num, step, start)[3]


_kept_pivots = jax.jit(pivots, static_argnames=("num", "threshold"))


def _project(kernel: KernelLike, X: Array, given: Array | None, P: int) -> Array:
    """``L^{-1} k(given, X)``, where ``L`` is the Cholesky factor of ``k(given, given)``: (P, M, N); M = 0 without given points."""
    if given is None:
        return jnp.zeros((P, 0, X.shape[0]), X.dtype)
    M = given.shape[0]
    K = kernel(given, given).reshape(P, M, M)
    scale = jitter_scale(kernel(given).reshape(P, M))
    W = inverse_cholesky(add_jitter(K, default_jitter(X.dtype) * scale), scale)
    return lower_matmul(W, kernel(given, X).reshape(P, M, X.shape[0]))
