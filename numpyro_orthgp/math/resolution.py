"""Finds numbers so far from zero that their dtype cannot resolve neighbours, such as unix seconds in float32."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from numpyro_orthgp.errors import is_concrete

__all__ = ["REMEDY", "Coarse", "coarse_columns", "warn_of_coarse", "warn_of_coarse_inputs", "warn_of_offset"]

MAX_ROWS = 2**20  # that are checked
FEW_ROWS = 2**14  # rows read from disk for the check
FAR = 4  # magnitude over range. Nearer to zero a shift gains nothing
FEW = 4  # dtype units between typical neighbours
SAME = 1024  # units of float64 within which values are one, up to rounding

OFFSET = 8e-6  # rounding of a mean, in standard deviations, from which on it is said

REMEDY = (
    "Subtract an offset and divide by a scale in NumPy's float64, before JAX casts them: X = (X - X.mean(0)) / X.std(0). Or use "
    "64-bit floats (numpyro.enable_x64())."
)


class Coarse(NamedTuple):
    """A column whose distinct values are hardly further apart than the dtype's unit. A shift would make the unit finer.

    :param column: its number; ``None`` if there is only one.
    :param num: number of rows.
    :param distinct: number of distinct values.
    :param magnitude: the largest absolute value.
    :param unit: distance between neighbouring numbers of the dtype there.
    """

    column: int | None
    num: int
    distinct: int
    magnitude: float
    unit: float

    def words(self, name: str, dtype: Any) -> str:
        """The finding, as a sentence without a full stop."""
        where = name if self.column is None else f"{name}, column {self.column}"
        found = "one value" if self.distinct == 1 else f"{self.distinct} distinct values"
        return (
            f"{where}: {self.num} rows hold {found}, since near {self.magnitude:.3g} the next number of {dtype} is "
            f"{self.unit:.2g} away"
        )


def coarse_columns(array: np.ndarray, given: np.ndarray | None = None) -> list[Coarse]:
    """The columns of an array that its dtype does not resolve.

    Repeated values alone are no problem: repeated measurements have them. A column is reported if its distinct values are only a
    few units of the dtype apart and far from zero compared with their range, or if it became one value. Whole numbers with a unit
    of at most 1 are accepted.

    :param array: the array that the model sees, shape (N,) or (N, ...). Only the first 2^20 rows are checked. Columns of other
        dtypes than NumPy's floating ones are not reported.
    :param given: the array before it was cast, if it is known.
    """
    if array.dtype.kind != "f" or not array.size:
        return []
    rows = array[:MAX_ROWS].reshape(len(array[:MAX_ROWS]), -1)
    low, high = rows.min(0).astype(float), rows.max(0).astype(float)
    magnitude = np.maximum(np.abs(low), np.abs(high))
    with np.errstate(invalid="ignore"):
        suspects = np.isfinite(magnitude) & (high > low) & (magnitude > FAR * (high - low))
        one = np.isfinite(magnitude) & (high == low) if given is not None else np.zeros(0, bool)
    found = []
    for column in np.flatnonzero(one):
        values = np.asarray(given)[:MAX_ROWS].reshape(len(rows), -1)[:, column].astype(float)
        if np.ptp(values) > SAME * np.spacing(np.abs(values).max()):
            number = int(column) if rows.shape[1] > 1 else None
            unit = float(np.spacing(rows[:1, column])[0])
            found.append(Coarse(number, len(rows), 1, float(magnitude[column]), abs(unit)))
    for column in np.flatnonzero(suspects):
        values = np.unique(rows[:, column])
        unit = float(np.spacing(np.abs(values).max()))
        whole = unit <= 1 and bool((values == np.round(values)).all())
        if np.median(np.diff(values.astype(float))) <= FEW * unit and not whole:
            number = int(column) if rows.shape[1] > 1 else None
            found.append(Coarse(number, len(rows), len(values), float(magnitude[column]), unit))
    return found


def warn_of_coarse_inputs(name: str, X: Any, given: Any) -> None:
    """Warn of inputs of a model, or of a bound, without :func:`~numpyro_orthgp.fit`, if their values are known.

    :param X: the array of JAX.
    :param given: what the user gave.
    """
    if not is_concrete(X) or not getattr(X, "is_fully_addressable", True):  # those of several processes are not here
        return
    given = given[:FEW_ROWS] if isinstance(given, np.ndarray) else None
    found = coarse_columns(np.asarray(X)[:FEW_ROWS], given)
    if found:
        warnings.warn(f"{found[0].words(f'`{name}`', X.dtype)}. {REMEDY}", UserWarning, stacklevel=4)


def warn_of_offset(name: str, y: Any, observed: Any = None) -> None:
    """Warn of outputs that lie many standard deviations from the prior's mean in a dtype with few digits, if values are known.

    A posterior mean is a difference of sums as large as they are, so it would have few digits of what varies.

    :param y: less the prior's mean, shape (N, D).
    :param observed: which outputs count, of a shape that broadcasts to it.
    """
    if not (is_concrete(y) and is_concrete(observed)) or not getattr(y, "is_fully_addressable", True):
        return
    values = np.asarray(y)[:FEW_ROWS].astype(float)
    if observed is not None:
        values = np.where(np.broadcast_to(np.asarray(observed)[:FEW_ROWS], values.shape), values, np.nan)
    for column in values.T:
        seen = column[np.isfinite(column)]
        mean, sd = (abs(seen.mean()), seen.std()) if seen.size > 1 else (0.0, 1.0)
        if sd > 0 and np.finfo(y.dtype).eps * mean > OFFSET * sd:
            warnings.warn(
                f"{name}: the mean is {mean:.3g} from that of the prior, {mean / sd:.2g} standard deviations of the outputs, so in "
                f"{y.dtype} rounding may move the posterior by as much as its uncertainty. Subtract the mean before the fit: "
                "y = y - y.mean(). Or use 64-bit floats (numpyro.enable_x64()).",
                UserWarning,
                stacklevel=4,
            )
            return


def warn_of_coarse(names: Sequence[str], arrays: Sequence[Any], dtypes: Sequence[Any]) -> None:
    """Warn of columns that are not resolved after arrays are cast to these dtypes."""
    for name, array, dtype in zip(names, arrays, dtypes, strict=True):
        if array.dtype.kind not in "fiu" or np.dtype(dtype).kind != "f":
            continue
        given = array[: MAX_ROWS if isinstance(array, np.ndarray) else FEW_ROWS]
        with np.errstate(over="ignore"):
            found = coarse_columns(given.astype(dtype, copy=False), given)
        if found:
            warnings.warn(f"{found[0].words(f'`{name}`', np.dtype(dtype))}. {REMEDY}", UserWarning, stacklevel=3)
