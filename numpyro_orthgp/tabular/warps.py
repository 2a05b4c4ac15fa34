"""A monotone map for columns of skewed or heavy-tailed numbers, such as prices, areas and concentrations.

A stationary kernel has one lengthscale for all of a column. If most numbers lie in a small part of its range, this lengthscale is
too long there, or too short elsewhere. ``arcsinh((x - loc) / scale)`` is about a straight line near ``loc`` and a logarithm far
from it, on both sides. So it spreads the numbers near ``loc``, and numbers far beyond those of training stay in reach.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Warp", "warp_of"]

LEAST_DISTINCT = 20  # different numbers that tell the form of their distribution
MOST_DISTINCT = 2000
SCALES = (0.02, 0.1, 0.25, 0.5)  # quantiles of the distances from ``loc`` that are tried
WORTH = 0.1  # nats per number that the map must gain


class Warp(NamedTuple):
    """
    :param loc, scale: the map is about linear within ``scale`` of ``loc``.
    """

    loc: float
    scale: float

    def __call__(self, x: Any, xp: Any = np) -> Any:
        return xp.arcsinh((x - self.loc) / self.scale)


def warp_of(values: np.ndarray) -> Warp | None:
    """The map after which different numbers of a column are most like a normal distribution, as in Box and Cox 1964.

    Each number counts once, since many equal ones, such as zeros, would have any density.

    :param values: shape (N,), NaN where missing.
    :return: ``None`` if there are few numbers, or no map gains 0.1 nats per number.
    """
    x = np.unique(values[np.isfinite(values)])
    if len(x) < LEAST_DISTINCT:
        return None
    if len(x) > MOST_DISTINCT:
        x = np.quantile(x, np.linspace(0, 1, MOST_DISTINCT), method="nearest")
    likelihoods = {warp: _likelihood(warp(x)) - float(np.mean(_log_widths(warp, x))) for warp in _candidates(x)}
    best = max(likelihoods, key=lambda warp: likelihoods[warp])
    return best if likelihoods[best] > _likelihood(x) + WORTH else None


def _candidates(x: np.ndarray) -> list[Warp]:
    """Lines near zero, an end or the middle.

    :param x: different numbers, in order.
    """
    locs = {float(x[0]), float(np.median(x)), float(x[-1])} | ({0.0} if x[0] >= 0 or x[-1] <= 0 else set())
    found = []
    for loc in sorted(locs):
        distances = np.abs(x - loc)
        found += [Warp(loc, float(scale)) for scale in np.quantile(distances[distances > 0], SCALES)]
    return found


def _likelihood(x: np.ndarray) -> float:
    """Log density per number under the normal distribution that fits best, up to a constant."""
    spread = float(x.std())
    return -float(np.log(spread)) if spread > 0 else -np.inf


def _log_widths(warp: Warp, x: np.ndarray) -> np.ndarray:
    """Minus the logarithm of the map's slope."""
    return np.log(warp.scale) + np.log(np.hypot(1.0, (x - warp.loc) / warp.scale))
