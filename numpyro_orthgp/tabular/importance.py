"""Importance of a table's columns for predictions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numpyro_orthgp.tabular.columns import Columns

__all__ = ["importance_of"]

MOST_ROWS = 1000


def importance_of(mean: Callable[[np.ndarray], np.ndarray], X: np.ndarray, columns: Columns) -> dict[str, float]:
    r"""Total Sobol indices by exchange of columns, largest first.

    .. math:: T_d = \frac{E[(m(x) - m(x \text{ with column } d \text{ of } x'))^2]}{2 \mathrm{Var}\, m(x)}

    with x and x' two rows of the data (Jansen 1999). All encoded columns of one column of the table are exchanged together.

    :param mean: maps standardized columns (N, D) to (N,), or to (N, P) for several functions, which are weighted by variance.
    """
    X = X[:MOST_ROWS]
    other = np.roll(X, 1, axis=0)  # rows are in random order
    before = mean(X)
    variance = float(np.sum(before.var(axis=0)))
    found = dict.fromkeys((column.name for column in columns.columns), 0.0)
    for source in np.unique(columns.sources):
        here = columns.sources == source
        moved = mean(np.where(here, other, X)) - before
        found[columns.columns[source].name] = (
            float(np.sum((moved**2).mean(axis=0)) / (2 * variance)) if variance > 0 else 0.0
        )
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
