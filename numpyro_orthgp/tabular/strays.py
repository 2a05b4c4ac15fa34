"""Rows that are unlike all those seen, such as a slip of the pen, in predictions of numbers and counts.

N rows without one do not rule out that the next is one. Its probability has expectation 1 / (2 (N + 1)) under Jeffreys' prior. The
inputs say nothing of such a row, and its output may be far from all others: it has the size of y and a tail so heavy that it has no
mean. Quantiles and densities allow for such rows; means and standard deviations leave them out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["NONE", "StrayCounts", "StrayNumbers", "Strays", "weight_of"]

HALVINGS = 60  # of the interval in which a quantile lies


def weight_of(num_seen: int) -> float:
    """The expected share of such rows, after as many rows without one."""
    return 0.5 / (num_seen + 1)


@dataclass(frozen=True)
class Strays(ABC):
    """
    :param weight: probability of such a row; 0 if there are none.
    """

    weight: float

    @abstractmethod
    def _log_density(self, y: np.ndarray) -> np.ndarray:
        """The log density of their outputs."""

    @abstractmethod
    def _cdf(self, y: np.ndarray) -> np.ndarray:
        """Their distribution function."""

    def mixed_log_density(self, found: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The log density of other rows, mixed with that of strays."""
        if not self.weight:
            return found
        with np.errstate(invalid="ignore"):  # of y that is missing
            return np.asarray(np.logaddexp(np.log1p(-self.weight) + found, np.log(self.weight) + self._log_density(y)))

    def mixed_cdf(self, found: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The probability of other rows, mixed with that of strays."""
        return np.asarray((1 - self.weight) * found + self.weight * self._cdf(y)) if self.weight else found


@dataclass(frozen=True)
class StrayNumbers(Strays):
    """Student t with one degree of freedom.

    :param loc, scale: mean and standard deviation of y, or of log y.
    """

    loc: float = 0.0
    scale: float = 1.0

    def _log_density(self, y: np.ndarray) -> np.ndarray:
        return -np.log(np.pi * self.scale) - np.log1p(((y - self.loc) / self.scale) ** 2)

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        return 0.5 + np.arctan((y - self.loc) / self.scale) / np.pi

    def mixed_quantile(
        self, cdf: Callable[[np.ndarray], np.ndarray], found: np.ndarray, level: np.ndarray
    ) -> np.ndarray:
        """The quantile of the mixture, by bisection; it lies between that of other rows and that of strays.

        :param cdf: distribution function of other rows.
        :param found: quantiles of other rows at ``level``.
        """
        if not self.weight:
            return found
        alone = self.loc + self.scale * np.tan(np.pi * (level - 0.5))
        low, high = np.minimum(found, alone), np.maximum(found, alone)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            is_below = self.mixed_cdf(cdf(middle), middle) < level
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        return np.asarray(0.5 * (low + high))


NONE = StrayNumbers(0.0)


@dataclass(frozen=True)
class StrayCounts(Strays):
    r"""At most y with probability :math:`(y + 1) / (y + 1 + m)`: a Pareto distribution of the second kind, shape 1, rounded down.

    :param mean: the mean m of counts that do not depend on inputs, shape (N,).
    """

    mean: np.ndarray

    def _log_density(self, y: np.ndarray) -> np.ndarray:
        return np.log(self.mean) - np.log(y + self.mean) - np.log(y + 1 + self.mean)

    def _cdf(self, y: np.ndarray) -> np.ndarray:
        return 1 - self.mean / (np.floor(np.maximum(y, -1)) + 1 + self.mean)  # y may be infinite
