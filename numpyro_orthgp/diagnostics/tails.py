"""Whether standardized distances look normal or like a Student t."""

from __future__ import annotations

import numpy as np
import scipy

__all__ = ["tail_gain"]

DEGREES = (2.2, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 30.0)  # the variance is finite
ROUNDS = 100


def tail_gain(z: np.ndarray) -> tuple[float, float]:
    """The most likely degrees of freedom, and their gain over a normal distribution that also has a free scale, in nats per row.

    :param z: shape (N,).
    """
    normal = float(scipy.stats.norm.logpdf(z, scale=max(np.sqrt(np.mean(z**2)), np.finfo(float).tiny)).sum())
    value, df = max((_likely(z, df)[0], df) for df in DEGREES)
    return df, (value - normal) / len(z)


def _likely(z: np.ndarray, df: float) -> tuple[float, float]:
    """Log density of all distances at the most likely scale, and that scale."""
    square = max(float(np.mean(z**2)), np.finfo(float).tiny)
    for _ in range(ROUNDS):  # EM: rows far out have small weights
        square = float(np.mean((df + 1) / (df + z**2 / square) * z**2))
    scale = float(np.sqrt(square))
    return float(scipy.stats.t.logpdf(z, df, scale=scale).sum()), scale
