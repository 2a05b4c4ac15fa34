"""Units of outputs: the models see y or log y, with mean 0 and standard deviation 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

__all__ = ["Outputs", "Units", "may_be_logarithms", "rounding_of"]

LEAST_STEP = 1e-7  # of outputs that were rounded, relative to their standard deviation
SKEWED = 0.5  # skewness above which logarithms are tried; an exponential distribution has 2


class Units(NamedTuple):
    """
    :param loc, scale: mean and standard deviation of y or of log y.
    :param is_log: whether log y is modelled.
    """

    loc: float
    scale: float
    is_log: bool = False

    @classmethod
    def of(cls, y: np.ndarray, is_log: bool = False) -> Units:
        y = np.log(y) if is_log else y
        return cls(float(y.mean()), float(y.std()), is_log)

    def standardized(self, y: np.ndarray) -> Outputs:
        values = ((np.log(y) if self.is_log else y) - self.loc) / self.scale
        rounding = rounding_of(y) / self.scale
        if not self.is_log:
            return Outputs(values, np.zeros(len(y)), self, rounding)
        return Outputs(values, np.log(y.std() / (self.scale * y)), self, rounding / float(np.median(y)))


class Outputs(NamedTuple):
    """
    :param values: standardized, shape (N,).
    :param log_slopes: added to log densities of the values, it gives log densities of y over its standard deviation, which compare.
    :param units: units of the values.
    :param rounding: standard deviation of the values' rounding errors; of logarithms at the median.
    """

    values: np.ndarray
    log_slopes: np.ndarray
    units: Units
    rounding: float = 0.0


def rounding_of(y: np.ndarray) -> float:
    r"""Standard deviation of rounding errors, :math:`\delta / \sqrt{12}`, where all y are multiples of a step :math:`\delta`, which
    is 1, 2 or 5 times a power of ten. Zero where there is no such step above a ten-millionth of the standard deviation.

    It is a lower limit of the noise. Without it the noise could go to zero, and repeated values could have any density.
    """
    for power in range(int(np.floor(np.log10(np.ptp(y)))), int(np.floor(np.log10(LEAST_STEP * y.std()))), -1):
        for digit in (5, 2, 1):
            steps = y / (digit * 10.0**power)
            # At most a hundredth of a step: beside a large mean any number is near a multiple.
            if np.abs(steps - np.round(steps)).max() < min(1e-9 * max(np.abs(steps).max(), 1.0), 0.01):
                return float(digit * 10.0**power / 12**0.5)
    return 0.0


def may_be_logarithms(y: np.ndarray) -> bool:
    """Whether y is positive with a long upper tail, and log y is less skewed."""
    if not (y > 0).all():
        return False
    skewness = float(scipy.stats.skew(y))
    return skewness > SKEWED and abs(float(scipy.stats.skew(np.log(y)))) < skewness
