"""Dates as numbers: days since 1970, and where in the day, the week and the year a date lies.

A place in a period is a point on a circle, its cosine and sine. So the end of a year is next to the start of the following one, and
what recurs is also predicted for dates after those of training. Times are those of the clock at the place: zones are not converted.
"""

from __future__ import annotations

import re
import warnings
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np

__all__ = [
    "DATES",
    "DURATIONS",
    "as_days",
    "as_durations",
    "dates_in_text",
    "periods_in",
    "places",
    "read_dates",
    "start_of",
    "unit_of",
    "warn_of_zones",
]

PERIODS = {"time of day": 1.0, "day of the week": 7.0, "time of year": 365.2425}  # lengths in days
LEAST_PERIODS = 2  # that dates must cover
DENSE, SHARE = 0.1, 1 / 3  # quantile of the distances between dates that must be below this share of a period
DATES, DURATIONS = date | np.datetime64, timedelta | np.timedelta64
MOST_SUMMER = 1.0  # hours that a zone moves its clocks by
UNIT, DAY = "datetime64[us]", np.timedelta64(1, "D")
TEXT = re.compile(r"(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?)(Z|[+-]\d\d:?\d\d)?")  # ISO 8601


def read_dates(values: Any) -> np.ndarray:
    """Dates of any kind, None where missing, as ``datetime64[us]``, shape (N,).

    :raises ValueError: for years that these do not hold.
    """
    values = np.asarray(values)
    if values.dtype.kind != "M":
        return np.array([_read(v) for v in values], UNIT)
    found, years = values.astype(UNIT), values.astype("datetime64[Y]")
    wrapped = (found.astype("datetime64[Y]") != years) & ~np.isnat(values)
    if wrapped.any():
        raise ValueError(
            f"A date is in the year {years[wrapped][0]}; years up to 290,000 are possible. Is it a mistake?"
        )
    return found


def start_of(value: Any) -> Any:
    """The start of a month, or another period of pandas; other values as they are."""
    return value.to_timestamp() if hasattr(value, "to_timestamp") else value


def _read(value: Any) -> Any:
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


def dates_in_text(values: np.ndarray) -> np.ndarray | None:
    """Text and None as dates if all text is dates of ISO 8601, such as 2024-05-31 or 2024-05-31 12:30; otherwise ``None``."""
    found: list[str] = []
    for value in values:
        match = TEXT.fullmatch(value) if isinstance(value, str) else None
        if match is None and value is not None:
            return None
        found.append("NaT" if match is None else match[1])
    try:
        return np.array(found, UNIT) if any(v != "NaT" for v in found) else None
    except ValueError:  # such as month 13
        return None


def warn_of_zones(name: str, values: np.ndarray) -> None:
    """Warn of times of several zones in one column, as their clocks do not show what came first. Summer time is no other zone.

    :param values: dates, or text that is dates, in an array of objects; other arrays have one zone.
    """
    offsets = {_offset(v) for v in values} if values.dtype == object else set()
    hours = sorted(h for h in offsets if h is not None)
    if hours and hours[-1] - hours[0] > MOST_SUMMER:
        warnings.warn(
            f"Column {name!r} of `X` holds times of several zones, from {hours[0]:+g} to {hours[-1]:+g} hours from universal time, "
            f"and all are taken as their clocks show. Convert them to one zone: pandas.to_datetime(table[{name!r}], utc=True).",
            stacklevel=2,
        )


def _offset(value: Any) -> float | None:
    """Hours from universal time; None if the zone is not told."""
    if isinstance(value, datetime):
        offset = value.utcoffset()
        return None if offset is None else offset.total_seconds() / 3600
    zone = match[2] if isinstance(value, str) and (match := TEXT.fullmatch(value)) else None
    if zone is None or zone == "Z":
        return None if zone is None else 0.0
    return float(zone[0] + "1") * (int(zone[1:3]) + int(zone[-2:]) / 60)


def unit_of(column: Any) -> str | None:
    """What the entries of a table's column are beside numbers: "durations", or "times of" a zone that its dtype tells."""
    dtype = column.dtype
    holders = dtype, getattr(dtype, "pyarrow_dtype", None)
    zones = [getattr(holder, name, None) for holder in holders for name in ("tz", "time_zone")]
    zone = next((zone for zone in zones if zone is not None), None)
    if zone is not None:
        return f"times of {zone}"
    name = str(dtype).lower()
    objects = column if name == "object" else ()
    is_of_durations = name.startswith(("timedelta", "duration")) or any(isinstance(v, DURATIONS) for v in objects)
    return "durations" if is_of_durations else None


def as_durations(values: Any) -> np.ndarray:
    """Durations of any kind, None where missing, in days."""
    return np.asarray(values, "timedelta64[us]") / DAY


def as_days(name: str, values: np.ndarray) -> np.ndarray:
    """Dates of a column as days since 1970, NaN where missing, shape (N,).

    :raises TypeError: if they are not dates.
    """
    if values.dtype == object:
        known = [v for v in values if v is not None]
        found = dates_in_text(values) if known else np.full(len(values), "NaT", UNIT)
        if found is None:
            bad = next(v for v in known if dates_in_text(np.array([v], object)) is None)
            raise TypeError(f"Column {name!r} of `X` was dates in training, and holds {bad!r} now, which is no date.")
        warn_of_zones(name, values)
        values = found
    elif values.dtype.kind != "M":
        known = values[np.isfinite(values)]
        if len(known):
            raise TypeError(
                f"Column {name!r} of `X` was dates in training, and holds numbers now, {known[0]:g} for one."
            )
        return values
    return (values - np.datetime64(0, "D")) / DAY


def periods_in(days: np.ndarray) -> tuple[str, ...]:
    """Names of the periods that dates show: they cover at least two of them, and rows are not on a grid that is coarser.

    :param days: shape (N,), NaN where missing.
    """
    known = np.unique(days[np.isfinite(days)])
    if len(known) < 2:
        return ()
    span, gap = known[-1] - known[0], float(np.quantile(np.diff(known), DENSE))
    return tuple(name for name, days in PERIODS.items() if span >= LEAST_PERIODS * days and gap <= SHARE * days)


def places(days: Any, periods: tuple[str, ...], xp: Any = np) -> list[Any]:
    """Cosines and sines of the places in the periods, scaled to standard deviation one for dates everywhere, shape (N,) each."""
    found = []
    for name in periods:
        whole = xp.floor(days) if name == "day of the week" else days
        angle = 2 * np.pi * (whole / PERIODS[name] % 1.0)
        found += [2**0.5 * xp.cos(angle), 2**0.5 * xp.sin(angle)]
    return found
