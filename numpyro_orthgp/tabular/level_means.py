r"""The levels of a category as numbers: means of the outputs over the rows of each level.

A category of countries or machines may have more levels than can have a column each. What a level says of y is then one number:
the mean of y over its rows, less the mean of all rows, shrunk towards zero as for random effects. With n rows and variances
:math:`\sigma^2` within levels and :math:`\tau^2` between them, the factor is :math:`n / (n + \sigma^2 / \tau^2)`
(Micci-Barreca 2001; variances by analysis of variance).

A row's own output must not be in its input. So the rows of training are cut into five parts at random, and a row takes the means of
the other four. New rows take the means of all rows.

Numbers may be names, too, such as those of shops. A warning says so where means differ between neighbours as between any two.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

__all__ = ["LEAST_OF_LEVEL", "LevelMeans", "by_frequency", "level_means", "warn_of_names"]

PARTS = 5
LEAST_OF_LEVEL = 2  # rows that a level needs to say something of new ones
MOST_MEANS = 10_000  # levels that have a mean
MOST_OUTPUTS = 5  # classes up to which each class has its own means
WITHOUT_ORDER = 0.8  # differences of neighbours beside those of any two; those of a period of five have 0.7
CLEAR = 3.0  # squares of differences beside those by chance
ORDERS = 20  # random orders, whose neighbours are any two


@dataclass(frozen=True)
class LevelMeans:
    """
    :param levels: levels with a mean, most frequent first.
    :param values: for each output the means of the levels, less the mean of all rows, shrunk and divided by their standard
        deviation over the rows of training. All other levels have zero.
    """

    levels: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]

    def encode(self, values: np.ndarray) -> list[np.ndarray]:
        """A column for each output, shape (N,) each.

        :param values: levels, None where missing, shape (N,).
        """
        position = {level: i for i, level in enumerate(self.levels)}
        found = np.array([position.get(v, -1) for v in values], int)
        return [np.append(means, 0.0)[found] for means in self.values]


def by_frequency(values: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Levels, most frequent first; their numbers of rows; and the level of each row by position, -1 where it is missing.

    :param values: levels, None where missing, shape (N,).
    """
    known = np.array([v is not None for v in values], bool)
    levels, found, counts = np.unique(values[known].astype(str), return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    codes = np.full(len(values), -1)
    codes[known] = np.argsort(order)[found]
    return levels[order].tolist(), counts[order], codes


def level_means(values: np.ndarray, outputs: np.ndarray, seed: int) -> tuple[LevelMeans, list[np.ndarray]] | None:
    """Means of the outputs for each level, and the columns for the rows of training; None if levels differ no more than by chance.

    :param values: levels, None where missing, shape (N,).
    :param outputs: shape (N, K). With more than 5 outputs there are no means.
    :param seed: seed of the five parts.
    """
    levels, counts, codes = by_frequency(values)
    num = min(int(np.sum(counts >= LEAST_OF_LEVEL)), MOST_MEANS)
    if num < 2 or outputs.shape[1] > MOST_OUTPUTS:
        return None
    level = np.where((0 <= codes) & (codes < num), codes, num)  # the last stands for all that have no mean
    away = outputs - outputs.mean(0)
    weight = np.stack([_weight(level, y, num) for y in away.T], -1)
    part = np.random.default_rng(seed).permutation(len(values)) % PARTS
    columns = np.zeros_like(away)
    for k in range(PARTS):
        here = part == k
        columns[here] = _shrunk(level[~here], away[~here], weight, num)[level[here]]
    scale = columns.std(0)
    used = (weight > 0) & (scale > 0)
    if not used.any():
        return None
    means = _shrunk(level, away, weight, num)[:-1, used] / scale[used]
    found = LevelMeans(tuple(levels[:num]), tuple(tuple(column) for column in means.T.tolist()))
    return found, list((columns[:, used] / scale[used]).T)


def warn_of_names(name: str, numbers: np.ndarray, y: np.ndarray, least: int) -> None:
    """Warn of whole numbers between which outputs differ without order, as numbers of shops or patients.

    :param numbers: a column, NaN where missing, shape (N,).
    :param y: outputs, shape (N,).
    :param least: number of different numbers from which it is said.
    """
    if num := _without_order(numbers, y, least):
        warnings.warn(
            f"Column {name!r} of `X` has {num} different whole numbers, between which `y` "
            "differs without order, as if they were names, such as those of shops. If they are, make them text: "
            f"'no. ' + table[{name!r}].astype(str).",
            stacklevel=2,
        )


def _without_order(numbers: np.ndarray, y: np.ndarray, least: int) -> int:
    r"""Number of levels if numbers are like names: whole, recurring, none in more than half of the rows, and with mean outputs that
    differ clearly, as much between neighbours as between any two (von Neumann 1941). Otherwise zero.

    Squared differences of means are divided by what they are by chance, :math:`\sigma^2 (1/n_i + 1/n_j)`.
    """
    known = np.isfinite(numbers)
    if (numbers[known] != np.round(numbers[known])).any():
        return 0
    _, level, counts = np.unique(numbers[known], return_inverse=True, return_counts=True)
    num, y = len(counts), y[known]
    if num < least or counts.max() > len(y) / 2 or len(y) < LEAST_OF_LEVEL * num:
        return 0
    means = np.bincount(level, y) / counts
    within = np.sum((y - means[level]) ** 2) / max(len(y) - num, 1)
    if within <= np.finfo(float).eps * y.var():
        return 0

    def squares(order: np.ndarray) -> float:
        m, n = means[order], counts[order]
        return float(np.mean(np.diff(m) ** 2 / (within * (1 / n[1:] + 1 / n[:-1]))))

    rng = np.random.default_rng(0)
    of_any = float(np.mean([squares(rng.permutation(num)) for _ in range(ORDERS)]))
    return num if of_any > CLEAR and squares(np.arange(num)) - 1 > WITHOUT_ORDER * (of_any - 1) else 0


def _weight(level: np.ndarray, y: np.ndarray, num_levels: int) -> float:
    r""":math:`\tau^2 / \sigma^2`, infinite without variance within levels; zero if the levels' means differ no more than by chance,
    their mean square by two standard deviations."""
    y, level = y[level < num_levels], level[level < num_levels]
    counts = np.bincount(level, minlength=num_levels)
    means = np.bincount(level, y, num_levels) / counts
    between, within = np.sum(counts * (means - y.mean()) ** 2), np.sum((y - means[level]) ** 2)
    free, spare = num_levels - 1, len(y) - num_levels
    each = (len(y) - np.sum(counts**2) / len(y)) / free  # rows per level
    if between <= 1e-12 * np.sum(y**2):
        return 0.0
    ratio = np.inf if within <= 1e-12 * between else (between / free) / (within / spare)
    return float((ratio - 1) / each) if ratio > 1 + 2 * (2 / free) ** 0.5 else 0.0


def _shrunk(level: np.ndarray, away: np.ndarray, weight: np.ndarray, num_levels: int) -> np.ndarray:
    """Shrunk means of the levels, shape (L + 1, K); the last is zero."""
    counts = np.bincount(level, minlength=num_levels + 1)[:, None]
    sums = np.stack([np.bincount(level, y, num_levels + 1) for y in away.T], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        strength = np.where(weight > 0, 1 / weight, np.inf)
        means = np.where(counts > 0, sums / (counts + strength), 0.0)
    means[-1] = 0.0
    return means
