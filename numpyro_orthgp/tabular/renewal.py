r"""Counts with less variance than Poisson ones of the same mean: events that come at more regular times.

Times between events have a gamma distribution of mean one and shape :math:`\alpha \ge 1`, and the count begins at any time, not
just after an event (Cox 1962, Sec. 3.2; Winkelmann 1995). So its mean is the rate t, for any :math:`\alpha`; Poisson counts have
:math:`\alpha = 1`. With :math:`S_n` the sum of n times, and P the incomplete gamma function,

.. math::
    P(y \le n) = 1 - H_n(t) + H_{n+1}(t), \qquad
    H_n(t) = E(t - S_n)_+ = t P(\alpha n, \alpha t) - n P(\alpha n + 1, \alpha t) .

The variance is about :math:`t / \alpha + (1 - \alpha^{-2}) / 6`, and that of one event or none for small rates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

__all__ = ["MANY", "arrival", "cdf", "variance"]

MANY = 1e6  # counts above which the time of an event is nearly normal, and ``cdf`` loses digits


def cdf(count: np.ndarray, rate: np.ndarray, regularity: float) -> np.ndarray:
    """The probability of at most ``count`` events.

    :param count: n, whole numbers from 0 on.
    :param rate: t, the mean.
    :param regularity: alpha.
    """
    rate = np.minimum(rate, np.finfo(float).max ** 0.5)
    return np.clip(1 - _early(count, rate, regularity) + _early(count + 1, rate, regularity), 0.0, 1.0)


def _early(n: np.ndarray, t: np.ndarray, alpha: float) -> np.ndarray:
    """H_n(t): how much before t the nth event comes, on average."""
    shape = np.maximum(alpha * n, np.finfo(float).tiny)  # the zeroth comes at the beginning
    return np.asarray(t * scipy.special.gammainc(shape, alpha * t) - n * scipy.special.gammainc(shape + 1, alpha * t))


def arrival(count: np.ndarray, regularity: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and variance over its square, of the time of the first event after ``count`` others. The first has begun before."""
    a = 1 / regularity
    first = (1 + a) / 2
    mean = count + first
    return mean, (a + ((1 + a) * (1 + 2 * a) / 3 - first**2 - a * first) / mean) / mean


def variance(mean: Any, regularity: Any, xp: Any = np) -> Any:
    """Of the count given its mean, to 0.09: there is hardly more than one event if the mean is small."""
    a = 1 / regularity
    return xp.minimum(mean, a * mean + (1 - a**2) / 6)
