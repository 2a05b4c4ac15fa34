"""Tables as they come: columns of numbers, of dates, and of text or categories."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import time
from decimal import Decimal
from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.foreign import as_numpy, filled
from numpyro_orthgp.tabular.dates import DATES, DURATIONS, as_durations, read_dates, start_of, unit_of, warn_of_zones
from numpyro_orthgp.tabular.rows import is_missing
from numpyro_orthgp.training.columns import is_lazy, rows_of

__all__ = ["Table", "level_of", "read_table", "refuse_unread"]

NUMBERS = Real | Decimal | np.number | np.bool_


@dataclass(frozen=True)
class Table:
    """
    :param names: names of the columns.
    :param values: values of each column: float64 with NaN where missing, ``datetime64``, or objects with None where missing.
    :param index: labels of the rows, or None.
    :param like: class of the user's table, which also makes the table of predictions; None for an array.
    :param units: what the entries of each column are beside numbers (``dates.unit_of``); empty for an array, which does not tell.
    """

    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    index: Any = None
    like: Any = None
    units: tuple[str | None, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.values[0])

    def rows(self, which: np.ndarray | slice) -> Table:
        """Some of the rows, without their labels."""
        return Table(self.names, tuple(values[which] for values in self.values), like=self.like, units=self.units)


def refuse_unread(X: Any) -> None:
    """
    :raises TypeError: for lazy tables and sparse matrices, which may be too large as a whole.
    """
    if remedy := "collect" if hasattr(X, "collect") else "toarray" if hasattr(X, "toarray") else "":
        what = "lazy" if remedy == "collect" else "sparse"
        raise TypeError(f"`X` must be a table or an array; got {type(X).__name__}, which is {what}. Pass X.{remedy}().")


def read_table(X: Any) -> Table:
    """Columns of a pandas, polars or arrow table, or of an array of shape (N,) or (N, D). There may be no rows. A series is a table
    of one column; if it has no name it is known by its place, as columns of arrays are.

    :raises TypeError: for other types, and for columns of objects that are not text.
    :raises ValueError: for a table without columns, two columns with the same name, and infinite numbers.
    """
    X = X.to_pandas() if hasattr(X, "column_names") else X  # arrow's
    is_series = hasattr(X, "to_frame") and not hasattr(X, "columns")
    is_named = not is_series or getattr(X, "name", None) not in (None, "")
    X = X.to_frame() if is_series else X
    if not hasattr(X, "collect") and hasattr(X, "columns") and hasattr(X, "shape"):
        names = [str(name) for name in X.columns] if is_named else ["x0"]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"`X` has more than one column of the name {twice[0]!r}: give each a name of its own.")
        values = tuple(_column(name, X[key]) for name, key in zip(names, X.columns, strict=True))
        units = tuple(unit_of(X[key]) for key in X.columns)
        table = Table(tuple(names), values, getattr(X, "index", None), type(X) if is_named else None, units)
    else:
        refuse_unread(X)
        X = rows_of(X) if is_lazy(X) else as_numpy("X", X)
        array = np.asarray(filled(X))
        if array.dtype.kind in "mM":
            array = read_dates(array) if array.dtype.kind == "M" else as_durations(array)
        elif array.dtype.kind not in "biuf" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"`X` must be numbers, or a pandas or polars table; got {type(X).__name__} of {array.dtype}. An array has one "
                "kind of column: for text and categories pass a table, pandas.DataFrame(X), whose columns have dtypes of their own."
            )
        if array.ndim not in (1, 2):
            raise ValueError(f"`X` must have shape (N, D), one row per case; got {array.shape}.")
        array = array if array.dtype.kind == "M" else array.astype(float)
        array = array[:, None] if array.ndim == 1 else array
        table = Table(tuple(f"x{d}" for d in range(array.shape[1])), tuple(array.T))
    if not table.names:
        raise ValueError("`X` must have at least one column.")
    for name, column in zip(table.names, table.values, strict=True):
        if column.dtype.kind == "f" and np.isinf(column).any():
            raise ValueError(f"Column {name!r} of `X` has infinite entries. Make them missing (NaN), or finite.")
    return table


def _column(name: str, column: Any) -> np.ndarray:
    """Numbers and durations as float64, dates as ``datetime64``, categories as objects."""
    dtype = str(column.dtype)
    if "time_zone" in dtype:  # of polars, whose arrays have universal time
        column = column.dt.replace_time_zone(None)
    kind = getattr(column.dtype, "kind", "O")  # of pandas, whatever holds the numbers: arrow's "double", sparse ones
    if kind == "c":
        raise _complex(name)
    of_ranges = dtype.startswith("interval")
    if kind in "biuf" or (not of_ranges and dtype.lower().startswith(("int", "uint", "float", "bool", "decimal"))):
        values = np.asarray(column.to_numpy())
        return values.astype(float) if values.dtype.kind in "biuf" else np.array([_number(v) for v in values])
    values = np.asarray(column.to_numpy())
    if values.dtype.kind in "mM":
        return read_dates(values) if values.dtype.kind == "M" else as_durations(values)
    values = np.array([None if is_missing(v) else start_of(v) for v in values], object)
    if any(isinstance(v, complex | np.complexfloating) for v in values):
        raise _complex(name)
    if _holds_only(values, bool | np.bool_) or (dtype == "object" and _holds_only(values, NUMBERS)):
        return np.array([_number(v) for v in values])
    for kinds, read in ((DATES, read_dates), (DURATIONS, as_durations)):
        if _holds_only(values, kinds):
            warn_of_zones(name, values)
            return read(values)
    strange = [
        v for v in values if isinstance(v, bytes) or not (v is None or isinstance(v, str | np.generic | NUMBERS))
    ]
    if strange and not (of_ranges or dtype == "category"):
        raise _strange(
            name, strange[0], next((v for v in values if v is not None and type(v) is not type(strange[0])), None)
        )
    return np.array([None if v is None else level_of(v) for v in values], object)


def _strange(name: str, value: Any, other: Any) -> TypeError:
    """
    :param other: an entry of another type, if the column has one.
    """
    beside = "" if other is None else f" beside {type(other).__name__}"
    remedies: tuple[tuple[Any, str], ...] = (
        (bytes, f"Decode them: table[{name!r}].str.decode('utf-8')."),
        (
            DATES,
            f"pandas.to_datetime(table[{name!r}], errors='coerce') makes dates of all, missing ones where it cannot.",
        ),
        (time, "Pass times of the day as numbers of hours."),
        (list | tuple | dict | np.ndarray, "Give each of their entries a column of its own."),
    )
    remedy = next((words for kinds, words in remedies if isinstance(value, kinds)), "Pass text or numbers that say it.")
    return TypeError(
        f"Column {name!r} of `X` holds {type(value).__name__}{beside}; columns are numbers, dates, text or categories. {remedy}"
    )


def _complex(name: str) -> TypeError:
    return TypeError(f"Column {name!r} of `X` holds complex numbers. Pass real and imaginary parts as columns.")


def _holds_only(values: np.ndarray, kinds: Any) -> bool:
    """Whether all entries that are not missing are of these kinds. If all are missing, they are."""
    return all(v is None or isinstance(v, kinds) for v in values)


def level_of(value: Any) -> str:
    """A category as text, without surrounding spaces; whole numbers as integers."""
    is_whole = isinstance(value, float | np.floating) and value == np.floor(value)
    return str(int(value)) if is_whole and np.isfinite(value) else str(value).strip()


def _number(value: Any) -> float:
    try:
        return np.nan if type(value).__name__ == "NAType" or value is None else float(value)
    except OverflowError:  # of Python's integers
        return np.inf
