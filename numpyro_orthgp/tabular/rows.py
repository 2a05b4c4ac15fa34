"""The rows of a table that a fit uses, and their order."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from numpyro_orthgp.foreign import as_numpy, check_labels_of_rows
from numpyro_orthgp.tabular.meanings import warn_of_codes, warn_of_far
from numpyro_orthgp.training.columns import is_lazy, rows_of

__all__ = [
    "FEW", "LEAST_ROWS", "as_floats", "is_missing", "mean_and_sd", "observed_counts", "observed_numbers", "one_column", "order_of",
    "order_of_classes", "positive_column", "refuse_beyond", "series_of", "some", "warn_of_copies", "warn_of_rounded",
]  # fmt: skip

LEAST_ROWS = 10
BEYOND = 1e150  # standard deviations whose squares are hardly numbers of float64
COARSE = 2.0**-20  # steps of float64, relative to the standard deviation, from which rounding is said
MOST_HELD, LEAST_HELD = 1000, 10  # rows that are held out, if there are enough
FEW = 4 * LEAST_HELD  # rows below which there are not
COPIES = 0.05  # share of the rows that are copies, from which it is said
AGREE, BY_CHANCE = 0.9, 0.1  # shares of equal outputs where inputs recur, and where they do not


def one_column(y: Any, num_rows: int, name: str = "y", index: Any = None) -> np.ndarray:
    """Outputs as an array of shape (N,), with None where a masked array is masked.

    :param index: labels of the rows of X, if X has any.
    :raises TypeError: for sparse arrays, and tensors that NumPy cannot read.
    :raises ValueError: if there is not one output for each row, or they have the labels of X in another order.
    """
    if hasattr(y, "toarray"):
        raise TypeError(f"`{name}` must be an array; got {type(y).__name__}, which is sparse. Pass {name}.toarray().")
    y = series_of(y)
    of_arrow = type(y).__module__.startswith("pyarrow")  # whose to_numpy refuses missing entries
    own = hasattr(y, "to_numpy") and not (of_arrow and hasattr(y, "__array__"))
    values = y.to_numpy() if own else rows_of(y) if is_lazy(y) else _without_mask(as_numpy(name, y))
    if values.dtype.kind in "US" and isinstance(y, list | tuple) and not all(isinstance(v, str | bytes) for v in y):
        values = np.array(y, object)  # NumPy writes numbers and NaN among text as text
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.shape != (num_rows,):
        more = " Fit each of its columns by itself." if values.ndim == 2 and len(values) == num_rows else ""
        if isinstance(y, str):
            more = f" The name of a column stands for none here: pass table[{y!r}], and X without it."
        elif not values.shape and values.dtype == object:
            more = f" A {type(y).__name__} is no array: pass a list or an array of its entries."
        raise ValueError(
            f"`{name}` must have shape ({num_rows},), one entry for each row of X; got {values.shape}.{more}"
        )
    check_labels_of_rows(name, getattr(y, "index", None), "X", index)
    return values


def series_of(y: Any) -> Any:
    """The column of a table that has one, with its dtype, which an array loses. Others stay as they are."""
    return y[y.columns[0]] if type(y).__name__ == "DataFrame" and len(y.columns) == 1 else y


def _without_mask(values: Any) -> np.ndarray:
    """An array. A masked one becomes an array of objects, with None where masked."""
    if not np.ma.is_masked(values):
        return np.asarray(values)
    known = np.ma.getdata(values).astype(object)
    known[np.ma.getmaskarray(values)] = None
    return known


def observed_numbers(y: Any, num_rows: int, index: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Observed outputs, float64, and a mask of their rows.

    :raises TypeError: if outputs are not numbers.
    :raises ValueError: for infinite, constant or too few outputs.
    """
    values = one_column(y, num_rows, index=index)
    if _is_of_truth(values):
        warnings.warn(
            "`y` holds truth values, which are taken for the numbers 0 and 1. For the probability of each use ogp.classification.",
            stacklevel=3,
        )
    values = _numbers("y", values, "Labels are for ogp.classification.")
    seen = ~np.isnan(values)
    if seen.sum() < LEAST_ROWS:
        raise ValueError(f"At least {LEAST_ROWS} outputs are needed; got {int(seen.sum())}.")
    warn_of_codes("`y`", values[seen])
    warn_of_far("`y`", np.flatnonzero(seen), values[seen])
    if np.ptp(values[seen]) <= np.finfo(float).eps * 8 * np.abs(np.median(values[seen])):
        rounded = " up to rounding errors" if np.ptp(values[seen]) else ""
        raise ValueError(f"All outputs are {values[seen][0]:g}{rounded}: there is nothing to learn.")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        sd = values[seen].std()
    if not 1e-150 < sd < 1e150:  # or squares are no numbers of float64
        raise ValueError(
            f"`y` lies between {values[seen].min():g} and {values[seen].max():g}, and its variance is no number of float64. Take "
            "another unit, or the logarithm."
        )
    return values[seen], seen


def observed_counts(y: Any, num_rows: int, index: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Observed counts, float64, and a mask of their rows.

    :raises TypeError: if they are not numbers.
    :raises ValueError: if numbers are not counts, are too few, or are all zero.
    """
    values = one_column(y, num_rows, index=index)
    if _is_of_truth(values):
        warnings.warn(
            "`y` holds truth values, which are taken for counts of 0 and 1. For the probability of each use ogp.classification.",
            stacklevel=3,
        )
    values = _numbers("y", values, "Labels are for ogp.classification.")
    seen = ~np.isnan(values)
    counts = values[seen]
    warn_of_codes("`y`", counts)
    if len(counts) < LEAST_ROWS:
        raise ValueError(f"At least {LEAST_ROWS} counts are needed; got {len(counts)}.")
    if (counts < 0).any():
        raise ValueError(
            f"Counts cannot be negative; got {counts.min():g}. For numbers of any kind use ogp.regression."
        )
    if (counts != np.round(counts)).any():
        bad = counts[counts != np.round(counts)][0]
        raise ValueError(
            f"Counts must be whole numbers; got {float(bad)!r}. A rate, a count per time or area, is given as the count and "
            "`exposure`, the time or area; numbers of any kind are for ogp.regression."
        )
    if not counts.any():
        raise ValueError("All counts are 0: there is nothing to learn.")
    return counts, seen


def _is_of_truth(values: np.ndarray) -> bool:
    kinds = {type(v) for v in values if not is_missing(v)}
    return values.dtype.kind == "b" or (bool(kinds) and kinds <= {bool, np.bool_})


def positive_column(name: str, values: Any, num_rows: int, index: Any = None) -> np.ndarray:
    """A positive number for each row, float64. ``None`` gives ones, and a scalar serves all rows.

    :raises TypeError: if values are not numbers.
    :raises ValueError: for another shape, and numbers that are missing, infinite or not positive.
    """
    if values is None or np.ndim(values) == 0:
        values = np.full(num_rows, 1.0 if values is None else values)
    numbers = _numbers(name, one_column(values, num_rows, name, index), "")
    if not (numbers > 0).all():
        bad = numbers[~(numbers > 0)][0]
        raise ValueError(f"`{name}` must be positive for each row; got {bad:g}. Leave out rows where it is not known.")
    return numbers


def is_missing(value: Any) -> bool:
    return (
        value is None
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float | np.floating) and value != value)
    )


def _numbers(name: str, values: np.ndarray, hint: str) -> np.ndarray:
    """Values as float64, NaN where missing; infinite ones are refused."""
    numbers = as_floats(name, values, hint)
    if np.isinf(numbers).any():
        raise ValueError(f"`{name}` has infinite entries. Make them missing (NaN), or finite.")
    warn_of_rounded(f"`{name}`", numbers)
    return numbers


def as_floats(name: str, values: np.ndarray, hint: str = "") -> np.ndarray:
    """Values as float64, NaN where missing.

    :raises TypeError: if they are no real numbers.
    """
    if values.dtype.kind in "mMc":  # NumPy would convert these to nanoseconds and to real parts
        raise TypeError(
            f"`{name}` must be real numbers; got {values.dtype}. Say what about it is meant, as numbers: days since a start, a "
            "duration in hours, a real part."
        )
    try:
        if values.dtype.kind in "biuf":
            numbers = values.astype(float)
        else:
            numbers = np.array([np.nan if is_missing(v) else v for v in values], float)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be numbers; got {values.dtype}, {values[:1].tolist()[0]!r} for one. {hint}".rstrip()
        ) from error
    return numbers


def mean_and_sd(x: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation, in a unit whose squares are numbers of float64."""
    largest = float(np.abs(x).max())
    unit = 2.0 ** np.floor(np.log2(largest)) if largest and not 1e-150 < largest < 1e150 else 1.0
    return unit * float((x / unit).mean()), unit * float((x / unit).std())


def warn_of_rounded(name: str, numbers: np.ndarray) -> None:
    """Warn if float64 does not tell apart what differs: beyond 2^53, such as in numbers of accounts, it has steps of 2 and more.

    :param numbers: float64, NaN where missing.
    """
    largest = float(np.nanmax(np.abs(numbers), initial=0.0))
    if largest <= 2**53:
        return
    step = float(np.spacing(largest))
    if step > COARSE * mean_and_sd(numbers[~np.isnan(numbers)])[1]:
        warnings.warn(
            f"{name} holds numbers as large as {largest:g}, which float64 tells apart only in steps of {step:g}: much of their "
            "differences is lost. Subtract an offset while they are integers; numbers that are names, such as those of accounts, "
            "become text.",
            UserWarning,
            stacklevel=2,
        )


def warn_of_copies(X: np.ndarray, y: np.ndarray, rows: np.ndarray) -> None:
    """Warn if many rows are copies of others: rows that are left out then have copies among the rest, and new rows may have none.

    Inputs may recur by chance, as categories do, and so may outputs that are rounded. Copies are rows that recur with their output,
    where rows of other inputs hardly have equal ones.

    :param X: standardized rows, shape (N, D).
    :param y: outputs, shape (N,).
    :param rows: their places in the user's table, shape (N,).
    """
    weights = np.random.default_rng(0).normal(size=X.shape[1])
    inputs = np.unique((X * weights).sum(-1), return_inverse=True)[1]  # no matrix product: equal rows have equal sums
    outputs = np.unique(y, return_inverse=True)[1]
    _, first, row, times = np.unique(
        inputs * (outputs.max() + 1) + outputs, return_index=True, return_inverse=True, return_counts=True
    )
    num, num_inputs = len(y) - len(first), len(y) - inputs.max() - 1  # rows that were seen before, and inputs that were
    by_chance = np.sum((np.bincount(outputs[first]) / len(first)) ** 2)
    if num >= COPIES * len(y) and num >= AGREE * num_inputs and by_chance <= BY_CHANCE:
        one = int(np.argmax(times))
        pair = rows[np.flatnonzero(row == one)[:2]]
        warnings.warn(
            f"{num} of {len(y)} rows are copies of others, in `X` and in `y`, such as rows {pair[0]} and {pair[1]}. Intervals are "
            "for new rows of which as many are copies, and too narrow for others. If copies came by a slip, such as a join, leave "
            "them out: table.drop_duplicates().",
            stacklevel=3,
        )


def refuse_beyond(names: list[str], X: np.ndarray) -> None:
    """
    :param names: names of the columns.
    :param X: standardized rows, shape (N, D).
    :raises ValueError: for numbers so far from those of training that predictions would be NaN.
    """
    beyond = np.argwhere(~(np.abs(X) < BEYOND))
    if len(beyond):
        row, column = beyond[0]
        raise ValueError(
            f"Column {names[column]!r} of `X` has a number in row {row} that is more than {BEYOND:g} standard deviations from "
            "those of training: squares of that are no numbers of float64. Make it missing (NaN) if it is none, or correct it."
        )


def some(names: Any, most: int = 12) -> str:
    """The first names, and how many there are more."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def order_of_classes(codes: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    """As :func:`order_of`, with the same share of each class held out. A class with four rows or more has at least one held out,
    and never all."""
    order, num_held = order_of(len(codes), seed)
    if not num_held:
        return order, 0
    held = np.zeros(len(codes), bool)
    for c in np.unique(codes):
        of_class = order[codes[order] == c]
        num = round(len(of_class) * num_held / len(codes))
        num = min(max(num, 1), len(of_class) - 1) if len(of_class) >= 4 else 0
        held[of_class[:num]] = True
    return np.concatenate([order[held[order]], order[~held[order]]]), int(held.sum())


def order_of(num_rows: int, seed: int, of_few: float = 0.0) -> tuple[np.ndarray, int]:
    """A random order of the rows, and how many of the first are held out: a tenth, at least 10 and at most 1000; of
    fewer than 40 rows this share."""
    num_held = min(max(num_rows // 10, LEAST_HELD), MOST_HELD)
    held = num_held if num_rows >= FEW else int(of_few * num_rows)
    return np.random.default_rng(seed).permutation(num_rows), held
