r"""Numbers with atoms: single values that recur, such as no rain, no claim, or a share of 100 %, beside others that hardly do.

A density cannot describe them. A distribution with probabilities :math:`p_k(x)` of the atoms :math:`a_k`, and a density f of other
outputs, has

.. math::
    F(y \mid x) = \sum_k p_k(x) [a_k \le y] + \Big(1 - \sum_k p_k(x)\Big) F_f(y \mid x) .

The probabilities are those of a classification of all rows, and f is a regression of the rows that are at no atom: a model of two
parts (Duan et al. 1983).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Atoms", "atoms_of"]

# Share of the rows at an atom, times the most frequent other value, and number of rows.
SHARE, TIMES, LEAST = 0.05, 5, 10
OTHERS = 40  # rows at no atom, and half as many different values


def atoms_of(y: np.ndarray) -> np.ndarray:
    """The atoms among numbers, in order, shape (K,). Rounded numbers have none: their values recur as often as their neighbours.

    Numbers at no atom have none themselves.

    :param y: shape (N,).
    """
    found = [y[:0]]
    while len(new := _most_frequent(y)):
        found.append(new)
        y = y[~np.isin(y, new)]
    return np.sort(np.concatenate(found))


def _most_frequent(y: np.ndarray) -> np.ndarray:
    values, counts = np.unique(y, return_counts=True)
    order = np.argsort(-counts)
    most = int(np.sum(counts >= max(SHARE * len(y), LEAST)))
    for num in range(min(most, len(values) - OTHERS // 2), 0, -1):  # so many, if all recur more than the next one
        others = counts[order[num:]]
        if others.sum() >= OTHERS and counts[order[num - 1]] >= TIMES * others[0]:
            return np.asarray(values[order[:num]])
    return values[:0]


class Atoms(NamedTuple):
    """
    :param values: the atoms, in order, shape (K,).
    :param probabilities: shape (N, K).
    """

    values: np.ndarray
    probabilities: np.ndarray

    @property
    def of_others(self) -> Any:
        """Probabilities of no atom, shape (N,)."""
        return 1 - self.probabilities.sum(-1)

    def mixed_moments(self, mean: Any, sd: Any) -> tuple[Any, Any]:
        """
        :param mean, sd: of other outputs, shape (N,).
        """
        p, rest = self.probabilities, self.of_others
        mixed = rest * mean + p @ self.values
        away = [rest * (sd**2 + (mean - mixed) ** 2), *(p.T * (self.values[:, None] - mixed) ** 2)]
        return mixed, sum(away) ** 0.5

    def mixed_cdf(self, found: np.ndarray, y: np.ndarray) -> np.ndarray:
        """
        :param found: distribution function of other outputs at y, shape (N,).
        """
        below = self.values <= y[:, None]
        return np.asarray(self.of_others * found + np.sum(self.probabilities * below, -1))

    def mixed_log_density(self, found: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Log probabilities at the atoms, and log densities of other outputs.

        :param found: log densities of other outputs at y, shape (N,).
        """
        at = self.values == y[:, None]
        mixed = np.log(np.maximum(self.of_others, np.finfo(float).tiny)) + found
        return np.where(at.any(-1), np.log(np.sum(self.probabilities * at, -1, initial=np.finfo(float).tiny)), mixed)

    def mixed_quantile(
        self, below: Sequence[np.ndarray], quantile: Callable[[np.ndarray], np.ndarray], level: np.ndarray
    ) -> np.ndarray:
        """
        :param below: probabilities of other outputs below each atom, given that they are at none, shape (N,) each.
        :param quantile: quantiles of other outputs at levels of shape (N, L).
        :param level: a scalar or shape (L,).
        :return: shape (N,) or (N, L).
        """
        asked = np.broadcast_to(np.atleast_1d(level), (len(self.probabilities), np.size(level)))
        rest, passed = self.of_others[:, None], np.zeros(asked.shape)
        at, earlier = np.full(asked.shape, np.nan), np.zeros((len(asked), 1))
        for value, p, lower in zip(self.values, self.probabilities.T[..., None], below, strict=True):
            start = earlier + rest * lower[:, None]
            at = np.where((start < asked) & (asked <= start + p), value, at)
            passed, earlier = passed + np.where(asked > start + p, p, 0.0), earlier + p
        inner = np.where(np.isnan(at), (asked - passed) / np.maximum(rest, np.finfo(float).tiny), 0.5)
        inner = np.clip(inner, 1e-12, 1 - 1e-12)
        found = np.where(np.isnan(at), quantile(inner), at)
        return found[:, 0] if np.ndim(level) == 0 else found
