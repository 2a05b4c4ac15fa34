"""Units of outputs: the models see y or log y, with mean 0 and standard deviation 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

__all__ = ["Outputs", "Units", "may_be_logarithms"]

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
        if not self.is_log:
            return Outputs(values, np.zeros(len(y)), self)
        return Outputs(values, np.log(y.std() / (self.scale * y)), self)


class Outputs(NamedTuple):
    """
    :param values: standardized, shape (N,).
    :param log_slopes: added to log densities of the values, it gives log densities of y over its standard deviation, which compare.
    :param units: units of the values.
    """

    values: np.ndarray
    log_slopes: np.ndarray
    units: Units


def may_be_logarithms(y: np.ndarray) -> bool:
    """Whether y is positive with a long upper tail, and log y is less skewed."""
    if not (y > 0).all():
        return False
    skewness = float(scipy.stats.skew(y))
    return skewness > SKEWED and abs(float(scipy.stats.skew(np.log(y)))) < skewness
