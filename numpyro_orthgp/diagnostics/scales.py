"""Whether lengthscales suit the inputs: correlations of f at rows that are near, or that differ in one column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.types import Array

__all__ = ["ALONE", "SAME", "Scales", "advice_on_scales", "scales_of", "words_of_level"]

ROWS, OTHERS, LEAST = 100, 2000, 20  # looked at; among which the nearest are sought; fewer rows say nothing
MOST_COLUMNS = 50
ALONE = 0.1  # correlation of a row with the nearest
SAME = 0.9999  # correlation of a row with the furthest, where f is one number
APART = 100.0  # ratio of columns' standard deviations
CUT, IDLE = 0.01, 0.99  # correlations of a row with itself after the exchange of one column: unrelated, the same


@dataclass(frozen=True)
class Scales:
    """Inputs measured by a kernel.

    :param spread: standard deviation of each column, shape (D,).
    :param reach: correlation of f at a row and at the same row with one column taken from another row, median over rows, shape
        (D,). Near 1 the column has no influence; near 0 all rows are far apart in it.
    :param nearest: correlation of f at a row and at its most correlated other row, median over rows. Near 0, no row tells about
        another.
    :param are_data: whether the inputs are an argument of the model, unchanged.
    :param farthest: correlation of f at a row and at its least correlated other row, the least of all. Near 1, f is one number.
    """

    spread: np.ndarray
    reach: np.ndarray
    nearest: float
    are_data: bool
    farthest: float = 0.0


def scales_of(f: GPFunction, X: Any, arguments: Mapping[str, Any]) -> Scales | None:
    """Measure rows of inputs; ``None`` for few rows or very many columns.

    :param f: the function.
    :param X: inputs, shape (N, D).
    :param arguments: arrays among the model's arguments, by name.
    """
    if np.ndim(X) != 2 or np.shape(X)[1] > MOST_COLUMNS:
        return None
    are_data = any(np.shape(a) == np.shape(X) and np.array_equal(a, X) for a in arguments.values())
    rng, rows = np.random.default_rng(0), np.unique(np.asarray(X), axis=0)
    if len(rows) < LEAST:
        return None
    spread, D = rows.std(0), rows.shape[1]
    rows = rows[rng.permutation(len(rows))[:OTHERS]]
    some = rows[:ROWS]
    changed = np.repeat(some[:, None], D, 1)  # (n, D, D)
    changed[:, np.arange(D), np.arange(D)] = np.roll(some, 1, 0)
    with_others, with_changed = jax.device_get(jax.jit(_correlations)(f, *map(jnp.asarray, (some, rows, changed))))
    nearest, farthest = float(np.median(with_others.max(-1))), float(np.where(with_others < -0.5, 1, with_others).min())
    return Scales(spread, np.median(with_changed, 0), nearest, are_data, farthest)


def _correlations(f: GPFunction, some: Array, rows: Array, changed: Array) -> tuple[Array, Array]:
    """Correlations of the first n rows with all rows, shape (n, N), and with themselves with one column changed, shape (n, D)."""
    n, D = some.shape
    flat = changed.reshape(-1, D)
    with_others = _correlation(f, some, rows).at[:, :n].add(-2.0 * jnp.eye(n, dtype=some.dtype))
    own = _correlation(f, some, flat).reshape(n, n, D)
    return with_others, own[jnp.arange(n), jnp.arange(n)]


def _correlation(f: GPFunction, A: Array, B: Array) -> Array:
    """The correlation, of several functions the largest; 1 where the prior has no variance."""
    a, b = f.kernel(A), f.kernel(B)
    scale = jnp.sqrt(a[..., :, None] * b[..., None, :])
    found = jnp.where(scale > 0, f.kernel(A, B) / jnp.where(scale > 0, scale, 1), 1)
    return jnp.abs(found).reshape(-1, len(A), len(B)).max(0)


def words_of_level(name: str, scales: Scales) -> str:
    """A sentence on a function that is the same number at all rows."""
    spread = ", ".join(f"{sd:.2g}" for sd in scales.spread[:5]) + (", ..." if len(scales.spread) > 5 else "")
    return (
        f"{name} is the same at all rows: even at those furthest apart its correlation is {scales.farthest:.6f}. Its lengthscales "
        f"are too long for these inputs, whose columns have standard deviations {spread}. Standardize the inputs, or start at "
        "lengthscales of that size (init.median_lengthscale)."
    )


def advice_on_scales(name: str, scales: Scales) -> Iterator[str]:
    """Sentences."""
    if not scales.are_data:
        return
    far, idle = np.flatnonzero(scales.reach < CUT), np.flatnonzero(scales.reach > IDLE)
    idle = idle[scales.spread[idle] > 0]
    if not len(far) or not len(idle):
        return
    a, b = far[scales.spread[far].argmax()], idle[scales.spread[idle].argmin()]
    if scales.spread[a] > APART * scales.spread[b]:
        yield (
            f"Columns of the inputs of {name} have very different scales, and its lengthscales have not followed. Column {a} has "
            f"standard deviation {scales.spread[a]:.2g}, and rows that differ in it are uncorrelated. Column {b} has "
            f"{scales.spread[b]:.2g}, and has no influence. Standardize them: X = (X - X.mean(0)) / X.std(0)."
        )
