"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["listed", "percent", "table"]


def percent(share: float) -> str:
    """0.931 as "93 %", with a digit more near 0 and 1; NaN as "-"."""
    if np.isnan(share):
        return "-"
    return f"{100 * share:.{0 if 0.1 <= share <= 0.99 or share in (0, 1) else 1}f} %"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column flush left, all others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first, others = widths[0], widths[1:]
    return [
        "  " + "  ".join([row[0].ljust(first), *(c.rjust(w) for c, w in zip(row[1:], others, strict=True))])
        for row in rows
    ]


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
