"""Predictions of counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy

from numpyro_orthgp.tabular import renewal
from numpyro_orthgp.tabular.predictions import Ordered, checked_levels, checked_outputs
from numpyro_orthgp.tabular.rows import as_floats
from numpyro_orthgp.tabular.strays import NONE, Strays

__all__ = ["CountPredictions"]

NODES = np.linspace(-6.0, 6.0, 401)  # standard deviations of the log rate, for distribution functions
WEIGHTS = np.exp(-(NODES**2) / 2) / np.exp(-(NODES**2) / 2).sum()
MOST_STEP = 16  # every 16th node suffices for the normal distribution itself
NARROW = 2 * (NODES[1] - NODES[0])  # width of a distribution given the rate, below which there are too few nodes
ROWS_AT_ONCE = 2048
MOST_SURE = 2.0**53  # counts above are no longer told apart


@dataclass(frozen=True)
class CountPredictions(Ordered):
    """Distributions of new counts, one for each row: Poisson or negative binomial with a normal log rate, perhaps with additional
    zeros, or of events that come at more regular times (``renewal``).

    Probabilities and quantiles allow for strays, which ``mean`` and ``sd`` leave out.

    :param log_mean: mean of the logarithm of the rate times the exposure, shape (N,).
    :param log_sd: its standard deviation, shape (N,).
    :param concentration: k of the negative binomial distribution; infinite for Poisson.
    :param index: labels of the rows, if the user's table has them.
    :param densities: maps ``log_mean``, ``log_sd`` and y to log probabilities of counts, if ``regularity`` is 1.
    :param strays: rows that are unlike those seen.
    :param regularity: above 1 for counts that vary less than Poisson ones.
    :param extra_zeros: probabilities that a count is zero whatever its distribution, shape (N,) or a scalar.
    """

    log_mean: np.ndarray
    log_sd: np.ndarray
    concentration: float
    densities: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    index: Any = None
    like: Any = None
    strays: Strays = NONE
    regularity: float = 1.0
    extra_zeros: Any = 0.0

    @property
    def mean(self) -> np.ndarray:  # type: ignore[override]
        """Expected counts, shape (N,); infinite beyond float64."""
        with np.errstate(over="ignore"):
            return (1 - self.extra_zeros) * np.exp(self.log_mean + self.log_sd**2 / 2)

    @property
    def sd(self) -> np.ndarray:  # type: ignore[override]
        """Standard deviations of new counts, shape (N,); infinite beyond float64."""
        # mean + mean^2 (spread + (1 + spread) / k), spread = exp(v) - 1, in logarithms: a mean may be zero in float64.
        variance, k = self.log_sd**2, self.concentration
        log_mean = self.log_mean + variance / 2
        with np.errstate(divide="ignore", over="ignore"):
            log_given = np.log(renewal.variance(np.exp(log_mean), self.regularity)) if self.regularity > 1 else log_mean
            log_spread = variance + np.log(-np.expm1(-variance))
            log_more = np.logaddexp(log_spread, variance - np.log(k))
            log_more = np.logaddexp(log_more, np.log(self.extra_zeros))
            return np.exp(0.5 * (np.logaddexp(log_given, 2 * log_mean + log_more) + np.log1p(-self.extra_zeros)))

    def cdf(self, y: Any) -> np.ndarray:
        """The probability of at most y for each row, shape (N,).

        :raises ValueError: for another shape.
        """
        y = as_floats("y", checked_outputs(y, len(self.log_mean), self.index))
        parts = [slice(first, first + ROWS_AT_ONCE) for first in range(0, max(len(y), 1), ROWS_AT_ONCE)]
        found = np.concatenate([self._cdf(y[part], self.log_mean[part], self.log_sd[part]) for part in parts])
        found = np.where(y < 0, found, self.extra_zeros + (1 - self.extra_zeros) * found)
        return self.strays.mixed_cdf(found, y)

    def _cdf(self, y: np.ndarray, log_mean: np.ndarray, log_sd: np.ndarray) -> np.ndarray:
        k, count, log_sd = self.concentration, np.floor(np.maximum(y, 0)), np.maximum(log_sd, 1e-9)
        # As a function of the node, the probability given the rate falls within this width.
        width = np.sqrt(renewal.arrival(count, self.regularity)[1] + 1 / k) / log_sd
        found = np.empty(len(y))
        narrow = (width < NARROW) | ((self.regularity > 1) & (count > renewal.MANY))
        for part, method in ((narrow, self._cdf_by_gammas), (~narrow, self._cdf_by_nodes)):
            if part.any():
                found[part] = method(count[part], log_mean[part], log_sd[part], width[part])
        return np.where(y < 0, 0.0, found)

    def _cdf_by_nodes(
        self, count: np.ndarray, log_mean: np.ndarray, log_sd: np.ndarray, width: np.ndarray
    ) -> np.ndarray:
        """By equidistant nodes, of which half the width is close enough: the error falls as exp(-2 pi^2 (width / distance)^2)."""
        k, least = self.concentration, np.fmin.reduce(width, initial=np.inf)
        step = int(np.clip(0.5 * least / (NODES[1] - NODES[0]), 1, MOST_STEP))
        nodes, weights = NODES[::step], WEIGHTS[::step] / WEIGHTS[::step].sum()
        count = count[:, None]
        with np.errstate(over="ignore"):
            rate = np.exp(log_mean[:, None] + log_sd[:, None] * nodes)
        if self.regularity > 1:
            given = renewal.cdf(count, rate, self.regularity)
        elif np.isinf(k):
            given = scipy.special.pdtr(count, rate)
        else:
            given = scipy.special.betainc(k, count + 1, k / (k + rate))
        return np.asarray(given @ weights)

    def _cdf_by_gammas(self, count: np.ndarray, log_mean: np.ndarray, log_sd: np.ndarray, _: np.ndarray) -> np.ndarray:
        """At most y events occur at a rate below G(y + 1), or k G(y + 1) / G(k), with G(a) of a gamma distribution. Its logarithm
        is nearly normal beside the wider one of the rate, or for many events."""
        k, a = self.concentration, count + 1
        if self.regularity > 1:
            mean, variance = renewal.arrival(count, self.regularity)
            loc = np.log(mean) - variance / 2
        else:
            loc, variance = scipy.special.digamma(a), scipy.special.polygamma(1, a)
        if not np.isinf(k):
            loc, variance = loc + np.log(k) - scipy.special.digamma(k), variance + scipy.special.polygamma(1, k)
        return np.asarray(scipy.special.ndtr((loc - log_mean) / np.sqrt(log_sd**2 + variance)))

    def quantile(self, level: Any) -> np.ndarray:
        """Quantiles of new counts, shape (N,), or (N, K) for K levels: the smallest count not exceeded with probability ``level``.

        :raises ValueError: if levels are not between 0 and 1.
        """
        level = checked_levels(level)
        found = [self._quantile(each) for each in np.atleast_1d(level)]
        return found[0] if level.ndim == 0 else np.stack(found, -1)

    @np.errstate(over="ignore", invalid="ignore")  # of counts beyond float64
    def _quantile(self, level: float) -> np.ndarray:
        """Bisection between -1 and a count that is large enough, until there is no number between, whole or of float64."""
        lower, upper = np.full(len(self.log_mean), -1.0), np.ceil(np.minimum(self.mean + self.sd, MOST_SURE))
        while (short := self.cdf(upper) < level).any():
            lower, upper = np.where(short, upper, lower), np.where(short, 2 * upper + 1, upper)
        while ((lower < (middle := np.floor(lower + (upper - lower) / 2))) & (middle < upper)).any():
            enough = self.cdf(middle) >= level
            lower, upper = np.where(enough, lower, middle), np.where(enough, middle, upper)
        return upper

    def log_density(self, y: Any) -> np.ndarray:
        """Log probabilities of observed counts, in nats, shape (N,).

        :raises ValueError: for another shape, or if y is not a count.
        """
        counts = as_floats("y", checked_outputs(y, len(self.log_mean), self.index))
        if not ((counts >= 0) & (counts < np.inf) & (counts == np.round(counts))).all():
            raise ValueError("`y` must hold counts: whole numbers that are not negative.")
        if self.regularity > 1:
            alone = replace(self, strays=NONE)
            found = np.log(np.maximum(alone.cdf(counts) - alone.cdf(counts - 1), np.finfo(float).tiny))
        else:
            found = self.densities(self.log_mean, self.log_sd, counts)
            if np.any(self.extra_zeros):
                found = np.log1p(-self.extra_zeros) + found
                found = np.where(counts == 0, np.logaddexp(np.log(self.extra_zeros), found), found)
        return self.strays.mixed_log_density(found, counts)
