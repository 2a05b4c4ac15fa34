"""Initial hyperparameters, in the units of standardized data.

One start is not enough: if 4 of 32 columns matter (pumadyn32nm), a fit from equal lengthscales explains everything as noise. The
second start uses the data: a column gets a short lengthscale if the mean or variance of y differs along it. If y varies faster than
both can see, such as a sine of many periods, both explain it as noise; then a third start has short lengthscales.
"""

from __future__ import annotations

import numpy as np

__all__ = ["WARPED", "relevance", "shorter", "starts"]

NUM_BINS = 10
EQUAL = "equal lengthscales"
WARPED = "skewed columns warped"
SHORT = 0.1  # lengthscales of the third start, relative to the first
LEAST = 0.1  # least share of the largest relevance for a column: none is ruled out


def relevance(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Relevance of each column: shares of the variances of y and of (y - mean)^2 between ten bins of the column, beyond chance.

    :param X: shape (N, D).
    :param y: shape (N,).
    :return: shape (D,), from 0 to 2.
    """
    centred = y - y.mean()
    return np.array([_between(x, centred) + _between(x, centred**2) for x in X.T])


def _between(x: np.ndarray, y: np.ndarray) -> float:
    """The correlation ratio, minus twice its expectation for an irrelevant x."""
    edges = np.unique(np.quantile(x, np.linspace(0, 1, NUM_BINS + 1)[1:-1]))
    group = np.searchsorted(edges, x, side="right")
    counts = np.bincount(group)
    sums = np.bincount(group, y)
    used, variance = counts > 0, y.var()
    if variance == 0:
        return 0.0
    between = np.sum(counts[used] * (sums[used] / counts[used] - y.mean()) ** 2) / (len(y) * variance)
    return float(max(between - 2 * (used.sum() - 1) / len(y), 0.0))


def starts(X: np.ndarray, *outputs: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Initial values of the kernel's hyperparameters, by name of the start.

    :param outputs: outputs for the relevance of columns, shape (N,) each: y, or a truth value for each class.
    """
    D = X.shape[1]
    equal = np.full(D, D**0.5)
    weight = np.sqrt(sum(y.var() * relevance(X, y) for y in outputs))
    weight = np.clip(weight / (weight.max() or 1.0), LEAST, 1.0)
    common = {"scale": np.array(1.0), "slope": np.array(0.3)}
    by_relevance = np.sqrt(np.sum(weight**2)) / weight
    found = {EQUAL: {"lengthscale": equal, **common}}
    if not np.allclose(by_relevance, equal):
        found["lengthscales by relevance"] = {"lengthscale": by_relevance, **common}
    return found


def shorter(begin: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """A further start, for outputs that the others take for noise: they may vary faster than these can see.

    :param begin: the result of :func:`starts`.
    """
    start = begin[EQUAL]
    return start | {"lengthscale": SHORT * start["lengthscale"]}
