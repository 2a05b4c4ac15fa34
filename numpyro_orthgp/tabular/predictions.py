"""Predictions of outputs that are numbers, in the user's units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

__all__ = ["Predictions"]


@dataclass(frozen=True)
class Predictions:
    """Normal distributions of new outputs, one for each row, in the units of y.

    :param mean: shape (N,).
    :param sd: standard deviation of a new output, with the noise, shape (N,).
    :param function_sd: of the function alone, shape (N,).
    :param index: labels of the rows, if they came in a table that has them.
    """

    mean: np.ndarray
    sd: np.ndarray
    function_sd: np.ndarray
    index: Any = None
    like: Any = None

    def quantile(self, level: Any) -> np.ndarray:
        """What a new output is below with this probability, shape (N,), or (N, K) for K levels.

        :raises ValueError: for levels that are not between 0 and 1.
        """
        level = np.asarray(level, float)
        if not ((level > 0) & (level < 1)).all():
            raise ValueError(f"`level` must be between 0 and 1; got {level.tolist()}.")
        z = ndtri(level)
        return self.mean + self.sd * z if level.ndim == 0 else self.mean[:, None] + self.sd[:, None] * z

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that holds a new output with this probability."""
        lower, upper = self.quantile([0.5 - level / 2, 0.5 + level / 2]).T
        return lower, upper

    def log_density(self, y: Any) -> np.ndarray:
        """Of outputs that came, nats in the units of y, shape (N,).

        :raises ValueError: for another shape.
        """
        y = np.asarray(y, float)
        if y.shape != self.mean.shape:
            raise ValueError(f"`y` must have shape {self.mean.shape}, an output for each row; got {y.shape}.")
        return -0.5 * (np.log(2 * np.pi * self.sd**2) + ((y - self.mean) / self.sd) ** 2)

    def frame(self, level: float = 0.95) -> Any:
        """A table of the kind that the inputs came in, with their index; a dict of arrays if they were an array."""
        lower, upper = self.interval(level)
        columns = {"mean": self.mean, "sd": self.sd, "lower": lower, "upper": upper}
        if self.like is None:
            return columns
        return self.like(columns) if self.index is None else self.like(columns, index=self.index)
