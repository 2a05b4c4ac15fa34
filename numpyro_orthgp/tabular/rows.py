"""Which rows of a table take part, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LEAST_ROWS", "observed_numbers", "one_column", "order_of"]

LEAST_ROWS = 10
MOST_HELD, LEAST_HELD = 1000, 10  # rows that are held out, if there are enough


def one_column(y: Any, num_rows: int) -> np.ndarray:
    """Outputs as an array of shape (N,).

    :raises ValueError: if they are not one for each row.
    """
    values = y.to_numpy() if hasattr(y, "to_numpy") else np.asarray(y)
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.shape != (num_rows,):
        raise ValueError(f"`y` must have shape ({num_rows},), one output for each row of X; got {values.shape}.")
    return values


def observed_numbers(y: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Outputs that are there, float64, and which rows these are.

    :raises TypeError: for what is not numbers.
    :raises ValueError: for infinite, constant or too few outputs.
    """
    values = one_column(y, num_rows)
    try:
        values = np.array([np.nan if v is None or type(v).__name__ == "NAType" else v for v in values], float)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`y` must be numbers; got {values.dtype}, {values[0]!r} for one. Labels and counts need "
            "a model by hand, with likelihoods.Bernoulli, Categorical or Poisson."
        ) from error
    if np.isinf(values).any():
        raise ValueError("`y` has infinite entries. Make them missing (NaN), or finite.")
    seen = ~np.isnan(values)
    if seen.sum() < LEAST_ROWS:
        raise ValueError(f"At least {LEAST_ROWS} outputs are needed; got {int(seen.sum())}.")
    if np.ptp(values[seen]) == 0:
        raise ValueError(f"All outputs are {values[seen][0]:g}: there is nothing to learn.")
    return values[seen], seen


def order_of(num_rows: int, seed: int) -> tuple[np.ndarray, int]:
    """A random order of the rows, and how many of the first are held out: a tenth, at least 10 and at most 1000."""
    num_held = min(max(num_rows // 10, LEAST_HELD), MOST_HELD)
    return np.random.default_rng(seed).permutation(num_rows), num_held if num_rows >= 4 * num_held else 0
