"""Groups of nearby rows, for a residual that is tightened in groups."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from numpyro_orthgp.errors import check_inputs, check_integer
from numpyro_orthgp.types import ArrayLike

__all__ = ["groups"]

_TURNS = 4  # of the power iteration. Any direction will do; one of large spread is better


def groups(X: ArrayLike, size: int) -> np.ndarray:
    r"""An order of rows in which the ``size`` rows of each consecutive group are near each other.

    Rows are split in two across the direction of largest spread, at a whole number of groups, and each part is split again. All
    groups have ``size`` rows; the last may have fewer. The same data give the same groups. The cost is O(N D log N)::

        order = init.groups(X, 64)
        X, y = X[order], y[order]
        groups = {"group_size": 64, "num_groups": 1}  # each minibatch ends with one group
        guide = AutoSparseGP(model, residual="tight", **groups)
        result = fit(SVI(model, guide, ...), rng_key, (X, y), batch_size=1024, **groups, ...)

    >>> import numpy as np
    >>> from numpyro_orthgp import init
    >>> X = np.array([[0.0], [5.0], [0.1], [5.1], [9.0]])
    >>> [sorted(group.tolist()) for group in np.split(init.groups(X, 2), [2, 4])]
    [[0, 2], [1, 3], [4]]

    :param X: inputs, shape (N, D). First scale columns with different units, preferably by the kernel's lengthscales.
    :param size: number of rows in a group.
    :return: row numbers, shape (N,).
    :raises TypeError: if ``X`` is not floating-point.
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
    """Order the rows of parts of equal length so that each can be cut in two. Return starts and lengths of the halves."""
    cut = -(-length // size) // 2 * size
    positions = starts[:, None] + np.arange(length)
    rows = order[positions]
    along = np.argpartition(_along_longest(X[rows]), cut, axis=1)
    order[positions] = np.take_along_axis(rows, along, 1)
    return [half for first in starts.tolist() for half in ((first, cut), (first + cut, length - cut))]


def _along_longest(points: np.ndarray) -> np.ndarray:
    """Coordinates along about the direction of largest spread, for several sets of points: (k, n, D) to (k, n)."""
    centred = points - points.mean(1, keepdims=True)
    # To about one, by powers of two, which changes no digits: fourth powers of 1e9 are infinite in float32.
    centred = np.ldexp(centred, -np.frexp(np.abs(centred).max((1, 2), keepdims=True))[1])
    direction = np.eye(points.shape[-1], dtype=points.dtype)[(centred**2).mean(1).argmax(-1)]
    for _ in range(_TURNS):
        along = np.einsum("knd,kd->kn", centred, direction)
        turned = np.einsum("knd,kn->kd", centred, along)
        norm = np.linalg.norm(turned, axis=-1, keepdims=True)
        direction = np.where(norm > 0, turned / np.where(norm > 0, norm, 1), direction)
    return np.einsum("knd,kd->kn", centred, direction)
