"""Initial hyperparameters, in the units of standardized data.

One start is not enough: if 4 of 32 columns matter (pumadyn32nm), a fit from equal lengthscales explains everything as noise. The
second start uses the data: a column gets a short lengthscale if the mean or variance of y differs along it. If y varies faster than
both can see, such as a sine of many periods, both explain it as noise; then a third start has short lengthscales.

Where time is short, only the first searches run. So the most promising start comes first, by the evidence of a few rows at its
lengthscales, without a sparse approximation and with the best noise. These rows may also ask for far shorter lengthscales.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

__all__ = ["SHORTER", "WARPED", "Alternative", "in_order", "promise", "relevance", "shorter", "starts"]

NUM_BINS = 10
EQUAL, SHORTER = "equal lengthscales", "short lengthscales"
WARPED = "skewed columns warped"
SHORT = 0.1  # lengthscales of the third start, relative to the first
SHORTS = (0.1, 0.03, 0.01, 0.003)  # those of a start that few rows may ask for, such as those of clusters far apart
CLEAR = 0.1  # nats per row by which they must
FEW = 100  # rows that tell which start is promising; LAPACK starts threads for more, which wait for busy cores
RELATIVE = (1.0, SHORT**0.5)  # lengthscales that tell it, relative to those of the start
NOISES = 10.0 ** np.arange(-4, 2.5, 0.5)  # variances, relative to the kernel's
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
    start = equal(X.shape[1])
    weight = np.sqrt(sum(y.var() * relevance(X, y) for y in outputs))
    weight = np.clip(weight / (weight.max() or 1.0), LEAST, 1.0)
    by_relevance = np.sqrt(np.sum(weight**2)) / weight
    found = {EQUAL: start}
    if not np.allclose(by_relevance, start["lengthscale"]):
        found["lengthscales by relevance"] = start | {"lengthscale": by_relevance}
    return found


def equal(num_columns: int) -> dict[str, np.ndarray]:
    return {"lengthscale": np.full(num_columns, num_columns**0.5), "scale": np.array(1.0), "slope": np.array(0.3)}


def shorter(num_columns: int, share: float = SHORT) -> dict[str, np.ndarray]:
    """A further start, for outputs that the others take for noise: they may vary faster than these can see."""
    start = equal(num_columns)
    return start | {"lengthscale": share * start["lengthscale"]}


class Alternative(NamedTuple):
    """One form of the outputs.

    :param values: shape (N, P), P outputs of each row.
    :param log_slope: added to the log density of a row's values, it gives one that compares.
    """

    values: np.ndarray
    log_slope: float = 0.0


def in_order(
    inputs: list[np.ndarray], outputs: list[np.ndarray], alternatives: list[Alternative]
) -> list[tuple[int, dict[str, dict[str, np.ndarray]]]]:
    """Positions of inputs, and starts for each, the most promising ones first.

    :param inputs: rows of standardized columns; the second ones, if there are two, have maps of skewed columns, and one start.
    :param outputs: as for :func:`starts`.
    :param alternatives: forms of the outputs; the best one counts.
    """
    found = []
    for i, X in enumerate(inputs):
        begin = starts(X, *outputs)
        begin = {WARPED: [*begin.values()][-1]} if i else begin
        hopes = {name: max(promise(X, start, a) for a in alternatives) for name, start in begin.items()}
        short = {s: max(promise(X, shorter(X.shape[1], s), a, (1.0,)) for a in alternatives) for s in SHORTS}
        if short[best := max(short, key=lambda s: short[s])] > max(hopes.values()) + CLEAR:
            name = WARPED if i else SHORTER
            begin[name], hopes[name] = shorter(X.shape[1], best), short[best]
        found.append((max(hopes.values()), i, {name: begin[name] for name in sorted(begin, key=lambda n: -hopes[n])}))
    return [(i, begin) for _, i, begin in sorted(found, key=lambda f: -f[0])]


def promise(
    X: np.ndarray, start: dict[str, np.ndarray], outputs: Alternative, shares: tuple[float, ...] = RELATIVE
) -> float:
    """The log evidence of the first rows, per row and up to a constant, with the best variance and noise for each output.

    :param shares: of the lengthscales, the best of which counts.
    """
    X, Y = X[:FEW], outputs.values[:FEW] - outputs.values[:FEW].mean(0)
    linear = float(start["slope"]) ** 2 / X.shape[1] * X @ X.T
    best = -np.inf
    for share in shares:
        scaled = X / (share * start["lengthscale"])
        r = 5**0.5 * scipy.spatial.distance.cdist(scaled, scaled)
        K = float(start["scale"]) ** 2 * (1 + r + r**2 / 3) * np.exp(-r) + linear
        factors = np.linalg.cholesky(K + NOISES[:, None, None] * np.eye(len(X)))
        squares = (solved(factors, Y) ** 2).mean(1)  # (noises, outputs)
        log_widths = np.log(np.diagonal(factors, axis1=1, axis2=2)).mean(1)[:, None]
        evidence = -0.5 * np.log(np.maximum(squares, np.finfo(float).tiny)) - log_widths
        best = max(best, float(evidence.max(0).sum()))
    return best + outputs.log_slope


def solved(factors: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Y times the inverse of each lower triangular factor, row by row: LAPACK would start threads, which wait for busy cores.

    :param factors: shape (K, n, n).
    :param Y: shape (n, P).
    :return: shape (K, n, P).
    """
    found = np.zeros((len(factors), *Y.shape))
    for i, y in enumerate(Y):
        found[:, i] = (y - (factors[:, i, None, :i] @ found[:, :i])[:, 0]) / factors[:, i, i, None]
    return found
