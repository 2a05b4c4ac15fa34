"""The searches of every fit of a table: each has twice the points of the one before, while this pays and time is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.mixtures import STANDARD, Mixture
from numpyro_orthgp.tabular.near import Near
from numpyro_orthgp.tabular.points import Values
from numpyro_orthgp.tabular.votes import Votes

__all__ = ["Found", "Search", "Stage", "Tried", "lowest", "while_it_pays"]

FIRST_POINTS, MOST_POINTS = 100, 1600
LEAST_ROWS, ROWS_PER_POINT = 1000, 20
PAYS = 0.005  # nats per row that twice the points must gain
FAR = 0.2  # gap of the bounds, nats per row, above which the next search has four times the points
ENOUGH = 200  # held-out rows that suffice to decide; with fewer the bound decides
FEW_STEPS = 5  # steps that a search must have time for
CLEARLY = 1.0  # nats that a change must gain on all held-out rows together
FOLDS = 5  # folds if rows are few, each left out once


class Stage(NamedTuple):
    """One search.

    :param num_rows, num_points: numbers of rows and inducing points.
    :param start: name of the start; later searches start from the result of the previous one.
    :param loss: the lowest loss, or the mean of the last tenth of the steps if losses are estimates.
    :param status, num_steps: status and number of steps of the fit.
    :param held_out: mean log density of the held-out rows; NaN if there are none.
    :param gap: upper minus lower bound of the log evidence, per row, nats; NaN if no upper bound is known, or held-out rows are
        many and decide.
    :param seconds: duration, with compilation.
    """

    num_rows: int
    num_points: int
    start: str
    loss: float
    status: str
    num_steps: int
    held_out: float
    gap: float
    seconds: float


@dataclass
class Found:
    """
    :param values: values of the hyperparameters.
    :param Z: inducing points for all rows.
    :param params: parameters of the guide.
    :param stages: the searches.
    :param baseline: mean log density of held-out rows under a distribution that does not depend on inputs.
    :param is_mean: whether this distribution is better and replaces the fit.
    :param near: for numbers, how predictions use the rows nearest to each input; ``None`` if they do not.
    :param errors: for numbers, the distribution of prediction errors, in the model's standard deviations.
    :param sharpness: for labels, the power of the probabilities relative to the shares of the classes.
    :param votes: for labels, how those of near rows count; ``None`` if they do not.
    :param regularity: for counts, above 1 if they vary less than Poisson ones.
    :param losses: losses of the last fit, if they are estimates.
    """

    values: Values
    Z: np.ndarray
    params: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    baseline: float = np.nan
    is_mean: bool = False
    near: Near | None = None
    errors: Mixture = STANDARD
    sharpness: float = 1.0
    votes: Votes | None = None
    regularity: float = 1.0
    losses: np.ndarray | None = None


Tried = tuple[Stage, Any]  # a search and its result
Search = Callable[[int, str, Any], Tried]  # number of points, name and values of the start


def lowest(tried: Iterable[Tried]) -> Tried:
    """The search with the lowest loss."""
    return min(tried, key=lambda pair: pair[0].loss)


def while_it_pays(
    tried: Iterable[Tried],
    search: Search,
    budget: Budget,
    num_rows: int,
    num_held: int,
    rows_for: Callable[[int], int],
    least_time: Callable[[int], float] | None = None,
) -> tuple[list[Stage], Tried, bool]:
    """Take the best of the first searches, and continue with twice the points while this pays.

    :param tried: the first searches; the lowest loss wins.
    :param num_rows: number of rows that the searches may see.
    :param rows_for: maps a number of points to the number of rows that a search sees.
    :param least_time: maps a number of points to the seconds without which a search is not worth its start; by default those of
        five steps, as long as those of the search before, compilation included, times the growth of N M^2.
    :return: all searches, the best one with its result, and whether more points still paid.
    """
    tried = list(tried)
    stages = [stage for stage, _ in tried]
    last, ended = lowest(tried)
    pays = budget.num_points is None and not (num_held < ENOUGH and last.gap <= PAYS)
    while pays and last.num_points < min(MOST_POINTS, num_rows):
        num_points = min((4 if last.gap > FAR else 2) * last.num_points, MOST_POINTS, num_rows)
        growth = max(1.0, rows_for(num_points) * num_points**2 / (last.num_rows * last.num_points**2))
        # Three evaluations before the first step.
        least = least_time(num_points) if least_time else FEW_STEPS * growth * last.seconds / (last.num_steps + 3)
        if not budget.allows(max(min(0.1 * growth, 0.4) * last.seconds, least)):
            break
        stage, new = search(num_points, "the search before", ended)
        stages.append(stage)
        if num_held >= ENOUGH:
            pays, better = stage.held_out > last.held_out + PAYS, stage.held_out > last.held_out - PAYS
        elif np.isnan(stage.gap):
            gained = (last.loss - stage.loss) / stage.num_rows
            pays, better = gained > PAYS, gained > 0
        else:
            pays, better = stage.gap > PAYS, True
        if better:  # otherwise the previous search is the best
            last, ended = stage, new
    return stages, (last, ended), pays
