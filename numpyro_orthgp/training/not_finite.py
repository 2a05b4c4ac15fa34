"""Which row of the data a loss that is not finite comes from."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from numpyro_orthgp.training.local import Feed

__all__ = ["words_of_bad_rows"]


def words_of_bad_rows(feed: Feed, before: tuple[Any, int], at: tuple[Any, int] | None = None) -> str:
    """Which row of the data is not finite, to go on a sentence about a step; empty if none is.

    The loss of a batch with an infinite row may be finite, and its gradient not: then the next loss is NaN.

    :param before: batches of a call to the device, or ``None``, and which of them the step before saw.
    :param at: the same for the step itself; ``None`` if it is not known.
    """
    for which, of_step in (("its batch", at), ("the batch before", before)):
        if of_step is not None and of_step[0] is not None and (row := _bad_row(feed, *of_step)):
            return f", and {which} has NaN or infinity in {row}"
    return ""


def _bad_row(feed: Feed, batches: Any, index: int) -> str:
    for name, leaf in zip(feed.names, jax.tree.leaves(batches.data), strict=True):
        if not leaf.is_fully_addressable:
            break
        array = np.asarray(leaf if feed.is_full else leaf[index])
        bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))
        if bad.size:
            rows = batches.rows if feed.is_full or batches.rows is None else batches.rows[index]
            row = "a row" if rows is None else f"row {rows[bad[0]]}"
            return f"{row} of `{name}`"
    return ""
