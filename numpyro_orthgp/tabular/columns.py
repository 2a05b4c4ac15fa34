"""From the columns of a table to standardized numbers. The same rules serve new rows.

* A column of numbers or truth values is centred and divided by its standard deviation. Missing entries become the median. If
  entries are missing in training, a further column of -1 and 1 marks them.
* A column of text or categories becomes one column for each of its most frequent levels: 1 at that level and -1 elsewhere. So two
  levels are about as far apart as two typical numbers. Other levels, missing ones and levels not seen in training have -1 in all
  of these columns. Two levels without missing entries need one column, in which unknown and missing ones are 0.
* A column that is constant in training, or a copy of an earlier one, is left out.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_orthgp.tabular.rows import is_missing
from numpyro_orthgp.training.columns import is_lazy, rows_of

__all__ = ["Column", "Columns", "Table", "read_table"]

MOST_LEVELS = 20  # levels of a category that get their own column
MOST_SEEN = 1000  # levels that are remembered


@dataclass(frozen=True)
class Table:
    """
    :param names: names of the columns.
    :param values: values of each column: float64 with NaN where missing, or objects with None where missing.
    :param index: labels of the rows, or None.
    :param like: class of the user's table, which also makes the table of predictions; None for an array.
    """

    names: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    index: Any = None
    like: Any = None

    @property
    def num_rows(self) -> int:
        return len(self.values[0])

    def rows(self, which: np.ndarray | slice) -> Table:
        """Some of the rows, without their labels."""
        return Table(self.names, tuple(values[which] for values in self.values), like=self.like)


def read_table(X: Any) -> Table:
    """Columns of a pandas or polars table, or of an array of shape (N,) or (N, D).

    :raises TypeError: for other types, and for columns of dates or of objects that are not text.
    :raises ValueError: for a table without rows or columns, two columns with the same name, and infinite numbers.
    """
    if hasattr(X, "columns") and hasattr(X, "shape"):
        names = [str(name) for name in X.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"`X` has more than one column of the name {twice[0]!r}: give each a name of its own.")
        values = tuple(_column(name, X[key]) for name, key in zip(names, X.columns, strict=True))
        table = Table(tuple(names), values, getattr(X, "index", None), type(X))
    else:
        X = rows_of(X) if is_lazy(X) else X
        array = X.astype(float).filled(np.nan) if np.ma.is_masked(X) and X.dtype.kind in "biuf" else np.asarray(X)
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"`X` must be numbers, or a pandas or polars table; got {type(X).__name__} of {array.dtype}. An array has one "
                "kind of column: for text and categories pass a table, pandas.DataFrame(X), whose columns have dtypes of their own."
            )
        if array.ndim not in (1, 2):
            raise ValueError(f"`X` must have shape (N, D), one row per case; got {array.shape}.")
        array = array.astype(float)[:, None] if array.ndim == 1 else array.astype(float)
        table = Table(tuple(f"x{d}" for d in range(array.shape[1])), tuple(array.T))
    if not table.names or not table.num_rows:
        raise ValueError("`X` must have at least one row and one column.")
    for name, column in zip(table.names, table.values, strict=True):
        if column.dtype.kind == "f" and np.isinf(column).any():
            raise ValueError(f"Column {name!r} of `X` has infinite entries. Make them missing (NaN), or finite.")
    return table


def _column(name: str, column: Any) -> np.ndarray:
    """Numbers as float64, categories as objects."""
    dtype = str(column.dtype)
    if dtype.lower().startswith(("datetime", "timedelta", "date", "duration", "time", "period")):
        raise TypeError(
            f"Column {name!r} of `X` holds dates ({dtype}). Say what about them matters, as numbers: days since a start, hour of "
            "the day, month."
        )
    kind = getattr(column.dtype, "kind", "O")  # of pandas, whatever holds the numbers: arrow's "double", sparse ones
    if kind == "c":
        raise TypeError(f"Column {name!r} of `X` holds complex numbers. Pass real and imaginary parts as columns.")
    if kind in "biuf" or dtype.lower().startswith(("int", "uint", "float", "bool", "decimal")):
        values = np.asarray(column.to_numpy())
        return values.astype(float) if values.dtype.kind in "biuf" else np.array([_number(v) for v in values])
    values = np.array([None if is_missing(v) else v for v in column.to_numpy()], object)
    if all(v is None or isinstance(v, bool | int | float | np.number | np.bool_) for v in values) and dtype == "object":
        return np.array([_number(v) for v in values])
    strange = [v for v in values if not (v is None or isinstance(v, str | bool | int | float | np.generic))]
    if strange:
        raise TypeError(
            f"Column {name!r} of `X` holds {type(strange[0]).__name__}; columns are numbers, text or categories."
        )
    return np.array([None if v is None else _level(v) for v in values], object)


def _level(value: Any) -> str:
    """A category as text, without surrounding spaces; whole numbers as integers."""
    is_whole = isinstance(value, float | np.floating) and value == np.floor(value)
    return str(int(value)) if is_whole and np.isfinite(value) else str(value).strip()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(value: Any) -> float:
    return np.nan if type(value).__name__ == "NAType" or value is None else float(value)


@dataclass(frozen=True)
class Column:
    """The encoding of one column.

    :param name: name of the column.
    :param levels: levels that have their own column; None for numbers.
    :param median: median of a column of numbers, which replaces missing entries.
    :param mean, scale: numbers are centred by the mean and divided by the scale.
    :param tells_missing: whether a further column marks missing entries.
    :param seen: all levels of training; None for numbers, and if there were more than 1000.
    """

    name: str
    levels: tuple[str, ...] | None = None
    median: float = 0.0
    mean: float = 0.0
    scale: float = 1.0
    tells_missing: bool = False
    seen: tuple[str, ...] | None = None

    @classmethod
    def learn(cls, name: str, values: np.ndarray) -> Column:
        if values.dtype == object:
            known = [v for v in values if v is not None]
            levels, counts = np.unique(np.asarray(known, str), return_counts=True)
            levels = levels[np.argsort(-counts, kind="stable")]
            _warn_of_numbers(name, levels)
            two = len(levels) == 2 and len(known) == len(values)  # one column tells them apart
            most = 1 if two else MOST_LEVELS
            names = tuple(str(v) for v in levels)
            return cls(name, names[:most], seen=names if len(names) <= MOST_SEEN else None)
        known = values[np.isfinite(values)]
        if not len(known):
            return cls(name)
        median = float(np.median(known))
        filled = np.where(np.isfinite(values), values, median)
        spread = float(filled.std())
        # Equal numbers have no spread; rounding errors do not count.
        spread = spread if spread > np.finfo(float).eps * 8 * abs(median) else 0.0
        return cls(name, None, median, float(filled.mean()), spread or 1.0, len(known) < len(values))

    def encode(self, values: np.ndarray) -> list[np.ndarray]:
        """Columns of approximately standardized numbers, shape (N,) each."""
        if self.levels is not None:
            if values.dtype != object:
                self._check_codes(values)
                values = np.array([None if v != v else _level(v) for v in values], object)
            codes = [2 * np.array([v == level for v in values], float) - 1 for level in self.levels]
            if self.seen is not None:
                unseen = np.array([v is not None and v not in self.seen for v in values], bool)
                self._warn_of_unseen(values[unseen])
                if len(self.levels) < len(self.seen) == 2:  # where no entry was missing: in the middle of the two
                    codes = [np.where([v in self.seen for v in values], codes[0], 0.0)]
            return codes
        if values.dtype == object:
            raise TypeError(f"Column {self.name!r} was numbers in training, and holds text or categories now.")
        missing = ~np.isfinite(values)
        numbers = (np.where(missing, self.median, values) - self.mean) / self.scale
        return [numbers, 2.0 * missing - 1] if self.tells_missing else [numbers]

    def _warn_of_unseen(self, values: np.ndarray) -> None:
        if not len(values):
            return
        levels = [str(v) for v in np.unique(values.astype(str))]
        between = self.seen is not None and len(self.seen) == 2 and len(self.levels or ()) == 1
        what = "lie between the two levels" if between else "count as none of the levels that are told apart"
        warnings.warn(
            f"Column {self.name!r} of `X` holds {_some(map(repr, levels), 3)} in {len(values)} rows, which training did not have: "
            f"these rows {what}, and predictions for them may be far off.",
            stacklevel=2,
        )

    def _check_codes(self, values: np.ndarray) -> None:
        known = values[np.isfinite(values)]
        if len(known) and not any(map(_is_number, self.levels or ())):
            raise TypeError(
                f"Column {self.name!r} was text or categories in training, and holds numbers now, {known[0]:g} for one."
            )

    def names(self) -> list[str]:
        if self.levels is not None:
            return [f"{self.name}={level}" for level in self.levels]
        return [self.name, f"{self.name} is missing"] if self.tells_missing else [self.name]


def _warn_of_numbers(name: str, levels: np.ndarray) -> None:
    """Warn if nearly all entries of a column of text are numbers, and there are more of them than levels with own columns."""
    numbers = sum(map(_is_number, levels.tolist()))
    if len(levels) > MOST_LEVELS and numbers > 0.9 * len(levels):
        others = [level for level in levels.tolist() if not _is_number(level)][:3]
        found = f" The others are {', '.join(map(repr, others))}." if others else ""
        warnings.warn(
            f"Column {name!r} is text, {numbers} of whose {len(levels)} different entries are numbers, and is taken for a "
            f"category: only the {MOST_LEVELS} most frequent are told apart.{found} If it is a number, convert it: "
            f"pandas.to_numeric(table[{name!r}], errors='coerce').",
            stacklevel=2,
        )


@dataclass(frozen=True)
class Columns:
    """The encoding of a table.

    :param columns: encodings of the table's columns.
    :param kept: positions of the encoded columns that are used: not constant in training, and no copy of an earlier one.
    """

    columns: tuple[Column, ...]
    kept: tuple[int, ...]

    @classmethod
    def learn(cls, table: Table) -> Columns:
        """
        :raises ValueError: if every column is constant.
        """
        columns = tuple(Column.learn(*pair) for pair in zip(table.names, table.values, strict=True))
        encoded = cls(columns, ())._all(table)
        kept: list[int] = []
        seen: set[bytes] = set()
        for i, x in enumerate(encoded):
            rounded = np.round(x, 9).tobytes()
            if np.ptp(x) > 0 and rounded not in seen and np.round(-x, 9).tobytes() not in seen:
                kept.append(i)
                seen.add(rounded)
        if not kept:
            raise ValueError("All columns of `X` are constant, so nothing can be learned from them.")
        return cls(columns, tuple(kept))

    def encode(self, table: Table) -> np.ndarray:
        """Standardized numbers, shape (N, D).

        :raises ValueError: if the table's columns are not those of training.
        """
        encoded = self._all(self.ordered(table))
        return np.stack([encoded[i] for i in self.kept], -1)

    def ordered(self, table: Table) -> Table:
        """The columns of training, in their order.

        :raises ValueError: if the table's columns are others.
        """
        known = [column.name for column in self.columns]
        if len(table.names) != len(known):
            raise ValueError(
                f"`X` must have the {len(known)} columns of training, {_some(known)}; got {_some(table.names)}."
            )
        order = range(len(known))
        if table.like is not None:
            lacking = [name for name in known if name not in table.names]
            if lacking:
                raise ValueError(
                    f"`X` lacks {_some(lacking)}, of the columns of training; it has {_some(table.names)}."
                )
            order = [table.names.index(name) for name in known]  # type: ignore[assignment]
        return Table(tuple(known), tuple(table.values[i] for i in order))

    def _all(self, table: Table) -> list[np.ndarray]:
        return [x for column, values in zip(self.columns, table.values, strict=True) for x in column.encode(values)]

    @property
    def names(self) -> list[str]:
        """Names of the encoded columns."""
        names = [name for column in self.columns for name in column.names()]
        return [names[i] for i in self.kept]

    @property
    def sources(self) -> np.ndarray:
        """For each encoded column, the position of its column in the table, shape (D,)."""
        sources = [i for i, column in enumerate(self.columns) for _ in column.names()]
        return np.asarray(sources)[list(self.kept)]

    def words(self) -> list[str]:
        """The steps beyond standardizing, one line for each kind."""
        used = set(self.sources.tolist())
        left = [column.name for i, column in enumerate(self.columns) if i not in used]
        missing = [column.name for column in self.columns if column.tells_missing]
        coded = [f"{c.name} ({len(c.levels)})" for c in self.columns if c.levels is not None]
        found = [
            ("constant or copies, left out", left),
            ("missing entries are medians, with a column that tells which", missing),
            ("categories, columns of -1 and 1 (levels)", coded),
        ]
        return [f"{what}: {_some(names, 6)}" for what, names in found if names]


def _some(names: Any, most: int = 12) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
