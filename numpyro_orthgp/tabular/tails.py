"""The distribution of new outputs about their means: normal, or a Student t where the data ask for it.

Where some rows are harder than others one normal distribution is too wide for most and too narrow for a few: its 50 % intervals
hold two thirds of what comes. What is fitted are the distances between outputs and the predictions of fits without them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

__all__ = ["fit_tails", "left_out"]

DEGREES = (3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)  # with three the variance is finite
ROUNDS = 100
FOLDS = 5
MUST_GAIN = 2.0  # nats of all rows, for two parameters


def fit_tails(z: np.ndarray) -> tuple[float, float]:
    """Degrees of freedom and scale of the most likely of some distributions of standardized distances.

    :param z: distances over the standard deviation that was predicted, shape (N,).
    :return: infinite and 1 for the standard normal distribution, which others must surpass by two nats.
    """
    best, chosen = float(stats.norm.logpdf(z).sum()) + MUST_GAIN, (np.inf, 1.0)
    for df in DEGREES:
        square = float(np.mean(z**2))
        for _ in range(ROUNDS):  # EM: rows far out have small weights
            square = float(np.mean((df + 1) / (df + z**2 / square) * z**2))
        value = float(stats.t.logpdf(z, df, scale=np.sqrt(square)).sum())
        if value > best:
            best, chosen = value, (df, float(np.sqrt(square)))
    return chosen


def left_out(num_rows: int, distances: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Distances of rows from predictions without them, a fifth of the rows at a time.

    :param num_rows: N, in random order.
    :param distances: from rows to predict with and rows to predict, two arrays of positions, to standardized distances. It always
        gets as many of each, so that it is compiled once.
    """
    size, rows = num_rows // FOLDS, np.arange(num_rows)
    parts = [rows[k * size : (k + 1) * size] for k in range(FOLDS)]
    return np.concatenate([distances(np.setdiff1d(rows, part), part) for part in parts])
