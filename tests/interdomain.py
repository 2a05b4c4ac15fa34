"""Features among points: one dense kernel on both, so that every oracle written for inducing points serves for features too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Kernel = Callable[..., np.ndarray]


def joint(kernel: Kernel, Kuu: np.ndarray, Kuf: Callable[[np.ndarray], np.ndarray]) -> Kernel:
    """The kernel of rows (x, tag): the function's value at x where the tag is -1, else the feature with that number.

    :param Kuu: covariance of the features, shape (M, M).
    :param Kuf: from inputs (n, D) to their covariance with the features, shape (M, n).
    """

    def k(A, B):
        i, j = A[:, -1].astype(int), B[:, -1].astype(int)
        a, b = i < 0, j < 0
        K = np.empty((len(A), len(B)))
        K[np.ix_(a, b)] = kernel(A[a, :-1], B[b, :-1])
        K[np.ix_(~a, ~b)] = Kuu[np.ix_(i[~a], j[~b])]
        K[np.ix_(~a, b)] = Kuf(B[b, :-1])[i[~a]]
        K[np.ix_(a, ~b)] = Kuf(A[a, :-1])[j[~b]].T
        return K

    return k


def points(X: np.ndarray) -> np.ndarray:
    return np.c_[X, np.full(len(X), -1.0)]


def features(start: int, stop: int, D: int) -> np.ndarray:
    return np.c_[np.zeros((stop - start, D)), np.arange(start, stop)]
