"""Warnings of text that means something else: numbers, and dates of other forms than ISO 8601, are categories if they are text."""

from __future__ import annotations

import re
import warnings

__all__ = ["is_number", "warn_of_meanings"]

MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DATE = re.compile(
    rf"((\d{{1,4}}[-/. ]){{2}}\d{{1,4}}|(\d{{1,2}}[-/. ]*)?{MONTH}[-/. ]+(\d{{1,2}}[, ]+)?\d{{2,4}})([T ].*)?",
    re.IGNORECASE,
)
DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?")


def _is_date(text: str) -> bool:
    return DATE.fullmatch(text) is not None


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def warn_of_meanings(name: str, levels: list[str]) -> None:
    """Warn if nearly all entries of a column of text are numbers or dates."""
    column = f"table[{name!r}]"
    meanings = [
        ("numbers", is_number, f"If it is a number, convert it: pandas.to_numeric({column}, errors='coerce')."),
        (
            "numbers with a decimal comma",
            lambda text: DECIMAL_COMMA.fullmatch(text) is not None,
            f"If it is a number, convert it: {column}.str.replace('.', '').str.replace(',', '.').astype(float).",
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
