"""Predictions of numbers and labels, in the user's units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from numpyro_orthgp.tabular.atoms import Atoms
from numpyro_orthgp.tabular.labels import Labels
from numpyro_orthgp.tabular.mixtures import STANDARD, Mixture, moments_of
from numpyro_orthgp.tabular.rows import as_floats, one_column
from numpyro_orthgp.tabular.strays import NONE, StrayNumbers

__all__ = ["ClassPredictions", "Ordered", "Predictions", "checked_levels", "checked_outputs"]


def table_of(columns: dict[str, Any], like: Any, index: Any) -> Any:
    """A table of the same class as the inputs, with their index; a dict of arrays if the inputs were an array."""
    if like is None:
        return columns
    if not like.__module__.startswith("pandas"):  # others do not read its categories
        columns = {name: np.asarray(values) for name, values in columns.items()}
    return like(columns) if index is None else like(columns, index=index)


def checked_levels(level: Any) -> np.ndarray:
    """
    :raises ValueError: if levels are not between 0 and 1.
    """
    level = np.asarray(level, float)
    if not ((level > 0) & (level < 1)).all():
        raise ValueError(f"`level` must be between 0 and 1; got {level.tolist()}.")
    return level


def checked_outputs(y: Any, num: int, index: Any) -> np.ndarray:
    """
    :param index: labels of the rows of the predictions, if they have any.
    :raises TypeError: for a masked array with entries missing.
    :raises ValueError: if there is not one output for each row, or they have the labels of the rows in another order.
    """
    if np.ma.is_masked(y):
        raise TypeError("`y` is a masked array with entries missing, which have no density. Leave these rows out.")
    return one_column(y, num, index=index)


class Ordered(ABC):
    """Predictions of ordered outputs."""

    mean: np.ndarray
    sd: np.ndarray
    index: Any
    like: Any

    @abstractmethod
    def quantile(self, level: Any) -> np.ndarray:
        """Quantiles of new outputs at this probability."""

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval that contains a new output with probability ``level``.

        :raises ValueError: if the level is not between 0 and 1.
        """
        if checked_levels(level).ndim:
            raise ValueError(f"`level` must be one number, as for 0.95; got {level!r}. For several use quantile.")
        lower, upper = self.quantile([0.5 - level / 2, 0.5 + level / 2]).T
        return lower, upper

    def frame(self, level: float = 0.95) -> Any:
        """A table of the same class as the inputs, with their index; a dict of arrays if the inputs were an array."""
        lower, upper = self.interval(level)
        columns = {"mean": self.mean, "sd": self.sd, "lower": lower, "upper": upper}
        return table_of(columns, self.like, self.index)


@dataclass(frozen=True)
class Predictions(Ordered):
    """Distributions of new outputs, one for each row: that of ``loc + scale e``, or of its exponential if ``is_log``.

    If y has atoms, single values such as zero with a probability of their own, this is the distribution of other outputs. Log
    densities are log probabilities at the atoms.

    Densities, probabilities and quantiles allow for strays, which ``mean`` and ``sd`` leave out.

    :param loc: location, in the units of y or of log y, shape (N,).
    :param scale: likewise.
    :param function_sd: standard deviation of the function alone, in the units of y, shape (N,).
    :param index: labels of the rows, if the user's table has them.
    :param errors: the distribution of e: standard normal, or a mixture of normal distributions.
    :param is_log: whether log y was modelled.
    :param strays: rows that are unlike those seen.
    :param atoms: values with probabilities of their own, or ``None``.
    """

    loc: np.ndarray
    scale: np.ndarray
    function_sd: np.ndarray
    index: Any = None
    like: Any = None
    errors: Mixture = STANDARD
    is_log: bool = False
    strays: StrayNumbers = NONE
    atoms: Atoms | None = None

    @property
    def mean(self) -> np.ndarray:  # type: ignore[override]
        """Means of new outputs, in the units of y, shape (N,)."""
        return np.asarray(self._moments[0])

    @property
    def sd(self) -> np.ndarray:  # type: ignore[override]
        """Standard deviations of new outputs, with noise, in the units of y, shape (N,)."""
        return np.asarray(self._moments[1])

    @cached_property
    def _moments(self) -> tuple[Any, Any]:
        found = moments_of(self.errors, self.loc, self.scale, self.is_log)
        return found if self.atoms is None else self.atoms.mixed_moments(*found)

    def quantile(self, level: Any) -> np.ndarray:
        """Quantiles of new outputs, shape (N,), or (N, K) for K levels.

        :raises ValueError: if levels are not between 0 and 1.
        """
        level = checked_levels(level)
        if self.atoms is None:
            return self._quantile_of_others(level)
        alone = replace(self, atoms=None)
        below = [alone.cdf(np.full(len(self.loc), value)) for value in self.atoms.values]
        return self.atoms.mixed_quantile(below, self._quantile_of_others, level)

    def _quantile_of_others(self, level: np.ndarray) -> np.ndarray:
        """
        :param level: a scalar, or shape (K,) or (N, K).
        """
        loc, scale = (self.loc, self.scale) if level.ndim == 0 else (self.loc[:, None], self.scale[:, None])
        found = loc + scale * self.errors.quantile(level)
        found = self.strays.mixed_quantile(lambda y: self.errors.cdf((y - loc) / scale), found, level)
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(found) if self.is_log else found)

    def cdf(self, y: Any) -> np.ndarray:
        """The probability of an output of at most y for each row, shape (N,). It is uniform at observed y if predictions are
        calibrated and y has no atoms.

        :raises ValueError: for another shape.
        """
        values, _ = self._modelled(y)
        found = self.strays.mixed_cdf(self.errors.cdf((values - self.loc) / self.scale), values)
        return found if self.atoms is None else self.atoms.mixed_cdf(found, as_floats("y", np.asarray(y)))

    def log_density(self, y: Any) -> np.ndarray:
        """Log densities of observed outputs, in nats and in the units of y, shape (N,); log probabilities at atoms of y.

        :raises ValueError: for another shape.
        """
        values, slope = self._modelled(y)
        found = self.errors.log_density((values - self.loc) / self.scale) - np.log(self.scale)
        found = self.strays.mixed_log_density(found, values) + slope
        return found if self.atoms is None else self.atoms.mixed_log_density(found, as_floats("y", np.asarray(y)))

    def _modelled(self, y: Any) -> tuple[np.ndarray, np.ndarray | float]:
        """Outputs or their logarithms, and the log derivative of these with respect to y."""
        y = as_floats("y", checked_outputs(y, len(self.loc), self.index))
        if not self.is_log:
            return y, 0.0
        with np.errstate(divide="ignore", invalid="ignore"):  # y <= 0 has probability zero
            log_y = np.where(y <= 0, -np.inf, np.log(y))
        return log_y, -np.where(y > 0, log_y, 0.0)


@dataclass(frozen=True)
class ClassPredictions:
    """Probabilities of the classes, for each row.

    :param probabilities: shape (N, C), in the order of ``classes``.
    :param labels: the labels of the classes.
    :param index: labels of the rows, if the user's table has them.
    """

    probabilities: np.ndarray
    labels: Labels
    index: Any = None
    like: Any = None

    @property
    def classes(self) -> np.ndarray:
        """The labels, in order."""
        return self.labels.classes

    @property
    def label(self) -> Any:
        """The most probable label of each row, of the same kind as y."""
        return self.labels.give_back(self.probabilities.argmax(-1))

    def log_density(self, y: Any) -> np.ndarray:
        """Log probabilities of observed labels, in nats, shape (N,).

        :raises ValueError: for another shape, or a label not seen in training.
        """
        codes = self.labels.codes(checked_outputs(y, len(self.probabilities), self.index))
        return np.log(self.probabilities[np.arange(len(codes)), codes])

    def frame(self) -> Any:
        """A table of the same class as the inputs, with their index: the label, and a column of probabilities for each class. It is
        a dict of arrays if the inputs were an array."""
        columns = {"label": self.label} | {
            f"P({label})": p for label, p in zip(self.classes.tolist(), self.probabilities.T, strict=True)
        }
        return table_of(columns, self.like, self.index)
