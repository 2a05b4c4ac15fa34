"""What the distribution of new outputs about their means is fitted to: distances from predictions that do not know the outputs.

Where some rows are harder than others one normal distribution is too wide for most and too narrow for a few: its 50 % intervals
hold two thirds of what comes. A Student t is taken where these distances ask for it (``diagnostics/tails.py``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["left_out"]

FOLDS = 5


def left_out(num_rows: int, distances: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Distances of rows from predictions without them, a fifth of the rows at a time.

    :param num_rows: N, in random order.
    :param distances: from rows to predict with and rows to predict, two arrays of positions, to standardized distances. It always
        gets as many of each, so that it is compiled once.
    """
    size, rows = num_rows // FOLDS, np.arange(num_rows)
    parts = [rows[k * size : (k + 1) * size] for k in range(FOLDS)]
    return np.concatenate([distances(np.setdiff1d(rows, part), part) for part in parts])
