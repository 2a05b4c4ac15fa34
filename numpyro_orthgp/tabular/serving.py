"""Export of a fit with ``jax.export``: a program for any number of rows that runs without this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from numpyro_orthgp.functions.neighbors import NeighborFunction
from numpyro_orthgp.tabular.columns import Column, Columns, Table
from numpyro_orthgp.tabular.settings import own_settings
from numpyro_orthgp.types import Array

__all__ = ["exported", "moments_at", "numbers_of", "standardized"]


def numbers_of(columns: Columns, table: Table) -> np.ndarray:
    """A table as the array for an exported program, shape (N, number of columns of the table). Numbers stay as they are, and dates
    become days since 1970. A level of a category becomes its position among the levels that have a column or a mean, or -1. If one
    column tells two levels apart, a level that is neither becomes NaN."""
    ordered = columns.ordered(table)
    return np.stack([_numbers(*pair) for pair in zip(columns.columns, ordered.values, strict=True)], -1)


def _numbers(column: Column, values: np.ndarray) -> np.ndarray:
    if column.levels is None:
        return column.numbers_of(values)
    position = dict.fromkeys(column.seen or (), -1) | {level: i for i, level in enumerate(column.known)}
    neither, levels = np.nan if column.tells_two else -1, column.levels_of(values)
    if column.known:
        column.warn_of_unseen(levels)
    return np.array([position.get(v, neither) for v in levels], float)


def standardized(columns: Columns, X: Array) -> Array:
    """:meth:`Columns.encode` for the array of :func:`numbers_of`, within a program."""
    encoded: list[Array] = []
    for column, values in zip(columns.columns, X.T, strict=True):
        if column.levels is not None:
            others = jnp.where(jnp.isnan(values), 0.0, -1.0) if column.tells_two else -1.0
            encoded += [jnp.where(values == i, 1.0, others) for i in range(len(column.levels))]
            if column.means is not None:
                place = jnp.where(values >= 0, values, len(column.known)).astype(int)
                encoded += [jnp.asarray([*means, 0.0])[place] for means in column.means.values]
            continue
        encoded += column.standardized(values, jnp)
    return jnp.stack([encoded[i] for i in columns.kept], -1)


def moments_at(f: Any, X: Array) -> tuple[Array, Array]:
    """Mean and variance of a function, within a program for any number of rows. With neighbours it takes one row at a time."""
    if not isinstance(f, NeighborFunction):
        marginals = f(X)
        return marginals.mean, marginals.variance

    def one(x: Array) -> tuple[Array, Array]:
        marginals = f(x[None])
        return marginals.mean[0], marginals.variance[0]

    return jax.lax.map(one, X)


def exported(
    program: Callable[..., dict[str, Array]], num_columns: int, num_more: int, platforms: Sequence[str] | None
) -> Any:
    """
    :param program: takes an array (B, num_columns) and further arrays (B,).
    :param num_more: number of further arrays.
    """
    (rows,) = export.symbolic_shape("rows")
    with own_settings():
        arguments = [jax.ShapeDtypeStruct((rows, num_columns), jnp.float64)]
        arguments += [jax.ShapeDtypeStruct((rows,), jnp.float64)] * num_more
        return export.export(jax.jit(program), platforms=platforms)(*arguments)
