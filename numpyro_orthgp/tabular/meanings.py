"""Warnings of entries that mean something else than they are taken for: text that is numbers or dates of other forms than ISO 8601,
levels that differ only in how they are written, numbers that stand for missing entries, and slips of the pen."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

__all__ = ["alike", "is_number", "warn_of_alike", "warn_of_codes", "warn_of_far", "warn_of_meanings", "warn_of_missing"]

MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DATE = re.compile(
    rf"((\d{{1,4}}[-/. ]){{2}}\d{{1,4}}|(\d{{1,2}}[-/. ]*)?{MONTH}[-/. ]+(\d{{1,2}}[, ]+)?\d{{2,4}})([T ].*)?",
    re.IGNORECASE,
)
DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?")
QUANTITY = re.compile(
    r"([$€£¥₹]?) ?[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)? ?(%|‰|[$€£¥₹]|[a-zµ°²³/]{1,8})?", re.IGNORECASE
)
# What stands for missing entries: 9, 99, ..., 99.9, 999.99, and the largest or smallest numbers of a type, in units of float32.
NINES = [(10.0**digits - 1) / unit for unit in (1, 10, 100) for digits in range(1 if unit == 1 else 3, 7)]
LIMITS = [
    2.0**15,
    2.0**15 - 1,
    2.0**16 - 1,
    2.0**31,
    2.0**31 - 1,
    2.0**63,
    1e20,
    1e30,
    15 * 2.0**119,
]  # the last of netCDF
CODES = frozenset(
    np.float32(sign * size) for size in [*NINES, *LIMITS, float(np.finfo(np.float32).max)] for sign in (-1, 1)
)

FAR = 30.0  # ranges of all other outputs, from which an output is far from them
LEAST_FAR, MOST_FAR = 3, 1000  # how many may be so far, whatever a twentieth of the rows is


def _is_date(text: str) -> bool:
    return DATE.fullmatch(text) is not None


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_quantity(levels: list[str]) -> Callable[[str], bool]:
    """Whether text is a number with the sign or unit that most of the levels have."""
    units = [None if (match := QUANTITY.fullmatch(level)) is None else match.groups() for level in levels]
    most = Counter(unit for unit in units if unit is not None).most_common(1)
    known = {level for level, unit in zip(levels, units, strict=True) if most and unit == most[0][0]}
    return known.__contains__


def warn_of_meanings(name: str, levels: list[str]) -> None:
    """Warn if nearly all entries of a column of text are numbers or dates."""
    column = f"table[{name!r}]"
    meanings: list[tuple[str, Callable[[str], bool], str]] = [
        ("numbers", is_number, f"If it is a number, convert it: pandas.to_numeric({column}, errors='coerce')."),
        (
            "numbers with a decimal comma",
            lambda text: DECIMAL_COMMA.fullmatch(text) is not None,
            f"If it is a number, convert it: {column}.str.replace('.', '').str.replace(',', '.').astype(float).",
        ),
        (
            "numbers with signs or units",
            _is_quantity(levels),
            f"If it is a number, take these away: pandas.to_numeric({column}.str.replace('[^-.0-9]', '', regex=True)).",
        ),
        (
            "dates",
            _is_date,
            f"If it is a date, convert it: pandas.to_datetime({column}, errors='coerce'), with dayfirst=True for 31/12/2024.",
        ),
    ]
    for what, is_one, advice in meanings:
        others = [level for level in levels if not is_one(level)]
        if len(others) < 0.1 * len(levels):
            found = f" The others are {', '.join(map(repr, others[:3]))}." if others else ""
            warnings.warn(
                f"Column {name!r} is text, {len(levels) - len(others)} of whose {len(levels)} different entries are {what}, and "
                f"is taken for a category, whose levels have no order.{found} {advice}",
                stacklevel=2,
            )
            return


def _without_spaces(label: str) -> str:
    return "".join(label.split())


def _as_seen(label: str) -> str:
    """Without signs that are not seen, and what can be written in several ways in one of them."""
    seen = "".join(c for c in unicodedata.normalize("NFKC", label) if unicodedata.category(c) not in ("Cc", "Cf"))
    return _without_spaces(seen)


ALIKE: dict[str, Callable[[str], str]] = {
    "spaces": _without_spaces,
    "signs that look alike or are not seen": _as_seen,
    "upper and lower case": lambda label: _as_seen(label).casefold(),
}


def alike(labels: list[str]) -> Iterator[tuple[str, str, str]]:
    """Pairs of labels that are written in two ways, each with what they differ in."""
    for what, key in ALIKE.items():
        if what.endswith("case") and max(map(len, labels), default=0) < 2:  # letters
            continue
        found: dict[str, str] = {}
        for label in labels:
            if (other := found.setdefault(key(label), label)) != label:
                yield what, other, label
        labels = list(found.values())


def warn_of_alike(name: str, levels: list[str]) -> None:
    """Warn once of levels of a column that are written in two ways."""
    pairs = list(alike(levels))
    if pairs:
        what, level, other = pairs[0]
        more = f", the first of {len(pairs)} such pairs" if len(pairs) > 1 else ""
        warnings.warn(
            f"Levels {level!a} and {other!a} of column {name!r} differ only in {what}, and count as two{more}. If they are the "
            "same, write them in one way.",
            stacklevel=2,
        )


def warn_of_codes(name: str, numbers: np.ndarray) -> None:
    """Warn of -999, 9999.9 and the like if they recur and are further from all other numbers than these are from each other.

    :param numbers: without missing ones, shape (N,).
    """
    values, counts = np.unique(numbers, return_counts=True)
    if len(values) < 4:
        return
    for end, others in ((0, values[1:]), (-1, values[:-1])):
        code = float(values[end])
        if _is_code(code) and counts[end] > 1 and abs(code - others[end]) > np.ptp(others):
            warnings.warn(
                f"{name} is {code:g} in {counts[end]} rows, far from all other numbers, {others[0]:g} to {others[-1]:g}. If that "
                "stands for a missing entry, make it NaN.",
                stacklevel=2,
            )


def warn_of_far(name: str, rows: np.ndarray, *numbers: np.ndarray) -> None:
    """Warn of outputs that are further from all others than ``FAR`` times the range of these, a twentieth of them at most.

    Of outputs whose tail is as heavy as 1 / y the largest is so far in 3 % of the tables, and of lighter tails hardly ever.

    :param rows: rows of the numbers in the user's table, shape (N,).
    :param numbers: outputs without missing ones, shape (N,), and what they may be measured in (rates beside counts): far in all.
    """
    far = np.logical_and.reduce([_are_far(x) for x in numbers])
    y, others = numbers[0][far], numbers[0][~far]
    is_said = len(y) > 1 and np.ptp(y) == 0 and _is_code(y[0])
    if len(y) and not is_said:
        more = "" if len(y) == 1 else f" (and {len(y) - 1} more)"
        warnings.warn(
            f"{name} is {y[0]:g} in row {rows[far][0]}{more}, far from all other numbers, {others.min():g} to {others.max():g}. "
            "One such row can spoil predictions for all others. If it is a slip, make it NaN; if not, such rows need a fit apart "
            "from the others.",
            stacklevel=2,
        )


def _are_far(x: np.ndarray) -> np.ndarray:
    """Which of the numbers are far, on one side or on both: as many as can be, and at most a twentieth."""
    order, num = np.argsort(x, kind="stable"), len(x)
    y, far = x[order], np.zeros(num, bool)
    most = min(max(LEAST_FAR, num // 20), MOST_FAR, (num - 1) // 2)
    with np.errstate(over="ignore"):  # gaps are infinite then
        gaps = np.diff(y)
        wide = gaps > FAR * (y[num - 1 - most] - y[most])  # few or none
        below, above = (np.r_[0, 1 + np.flatnonzero(ends)] for ends in (wide[:most], wide[::-1][:most]))
        first, last = below[:, None], num - 1 - above  # of all others
        least = FAR * (y[last] - y[first])
        apart = (np.r_[np.inf, gaps][first] > least) & (np.r_[gaps, np.inf][last] > least)
    differ = np.r_[0, np.cumsum(gaps > 0)]
    given = np.where(apart & (differ[last] - differ[first] > 1), first + above, 0)
    i, j = np.unravel_index(np.argmax(np.where(given > most, 0, given)), given.shape)
    if 0 < given[i, j] <= most:
        far[order[: below[i]]] = far[order[num - above[j] :]] = True
    return far


def _is_code(number: float) -> bool:
    with np.errstate(over="ignore"):
        return np.float32(number) in CODES or abs(number) == np.finfo(float).max


def warn_of_missing(name: str, values: np.ndarray, is_text: bool) -> None:
    """Warn of missing entries in new rows, of a column in which training had none.

    :param values: a column of a table, shape (N,).
    :param is_text: whether it has more than two levels, so that none of them is in the middle.
    """
    if is_text:
        what = "They count as none of the levels that are told apart, as if that"
    else:
        what = "The middle of the column takes its place as if it"
    gaps = [v is None for v in values] if values.dtype == object else values != values
    if num := int(np.sum(gaps)):
        warnings.warn(
            f"Column {name!r} of `X` has no entry in {num} rows, and in training none was missing. {what} had been "
            "seen, so predictions for these rows are too sure. Fill in what is known, leave the rows out, or fit rows of which "
            "some lack it too.",
            stacklevel=2,
        )
