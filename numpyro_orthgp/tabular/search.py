"""Hyperparameters and inducing points of a collapsed regression: a few searches, each with more rows and more points.

A search is L-BFGS with points that stay where they are. They are picked for the kernel that the search before has found, where it
is least certain (Burt et al. 2020), which is what Ober et al. 2024 recommend. Hyperparameters are known from twenty rows a point,
so early searches are cheap; all rows come in at the end, in closed form. It goes on while held-out rows gain by it (where these are
few: while the bounds leave a gap) and time is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.diagnostics.tails import fit_tails
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.neighbors import NeighborFunction, with_neighbors
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.models import regression_model
from numpyro_orthgp.tabular.points import Values, kernel_of, points_for
from numpyro_orthgp.tabular.stages import (
    CLEARLY,
    ENOUGH,
    FIRST_POINTS,
    LEAST_ROWS,
    MOST_POINTS,
    ROWS_PER_POINT,
    Found,
    Stage,
    moments,
    while_it_pays,
)
from numpyro_orthgp.tabular.starts import starts
from numpyro_orthgp.tabular.tails import folds
from numpyro_orthgp.training import FitResult, fit_lbfgs

__all__ = ["LeftOut", "calibrate", "function_of", "log_densities", "new_guide", "predictor_of", "search"]

MANY_HELD = 500  # rows by which the tails of a distribution are known
MOST_WORK = 1e10  # N M^2 of the last step, which has no gradient
STEP, MOST_CHANGES = 1.4, 6  # factors of the noise
TOLERANCE = 0.05  # nats, of a search
SEARCHES = 0.75  # of the time, that the searches may take
FOLD_POINTS = 400  # of a search for rows that are left out
FLAT = {"scale": 1e-3, "slope": 1e-3, "noise": 1.0}  # the mean and the standard deviation


def function_of(values: Values, X: Any, y: Any, Z: Any) -> GPFunction:
    """The function given the rows, in closed form; one program."""
    return _function(jax.tree.map(jnp.asarray, values), jnp.asarray(X), jnp.asarray(y), jnp.asarray(Z))


def predictor_of(values: Values, X: Any, y: Any, Z: Any, near: bool) -> GPFunction | NeighborFunction:
    """What predicts: the function, or with the rows nearest to each input."""
    f = function_of(values, X, y, Z)
    return with_neighbors(f, jnp.asarray(X), jnp.asarray(y), jnp.asarray(values["noise"])) if near else f


@jax.jit
def _function(values: Any, X: Any, y: Any, Z: Any) -> GPFunction:
    return CollapsedGP(kernel_of(values), X, Z, values["noise"]).posterior(y)


@jax.jit
def _bounds(values: Any, X: Any, y: Any, Z: Any) -> tuple[Any, Any]:
    d = CollapsedGP(kernel_of(values), X, Z, values["noise"])
    return d.log_prob(y), d.upper_bound(y)


def log_densities(values: Values, f: GPFunction | NeighborFunction, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    mean, variance = moments(f, X)
    variance = variance + values["noise"] ** 2
    return -0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)


def new_guide() -> AutoDelta:
    """Posterior modes. Its model hides y: it would evaluate the bound, operation by operation, when it is started."""
    return AutoDelta(numpyro.handlers.block(regression_model, hide=["y"]))


def as_params(values: Values) -> dict[str, Any]:
    """Parameters of ``AutoDelta``."""
    return {f"{name}_auto_loc": jnp.asarray(value) for name, value in values.items()}


def as_values(params: dict[str, Any]) -> Values:
    return {name.removesuffix("_auto_loc"): np.asarray(value) for name, value in params.items()}


class LeftOut(NamedTuple):
    """Rows to predict, and what they are predicted with."""

    values: Values
    Z: np.ndarray
    X: np.ndarray
    y: np.ndarray
    X_new: np.ndarray
    y_new: np.ndarray

    def predicted(self, factor: float, near: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means and variances of new outputs with so many times the noise, and the outputs that came."""
        values = self.values | {"noise": self.values["noise"] * factor}
        mean, variance = moments(predictor_of(values, self.X, self.y, self.Z, near), self.X_new)
        return mean, variance + values["noise"] ** 2, self.y_new


@dataclass
class _Searches:
    """Rows in random order, the held-out ones apart."""

    X: np.ndarray
    y: np.ndarray
    X_held: np.ndarray
    y_held: np.ndarray
    budget: Budget

    def __post_init__(self) -> None:
        self.svi = SVI(regression_model, new_guide(), optax.adam(0.01), Trace_ELBO())

    def stage(self, num_points: int, name: str, values: Values) -> tuple[Stage, Values]:
        begin, num_rows = self.budget.spent, self.rows_for(num_points)
        X, y = self.X[:num_rows], self.y[:num_rows]
        Z = points_for(values, X, num_points)
        fit = self.lowest(X, y, Z, values)
        values = as_values(fit.params)
        score = self.score(values, X, y, Z).mean() if len(self.y_held) else np.nan
        gap = np.nan  # its program takes seconds to compile, for nothing where held-out rows decide
        if len(self.y_held) < ENOUGH:
            exact = num_points == num_rows
            lower, upper = (0.0, 0.0) if exact else _bounds(jax.tree.map(jnp.asarray, values), X, y, Z)
            gap = float(upper - lower) / num_rows
        loss, seconds = float(fit.losses.min(initial=np.inf)), self.budget.spent - begin
        return Stage(num_rows, num_points, name, loss, fit.status, fit.num_steps, float(score), gap, seconds), values

    def lowest(self, X: np.ndarray, y: np.ndarray, Z: np.ndarray, start: Values) -> FitResult:
        options: dict[str, Any] = {"num_steps": self.budget.num_steps, "tolerance": TOLERANCE, "restarts": 1}
        options |= {"init_params": as_params(start), "callback": self.budget.watch, "Z": Z}
        fit = fit_lbfgs(self.svi, jax.random.PRNGKey(0), (X, y), **options)
        if fit.status == "interrupted" and self.budget.allows(0.0):  # by the user, not by the clock
            raise KeyboardInterrupt
        return fit

    def score(self, values: Values, X: Any, y: Any, Z: Any) -> np.ndarray:
        return log_densities(values, function_of(values, X, y, Z), self.X_held, self.y_held)

    def left_out(self, X: np.ndarray, y: np.ndarray, values: Values, last: Stage, num_points: int) -> list[LeftOut]:
        """Rows to calibrate with, that hyperparameters have not seen: the held-out ones if they are many. If they are few, all
        rows, a fifth at a time, each fifth with a search of its own among the others."""
        if len(self.y_held) >= MANY_HELD:
            num = min(num_points, len(self.y))
            return [LeftOut(values, points_for(values, self.X, num), self.X, self.y, self.X_held, self.y_held)]
        parts = []
        for known, new in folds(len(y)):
            found = values
            if self.budget.allows(0.0):
                Z = points_for(values, X[known], min(last.num_points, len(known), FOLD_POINTS))
                found = as_values(self.lowest(X[known], y[known], Z, values).params)
            Z = points_for(found, X[known], min(num_points, len(known)))
            parts.append(LeftOut(found, Z, X[known], y[known], X[new], y[new]))
        return parts

    def rows_for(self, num_points: int) -> int:
        return min(len(self.y), max(LEAST_ROWS, ROWS_PER_POINT * num_points))


def search(X: np.ndarray, y: np.ndarray, num_held: int, budget: Budget) -> Found:
    """
    :param X: standardized columns, shape (N, D), rows in random order.
    :param y: standardized outputs, shape (N,).
    :param num_held: how many of the first rows are held out from the searches; they are in the fit that is returned.
    """
    searches = _Searches(X[num_held:], y[num_held:], X[:num_held], y[:num_held], budget.part(SEARCHES))
    num_rows = len(searches.y)
    first = min(budget.num_points or FIRST_POINTS, num_rows)
    rows = searches.rows_for(first)
    begin = starts(searches.X[:rows], searches.y[:rows])
    tried = [searches.stage(first, name, values | {"noise": np.array(0.3)}) for name, values in begin.items()]
    stages, (last, values), grows = while_it_pays(
        tried, searches.stage, searches.budget, num_rows, num_held, searches.rows_for
    )
    searches.budget = budget  # all of it, for what comes after
    return finish(X, y, searches, values, stages, last, grows)


def finish(X: Any, y: Any, searches: _Searches, values: Values, stages: list[Stage], last: Stage, grows: bool) -> Found:
    """All rows, and the points for them; the mean instead, where that predicts rows left out better."""
    num_points, baseline, is_mean, near_noise, tails = last.num_points, np.nan, False, None, (np.inf, 1.0)
    if grows:
        most = min(MOST_POINTS, int((MOST_WORK / len(y)) ** 0.5))
        num_points = min(len(y), max(num_points, min(most, 2 * num_points)))
    if len(searches.y_held):
        parts = searches.left_out(X, y, values, last, num_points)
        outputs = np.concatenate([part.y_new for part in parts])
        baseline = float(np.mean(-0.5 * (np.log(2 * np.pi) + outputs**2)))
        values, near_noise, score, found = calibrate(parts, values, searches.budget)
        is_mean = bool(score < baseline)
        tails = (np.inf, 1.0) if is_mean else fit_tails(found)
    if is_mean:
        values, near_noise = values | {k: np.array(v) for k, v in FLAT.items()}, None
    Z = points_for(values, X, num_points)
    params = {name: np.asarray(value) for name, value in as_params(values).items()}
    return Found(values, Z, params, stages, baseline, is_mean, near_noise, *tails)


def calibrate(parts: list[LeftOut], values: Values, budget: Budget) -> tuple[Values, float | None, float, np.ndarray]:
    """The noise, changed if rows left out are clearly predicted better with it; that of predictions with neighbours, if these are
    clearly better; the mean log density of the rows then, and their distances from predictions, in predicted standard deviations.

    Of few rows, and of outputs with heavy tails, modes of the hyperparameters leave too small a noise. Where there are fewer points
    than rows, the rows near each input may say more than the points do, and with them what the points miss is no noise any longer.
    """

    def at(factor: float, near: bool) -> tuple[float, np.ndarray]:
        mean, variance, y = map(np.concatenate, zip(*(part.predicted(factor, near) for part in parts), strict=True))
        z = (y - mean) / np.sqrt(variance)
        return float(np.sum(-0.5 * (np.log(2 * np.pi * variance) + z**2))), z

    def climb(near: bool, steps: tuple[float, ...]) -> tuple[float, float, np.ndarray]:
        (best, distances), factor = at(1.0, near), 1.0
        for step in steps:
            for _ in range(MOST_CHANGES):
                if not budget.allows(0.0):
                    break
                score, other = at(factor * step, near)
                if score < best + CLEARLY:
                    break
                factor, best, distances = factor * step, score, other
        return factor, best, distances

    factor, best, distances = climb(False, (STEP,))
    num, near_noise = len(distances), None
    if any(len(part.Z) < len(part.y) for part in parts) and budget.allows(0.0):
        near, score, others = climb(True, (1 / STEP, STEP))
        if score > best + CLEARLY:
            near_noise, best, distances = float(values["noise"] * near), score, others
    return values | {"noise": values["noise"] * factor}, near_noise, best / num, distances
