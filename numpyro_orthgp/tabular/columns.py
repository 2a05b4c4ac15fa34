"""From the columns of a table to standardized numbers. The same rules serve new rows.

* A column of numbers or truth values is centred and divided by its standard deviation. Missing entries become the median. If
  entries are missing in training, a further column of -1 and 1 marks them; if they are in new rows only, a warning says so. A
  skewed column may be warped first (``warps``).
* A column of text or categories becomes one column for each of its most frequent levels: 1 at that level and -1 elsewhere. So two
  levels are about as far apart as two typical numbers. Other levels, missing ones and levels not seen in training have -1 in all
  of these columns. Two levels without missing entries need one column, in which unknown and missing ones are 0.
  If there are more levels, such as names, a level needs two rows, and one row in a thousand, for a column; and a further column
  holds what each level says of y (``level_means``).
* A column of dates, or of text that is dates of ISO 8601, becomes the number of days, and two columns for each period that they
  show: the day, the week, the year (``dates``).
* A column that is constant in training, or a copy of an earlier one, is left out.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpyro_orthgp.tabular.dates import as_days, dates_in_text, periods_in, places
from numpyro_orthgp.tabular.level_means import LEAST_OF_LEVEL, LevelMeans, by_frequency, level_means, warn_of_names
from numpyro_orthgp.tabular.meanings import is_number, warn_of_alike, warn_of_codes, warn_of_meanings, warn_of_missing
from numpyro_orthgp.tabular.rows import mean_and_sd, refuse_beyond, some, warn_of_rounded
from numpyro_orthgp.tabular.tables import Table, level_of, read_table
from numpyro_orthgp.tabular.warps import Warp, warp_of

__all__ = ["Column", "Columns", "Table", "read_table"]

MOST_LEVELS = 20  # levels of a category that get their own column
MOST_SEEN = 1000  # levels that are remembered
LEAST_SHARE = 0.001  # share of the rows that each of them needs if there are more


@dataclass(frozen=True)
class Column:
    """The encoding of one column.

    :param name: name of the column.
    :param levels: levels that have their own column; None for numbers. There are none if no entry is known or hardly one recurs.
    :param median: median of a column of numbers, which replaces missing entries.
    :param mean, scale: numbers are centred by the mean and divided by the scale.
    :param tells_missing: whether entries were missing in training. Of numbers a further column marks them.
    :param seen: all levels of training; None for numbers, and if there were more than 1000.
    :param means: means of the outputs, for categories with more levels than get a column; None for others, and if levels differ no
        more than by chance.
    :param warp: map of the numbers before they are centred; ``None`` for the numbers themselves.
    :param periods: for dates, the periods that they show; their numbers are days. ``None`` for others.
    :param unit: what entries are beside numbers: durations, or times of a zone.
    """

    name: str
    levels: tuple[str, ...] | None = None
    median: float = 0.0
    mean: float = 0.0
    scale: float = 1.0
    tells_missing: bool = False
    seen: tuple[str, ...] | None = None
    means: LevelMeans | None = None
    warp: Warp | None = None
    periods: tuple[str, ...] | None = None
    unit: str | None = None

    @classmethod
    def learn(cls, name: str, values: np.ndarray) -> Column:
        dates = dates_in_text(values) if values.dtype == object else values if values.dtype.kind == "M" else None
        if dates is not None:
            days = as_days(name, dates)
            column = cls.learn(name, days)
            return column if column.levels == () else replace(column, periods=periods_in(days))
        if values.dtype == object:
            levels, counts, codes = by_frequency(values)
            if len(levels) > MOST_LEVELS:
                warn_of_meanings(name, levels)
            warn_of_alike(name, [level for level, num in zip(levels, counts, strict=True) if num >= LEAST_OF_LEVEL])
            two = len(levels) == 2 and (codes >= 0).all()  # one column tells them apart
            most = 1 if two else MOST_LEVELS
            if len(levels) > MOST_LEVELS:
                most = min(most, int(np.sum(counts >= max(LEAST_OF_LEVEL, LEAST_SHARE * len(values)))))
            seen = tuple(levels) if len(levels) <= MOST_SEEN else None
            return cls(name, tuple(levels[:most]), tells_missing=any(v is None for v in values), seen=seen)
        known = values[np.isfinite(values)]
        if not len(known):
            return cls(name, (), seen=())
        warn_of_rounded(f"Column {name!r} of `X`", known)
        warn_of_codes(f"Column {name!r} of `X`", known)
        median = float(np.median(known))
        filled = np.where(np.isfinite(values), values, median)
        mean, spread = mean_and_sd(filled)
        # Equal numbers have no spread; rounding errors do not count.
        spread = spread if spread > np.finfo(float).eps * 8 * abs(median) else 0.0
        return cls(name, None, median, mean, spread or 1.0, len(known) < len(values))

    def warped(self, values: np.ndarray) -> Column:
        """The encoding with a map of skewed numbers; the same if there are none."""
        warp = warp_of(values) if self.levels is None and self.periods is None else None
        if warp is None:
            return self
        x = warp(np.where(np.isfinite(values), values, self.median))
        return replace(self, warp=warp, mean=float(x.mean()), scale=float(x.std()))

    def encode(self, values: np.ndarray) -> list[np.ndarray]:
        """Columns of approximately standardized numbers, shape (N,) each."""
        if self.levels is not None:
            if not self.levels and self.means is None:
                return []
            values = self.levels_of(values)
            codes = [2 * np.array([v == level for v in values], float) - 1 for level in self.levels]
            seen = self.warn_of_unseen(values)
            if seen is not None and self.tells_two:  # unknown ones are in the middle of the two
                codes = [np.where(seen, codes[0], 0.0)]
            return codes if self.means is None else codes + self.means.encode(values)
        return self.standardized(self.numbers_of(values))

    def numbers_of(self, values: np.ndarray) -> np.ndarray:
        """Entries as numbers, dates as days; NaN where missing.

        :raises TypeError: for entries of another kind than in training.
        """
        if self.periods is not None:
            return as_days(self.name, values)
        if values.dtype.kind != "f":
            what = "text or categories" if values.dtype == object else "dates"
            raise TypeError(f"Column {self.name!r} was numbers in training, and holds {what} now.")
        return values

    def standardized(self, numbers: Any, xp: Any = np) -> list[Any]:
        """Numbers, NaN where missing, as the model sees them: the columns of this column, shape (N,) each."""
        missing = ~xp.isfinite(numbers)
        filled = xp.where(missing, self.median, numbers)
        x = filled if self.warp is None else self.warp(filled, xp)
        marks = [xp.where(missing, 1.0, -1.0)] if self.tells_missing else []
        return [(x - self.mean) / self.scale, *places(filled, self.periods or (), xp), *marks]

    def levels_of(self, values: np.ndarray) -> np.ndarray:
        """Entries as levels, also where codes came as numbers; None where missing.

        :raises TypeError: for numbers, if levels are none.
        """
        if values.dtype == object:
            return values
        self._check_codes(values)
        return np.array([None if v != v else level_of(v) for v in values], object)

    @property
    def known(self) -> tuple[str, ...]:
        """Levels with a column or a mean, most frequent first; arrays for exported programs hold positions among them."""
        return (self.levels or ()) if self.means is None else self.means.levels

    @property
    def lumps(self) -> bool:
        """Whether it is a category with more levels than get a column."""
        return self.levels is not None and (self.seen is None or len(self.seen) > MOST_LEVELS)

    @property
    def tells_two(self) -> bool:
        """Whether one column tells two levels apart: no entry was missing in training."""
        return self.seen is not None and len(self.seen) == 2 and len(self.levels or ()) == 1

    def check_unit(self, unit: str | None, values: np.ndarray) -> None:
        """
        :raises TypeError: for durations where training had numbers, and the reverse; other zones are a warning.
        """
        if unit == self.unit or self.levels is not None:
            return
        if self.periods is None and values.dtype.kind == "f" and np.isfinite(values).any():
            raise TypeError(
                f"Column {self.name!r} of `X` was {self.unit or 'numbers'} in training, and holds {unit or 'numbers'} now. "
                "Durations are taken as days: pandas.to_timedelta(numbers, unit='h') makes them of hours."
            )
        if unit and self.unit:
            warnings.warn(
                f"Column {self.name!r} of `X` held {self.unit} in training, and holds {unit} now, and all are taken as their "
                f"clocks show. Convert them, in pandas by table[{self.name!r}].dt.tz_convert("
                f"{self.unit.removeprefix('times of ')!r}).",
                stacklevel=2,
            )

    def warn_of_unseen(self, values: np.ndarray) -> np.ndarray | None:
        """Whether training had each of these levels, shape (N,); ``None`` if it had more than are remembered."""
        if self.seen is None:
            return None
        known = frozenset(self.seen)
        seen, missing = np.array([(v in known, v is None) for v in values], bool).reshape(-1, 2).T
        self._say_unseen(values[~seen & ~missing])
        return seen

    def _say_unseen(self, values: np.ndarray) -> None:
        if not len(values):
            return
        levels = [str(v) for v in np.unique(values.astype(str))]
        what = "lie between the two levels" if self.tells_two else "count as none of the levels that are told apart"
        warnings.warn(
            f"Column {self.name!r} of `X` holds {some(map(repr, levels), 3)} in {len(values)} rows, which training did not have: "
            f"these rows {what}, and predictions for them may be far off.",
            stacklevel=2,
        )

    def _check_codes(self, values: np.ndarray) -> None:
        known, of_dates = values[np.isfinite(values)], values.dtype.kind == "M"
        if len(known) and self.levels and (of_dates or not any(map(is_number, self.levels))):
            found = f"dates now, {known[0]}" if of_dates else f"numbers now, {known[0]:g}"
            raise TypeError(f"Column {self.name!r} was text or categories in training, and holds {found} for one.")

    def names(self) -> list[str]:
        if self.levels is not None:
            num = 0 if self.means is None else len(self.means.values)
            means = [f"{self.name}: mean of y" + (f" {i}" if num > 1 else "") for i in range(num)]
            return [f"{self.name}={level}" for level in self.levels] + means
        of_periods = [f"{self.name}: {period}, {of}" for period in self.periods or () for of in ("cosine", "sine")]
        return [self.name, *of_periods, *([f"{self.name} is missing"] if self.tells_missing else [])]


@dataclass(frozen=True)
class Columns:
    """The encoding of a table.

    :param columns: encodings of the table's columns.
    :param kept: positions of the encoded columns that are used: not constant in training, and no copy of an earlier one.
    """

    columns: tuple[Column, ...]
    kept: tuple[int, ...]

    @classmethod
    def learn(cls, table: Table, outputs: np.ndarray, seed: int = 0) -> tuple[Columns, np.ndarray]:
        """The encoding, and the rows of training as standardized numbers, shape (N, D).

        :param outputs: outputs for the means of levels, shape (N, K).
        :param seed: seed of the parts of the rows that have means in common.
        :raises ValueError: if every column is constant.
        """
        columns: list[Column] = []
        encoded: list[np.ndarray] = []
        units = table.units or [None] * len(table.names)
        for name, values, unit in zip(table.names, table.values, units, strict=True):
            column = replace(Column.learn(name, values), unit=unit)
            of_column = column.encode(values)
            if values.dtype.kind == "f" and outputs.shape[1] == 1:
                warn_of_names(name, values, outputs[:, 0], MOST_LEVELS + 1)
            found = level_means(values, outputs, seed) if column.lumps else None
            if found is not None:
                column = replace(column, means=found[0])
                of_column += found[1]
            columns.append(column)
            encoded += of_column
        kept: list[int] = []
        seen: set[bytes] = set()
        for i, x in enumerate(encoded):
            rounded, mirrored = ((np.round(v, 9) + 0.0).tobytes() for v in (x, -x))  # + 0.0: no zero is negative
            if np.ptp(x) > 0 and rounded not in seen and mirrored not in seen:
                kept.append(i)
                seen.add(rounded)
        if not kept:
            raise ValueError(
                "All columns of `X` are constant, or text whose entries hardly recur, so nothing can be learned from them."
            )
        return cls(tuple(columns), tuple(kept)), np.stack([encoded[i] for i in kept], -1)

    def warped(self, table: Table, X: np.ndarray, order: np.ndarray) -> tuple[Columns, np.ndarray | None]:
        """The encoding with maps of skewed columns, and the rows of training; ``None`` for these if no column is skewed.

        :param table: the table that this encoding was learned from.
        :param X: its rows as standardized numbers, shape (N, D), in the order ``order``.
        """
        columns, X, first = list(self.columns), X.copy(), 0
        for i, (column, values) in enumerate(zip(self.columns, table.values, strict=True)):
            if first in self.kept and (new := column.warped(values)) is not column:
                columns[i], X[:, self.kept.index(first)] = new, new.encode(values)[0][order]
            first += len(column.names())
        return replace(self, columns=tuple(columns)), None if columns == list(self.columns) else X

    def encode(self, table: Table) -> np.ndarray:
        """Standardized numbers, shape (N, D).

        :raises ValueError: if the table's columns are not those of training, and for numbers too far from these.
        """
        with np.errstate(over="ignore"):
            encoded = self._all(self.ordered(table))
        X = np.stack([encoded[i] for i in self.kept], -1)
        refuse_beyond(self.names, X)
        return X

    def ordered(self, table: Table) -> Table:
        """The columns of training, in their order.

        :raises ValueError: if the table's columns are others.
        """
        known = [column.name for column in self.columns]
        if len(table.names) != len(known):
            is_row = table.index is not None and set(known) <= set(map(str, table.index))
            row = " One row of a table is table.iloc[[i]], with two brackets." if is_row else ""
            raise ValueError(
                f"`X` must have the {len(known)} columns of training, {some(known)}; got {some(table.names)}.{row}"
            )
        order = range(len(known))
        if table.like is not None:
            lacking = [name for name in known if name not in table.names]
            if lacking:
                raise ValueError(f"`X` lacks {some(lacking)}, of the columns of training; it has {some(table.names)}.")
            order = [table.names.index(name) for name in known]  # type: ignore[assignment]
            for column, i in zip(self.columns, order, strict=True):
                column.check_unit(table.units[i], table.values[i])
        values = tuple(table.values[i] for i in order)
        for i in sorted(set(self.sources.tolist())):
            column = self.columns[i]
            if not column.tells_missing:
                warn_of_missing(column.name, values[i], column.levels is not None and not column.tells_two)
        return Table(tuple(known), values)

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
        names = [c.name for c in self.columns if c.levels == () and c.seen != () and c.means is None]
        left = [column.name for i, column in enumerate(self.columns) if i not in used and column.name not in names]
        missing = [column.name for column in self.columns if column.tells_missing and column.levels is None]
        coded = [f"{c.name} ({len(c.levels)})" for c in self.columns if c.levels]
        means = [f"{c.name} ({len(c.means.levels)})" for c in self.columns if c.means is not None]
        dates = [f"{c.name} ({', '.join(c.periods) or 'no period'})" for c in self.columns if c.periods is not None]
        found = [
            ("constant or copies, left out", left),
            ("text whose entries hardly recur, left out", names),
            ("skewed, as arcsinh((x - loc) / scale)", [c.name for c in self.columns if c.warp is not None]),
            ("dates, as days and as points in periods", dates),
            ("missing entries are medians, with a column that tells which", missing),
            ("categories, columns of -1 and 1 (levels)", coded),
            ("categories, means of y by level, from other rows (levels)", means),
        ]
        return [f"{what}: {some(those, 6)}" for what, those in found if those]
