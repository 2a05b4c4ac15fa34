"""Groups of rows in batches: batches of single rows that end with a few groups, and whether guide and batches agree.

Rows of a group have similar losses, so a batch of groups says less than one of rows from anywhere. What groups change in the
bound is one term of a sum, which few groups estimate well (``functions/groups.py``). So two endless sequences stand side by side:
single rows, and whole groups. In both the row at any position is uniformly distributed, which keeps losses unbiased.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from numpyro_orthgp.training.orders import Part, RowOrder, rows_between

__all__ = ["MixedOrder", "check_groups"]


class MixedOrder:
    """Batches of single rows from anywhere that end with a few whole groups. Both come in random orders of their own.

    :param group_size: rows of a group.
    :param num_groups: groups in a batch, of which single rows are the rest.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: tuple[int, ...], group_size: int, num_groups: int) -> None:
        self.batch_size, in_groups = batch_size, group_size * num_groups
        self.length = num_rows // batch_size * batch_size  # whole batches
        single = RowOrder(num_rows, batch_size - in_groups, seed)
        self.orders = single, RowOrder(num_rows, in_groups, (*seed, 1), group_size)

    def rows(self, part: Part) -> np.ndarray:
        start, stop = (part.epoch * self.length + position for position in (part.first, part.last))
        first, last = start // self.batch_size, -(-stop // self.batch_size)
        both = [rows_between(o, first * o.batch_size, last * o.batch_size) for o in self.orders]
        batches = np.concatenate([rows.reshape(last - first, -1) for rows in both], 1)
        return batches.ravel()[start - first * self.batch_size :][: stop - start]


def check_groups(svi: Any, batches: Any) -> None:
    """Warn if the batches have other groups than the guide.

    :param batches: has ``is_full``, ``is_stream``, ``group_size`` and ``num_groups``.
    :raises ValueError: if the guide expects a few groups at the end of each batch, and every step sees all rows.
    """
    guide: Any = getattr(svi, "guide", None)
    sizes, numbers = _numbers(guide, "group_size"), _numbers(guide, "num_groups")
    if numbers and batches.is_full:
        raise ValueError(
            f"The guide's `num_groups` = {numbers[0]} is for minibatches, whose last rows are groups, but each step sees all "
            "rows. Leave it out: then all rows are in groups."
        )
    if hasattr(guide, "num_groups") and not batches.is_stream and set(numbers) != {batches.num_groups} - {None}:
        warnings.warn(
            f"`num_groups` is {guide.num_groups} for the guide and {batches.num_groups} for `fit`. Give both the same number of "
            "groups that each batch ends with.",
            UserWarning,
            stacklevel=3,
        )
    if sizes and not batches.is_full and any(batches.group_size % size for size in sizes):
        size = min(sizes)
        if batches.is_stream:
            found = (
                "batches of a stream are taken as they come: the groups gain only if each batch consists of whole groups of "
                f"rows that are near each other, as init.groups(X, {size}) puts them."
            )
        else:
            found = (
                f"batches hold groups of {batches.group_size} rows: rows that are not near each other gain nothing. Sort the "
                f"data by init.groups(X, {size}) and say fit(..., group_size={size})."
            )
        warnings.warn(
            f"The guide tightens the residual in groups of {size} consecutive rows, but {found}",
            UserWarning,
            stacklevel=3,
        )


def _numbers(guide: Any, option: str) -> list[int]:
    """What the guide has for an option, for one gp or by name."""
    value = getattr(guide, option, None)
    return [n for n in (value.values() if isinstance(value, dict) else [value]) if isinstance(n, int)]
