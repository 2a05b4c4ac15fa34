"""Which rows are left out, so that what is predicted can be compared with what came.

Few rows are all left out, a fifth at a time, and the hyperparameters of each fifth are searched for among the others: they would
know too well what they have seen. What is learned of the distances between outputs and predictions is a factor of the noise, and
whether they are those of a normal distribution or of a Student t (``diagnostics/tails.py``).
"""

from __future__ import annotations

import numpy as np

__all__ = ["folds"]

FOLDS = 5


def folds(num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions of rows to predict with, and of rows to predict, a fifth of them at a time.

    All have the same size, so that programs are compiled once; up to four rows are never left out.

    :param num_rows: N, in random order.
    """
    size, rows = num_rows // FOLDS, np.arange(num_rows)
    parts = [rows[k * size : (k + 1) * size] for k in range(FOLDS)]
    return [(np.setdiff1d(rows, part), part) for part in parts]
