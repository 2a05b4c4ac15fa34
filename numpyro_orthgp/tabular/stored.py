"""Tables with so many rows that a fit searches in a random part of them, and tables that are read where rows are needed.

A search needs twenty rows an inducing point, so a part is enough for hyperparameters and points. For numbers all rows then come
in block by block, in one pass (:func:`~numpyro_orthgp.online.from_blocks`), so memory does not grow with the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.collapsed.blocks import RowSums, sums_of_blocks
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.columns import Columns
from numpyro_orthgp.tabular.points import Values, kernel_of
from numpyro_orthgp.tabular.tables import Table, read_table, refuse_unread
from numpyro_orthgp.training.columns import Column, is_lazy, rows_of

__all__ = ["MOST", "PART", "StoredTable", "all_rows", "part_of", "table_of"]

PART = 100_000  # rows for the searches, if there are more than MOST
MOST = 1_000_000  # rows that are used at once
BLOCK = 65_536  # rows that are read at once


@dataclass(frozen=True)
class StoredTable:
    """An array on disk as a table of numbers.

    :param array: memory-mapped, or of h5py, zarr or ``training.columns``, shape (N, D).
    """

    array: Any
    index = None

    @property
    def num_rows(self) -> int:
        return int(self.array.shape[0])

    def rows(self, which: np.ndarray | slice) -> Table:
        """Some of the rows, by sorted numbers or by a slice."""
        return read_table(rows_of(self.array, which))


def table_of(X: Any) -> Table | StoredTable:
    """The table; an array on disk is not read here if it has more than ``PART`` rows.

    :raises TypeError, ValueError: as :func:`~numpyro_orthgp.tabular.columns.read_table`, and without rows.
    """
    refuse_unread(X)
    if is_lazy(X):
        Column(X).check_stored("X")
    if not (is_lazy(X) or isinstance(X, np.memmap)) or len(X.shape) != 2 or X.shape[0] <= PART:
        table = read_table(X)
        if not table.num_rows:
            raise ValueError("`X` must have at least one row.")
        return table
    read_table(rows_of(X, slice(0, 1)))  # checks its dtype
    return StoredTable(X)


def part_of(table: Table | StoredTable, seen: np.ndarray, seed: int, num: int = PART) -> tuple[np.ndarray, np.ndarray]:
    """The rows that a fit uses at once: all with an output, or a random part of these.

    :param seen: whether a row has an output, shape (N,).
    :param num: number of rows of a part.
    :return: their numbers, sorted, and a mask of them among the rows with an output.
    """
    rows = np.flatnonzero(seen)
    part = np.ones(len(rows), bool)
    if len(rows) > (num if isinstance(table, StoredTable) else MOST):
        chosen = np.random.default_rng(seed).choice(len(rows), num, replace=False, shuffle=False)
        part = np.zeros(len(rows), bool)
        part[chosen] = True
    return rows[part], part


def all_rows(
    values: Values,
    Z: np.ndarray,
    part: tuple[np.ndarray, np.ndarray],
    table: Table | StoredTable,
    columns: Columns,
    outputs: np.ndarray,
    budget: Budget,
) -> RowSums:
    """The sums over the part and over the other rows, as many as can be read before the time is over.

    Blocks come in random order, so the rows of a pass that is not finished are much like all of them.

    :param part: encoded columns and standardized outputs of the part.
    :param outputs: standardized outputs of the other rows, shape (N,); NaN where missing, and for rows of the part.
    """

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield part
        starts = np.arange(0, len(outputs), BLOCK)
        for start in np.random.default_rng(0).permutation(starts).tolist():
            if not budget.allows(0.0):
                return
            y = outputs[start : start + BLOCK]
            X = _encoded(columns, table.rows(slice(start, start + len(y))))
            yield X[np.isfinite(y)], y[np.isfinite(y)]

    noise = jnp.asarray(values["noise"])
    return sums_of_blocks(partial(CollapsedGP, kernel_of(values), inducing=jnp.asarray(Z), noise_scale=noise), blocks())


def _encoded(columns: Columns, table: Table) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rare levels that are not in the part
        return columns.encode(table)
