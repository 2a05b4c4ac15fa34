"""The distribution of prediction errors, in predicted standard deviations: a mixture of normal distributions.

One normal distribution is too narrow for outliers, or too wide for the other rows. A Student t has two parameters for both, and is
symmetric. A mixture of a few normal distributions with different means also fits shapes in between, and skewed ones. All its
moments exist, also those of its exponential. Schwarz's criterion decides the number of components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

__all__ = ["STANDARD", "Mixture", "fit_mixture", "moments_of"]

MOST = 4  # components
ROUNDS, SETTLED = 300, 0.01  # rounds of expectation maximization, and nats that a round must gain
NARROWEST = (
    0.05  # quantile of the distances from the median that bounds scales from below: else one may sit on a single row
)
HALVINGS = 60  # of the interval in which a quantile lies
MOST_VARIANCE = 700.0  # of a logarithm whose exponential has a variance in float64
STARTS = (0.1, 0.3)  # quantiles of these distances at which the narrowest component starts


@dataclass(frozen=True)
class Mixture:
    """A mixture of normal distributions.

    :param weights: shape (K,), with sum one.
    :param locs: means of the components, shape (K,).
    :param scales: standard deviations of the components, shape (K,).
    """

    weights: np.ndarray
    locs: np.ndarray
    scales: np.ndarray

    @property
    def is_standard(self) -> bool:
        """Whether it is the standard normal distribution."""
        return len(self.weights) == 1 and self.locs[0] == 0 and self.scales[0] == 1

    def log_density(self, z: np.ndarray) -> np.ndarray:
        return np.asarray(scipy.special.logsumexp(self._log_joint(z), axis=-1))

    def cdf(self, z: Any) -> np.ndarray:
        """Probability of a value below z."""
        return np.asarray(scipy.special.ndtr((np.asarray(z)[..., None] - self.locs) / self.scales) @ self.weights)

    def quantile(self, level: np.ndarray) -> np.ndarray:
        """Quantiles at probabilities of any shape."""
        each = (
            self.locs + self.scales * scipy.special.ndtri(level)[..., None]
        )  # the mixture's quantile is between those of its components
        if len(self.weights) == 1:
            return np.asarray(each[..., 0])
        low, high = each.min(-1), each.max(-1)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            is_below = self.cdf(middle) < level
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        return np.asarray(0.5 * (low + high))

    @property
    def num_parameters(self) -> int:
        """Number of parameters that were fitted; means count if one is not zero."""
        return 0 if self.is_standard else (3 if np.any(self.locs) else 2) * len(self.weights) - 1

    def _log_joint(self, z: Any) -> np.ndarray:
        away = (np.asarray(z)[..., None] - self.locs) / self.scales
        return np.asarray(np.log(self.weights / self.scales) - 0.5 * (np.log(2 * np.pi) + away**2))


STANDARD = Mixture(np.ones(1), np.zeros(1), np.ones(1))


def fit_mixture(z: np.ndarray, narrowest: float = 0.0) -> Mixture:
    """Fit a mixture to errors. Candidates are the standard normal distribution, another normal one, and two to four components, all
    with and without means. The largest log density, less half a log N for each parameter, wins (Schwarz 1978). A further component
    is tried while it pays.

    :param z: errors in predicted standard deviations, shape (N,).
    :param narrowest: least standard deviation of a component; a value that recurs would make one as narrow as can be.
    """
    price = 0.5 * np.log(len(z))
    best, chosen = float(STANDARD.log_density(z).sum()), STANDARD
    for num in range(1, MOST + 1):
        if num > len(chosen.weights) + 1:
            break
        for has_means in (False, True):
            value, found = max(
                (_most_likely(z, num, has_means, start, narrowest) for start in STARTS[: 1 if num == 1 else None]),
                key=lambda pair: pair[0],
            )
            value -= price * found.num_parameters
            if value > best:
                best, chosen = value, found
    return chosen


def _most_likely(z: np.ndarray, num: int, has_means: bool, start: float, narrowest: float) -> tuple[float, Mixture]:
    """Total log density and the maximum-likelihood mixture, by expectation maximization."""
    away = np.abs(z - np.median(z))
    narrowest = max(float(np.quantile(away, NARROWEST)), narrowest, np.finfo(float).tiny ** 0.5)
    first, last = np.maximum(np.quantile(away, [start, 0.995]), narrowest)
    found = Mixture(np.full(num, 1 / num), np.zeros(num), np.geomspace(first, last, num))
    before = -np.inf
    for _ in range(ROUNDS):
        # One row for each component, in place, and no `logsumexp`: this takes a quarter of the time.
        joint = found._log_joint(z).T.copy()
        most = joint.max(0)
        share = np.exp(np.subtract(joint, most, out=joint), out=joint)
        total = share.sum(0)
        if (value := float(most.sum() + np.log(total).sum())) < before + SETTLED:
            break
        before = value
        share /= total
        counts = share.sum(1) + 1e-9
        locs = share @ z / counts if has_means else np.zeros(num)
        away = z - locs[:, None]
        squares = np.einsum("kn,kn,kn->k", share, away, away) / counts
        found = Mixture(counts / counts.sum(), locs, np.sqrt(np.maximum(squares, narrowest**2)))
    return value, found


@np.errstate(over="ignore")
def moments_of(errors: Mixture, loc: Any, scale: Any, is_log: bool, xp: Any = np) -> tuple[Any, Any]:
    """Mean and standard deviation of ``loc + scale e``, or of its exponential if ``is_log``.

    :param errors: the distribution of e.
    :param loc, scale: shape (N,).
    :param xp: ``numpy`` or ``jax.numpy``.
    """
    locs, scales = loc[:, None] + scale[:, None] * errors.locs, scale[:, None] * errors.scales
    means, variances, unit = locs, scales**2, 1.0
    if is_log:
        log_means = locs + variances / 2
        unit = log_means.max(-1)  # of the numbers below, as those of rows far from all others may be beyond float64
        means = xp.exp(log_means - unit[:, None])
        variances = means**2 * xp.expm1(xp.minimum(variances, MOST_VARIANCE))
        unit = xp.exp(unit)
    mean = means @ errors.weights
    return unit * mean, unit * xp.sqrt((variances + (means - mean[:, None]) ** 2) @ errors.weights)
