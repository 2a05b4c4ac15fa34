"""Groups of near rows, for a residual that is tightened in groups."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from numpyro_orthgp.errors import check_inputs, check_integer
from numpyro_orthgp.types import ArrayLike

__all__ = ["groups"]

_TURNS = 4  # of the power iteration: any direction will do, a long one does better


def groups(X: ArrayLike, size: int) -> np.ndarray:
    r"""An order of rows in which consecutive groups of ``size`` are near each other.

    Rows are cut in two across the direction in which they are spread most, at a whole number of groups, and each part again. All
    groups have ``size`` rows, but the last, which has what is left. The same data give the same groups. Takes O(N D log N) time::

        order = init.groups(X, 16)
        X, y = X[order], y[order]
        guide = AutoSparseGP(model, residual="tight", group_size=16)
        result = fit(SVI(model, guide, ...), rng_key, (X, y), batch_size=1024, group_size=16, ...)

    >>> import numpy as np
    >>> from numpyro_orthgp import init
    >>> X = np.array([[0.0], [5.0], [0.1], [5.1], [9.0]])
    >>> [sorted(group.tolist()) for group in np.split(init.groups(X, 2), [2, 4])]
    [[0, 2], [1, 3], [4]]

    :param X: inputs, shape (N, D); scale columns first if their units differ, best by the kernel's lengthscales.
    :param size: rows of a group.
    :return: numbers of rows, shape (N,).
    :raises TypeError: if ``X`` is not floating.
    :raises ValueError: if ``X`` is not finite of shape (N, D), or ``size`` is not a positive integer.
    """
    X, size = np.asarray(check_inputs("X", X)), check_integer("size", size)
    order, parts = np.arange(len(X)), [(0, len(X))]
    while parts:
        starts_of = defaultdict(list)
        for first, length in parts:
            if length > size:
                starts_of[length].append(first)
        parts = [
            part for length, starts in starts_of.items() for part in _halved(X, order, np.array(starts), length, size)
        ]
    return order


def _halved(X: np.ndarray, order: np.ndarray, starts: np.ndarray, length: int, size: int) -> list[tuple[int, int]]:
    """Order the rows of parts of one length so that each can be cut in two; where the halves begin and how long they are."""
    cut = -(-length // size) // 2 * size
    positions = starts[:, None] + np.arange(length)
    rows = order[positions]
    along = np.argpartition(_along_longest(X[rows]), cut, axis=1)
    order[positions] = np.take_along_axis(rows, along, 1)
    return [half for first in starts.tolist() for half in ((first, cut), (first + cut, length - cut))]


def _along_longest(points: np.ndarray) -> np.ndarray:
    """Coordinates along the direction of the largest spread, about, of several sets of points: (k, n, D) to (k, n)."""
    centred = points - points.mean(1, keepdims=True)
    direction = np.eye(points.shape[-1], dtype=points.dtype)[(centred**2).mean(1).argmax(-1)]
    for _ in range(_TURNS):
        along = np.einsum("knd,kd->kn", centred, direction)
        turned = np.einsum("knd,kn->kd", centred, along)
        norm = np.linalg.norm(turned, axis=-1, keepdims=True)
        direction = np.where(norm > 0, turned / np.where(norm > 0, norm, 1), direction)
    return np.einsum("knd,kd->kn", centred, direction)
