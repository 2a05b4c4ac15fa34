"""Hyperparameters and inducing points of a collapsed regression: a few searches, each with more rows and more points.

A search is L-BFGS with points that stay where they are. They are picked for the kernel that the search before has found, where it
is least certain (Burt et al. 2020), which is what Ober et al. 2024 recommend. Hyperparameters are known from twenty rows a point,
so early searches are cheap; all rows come in at the end, in closed form. It goes on while held-out rows gain by it (where these are
few: while the bounds leave a gap) and time is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.neighbors import NeighborFunction, with_neighbors
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.models import regression_model
from numpyro_orthgp.tabular.points import Values, kernel_of, points_for
from numpyro_orthgp.tabular.stages import (
    CLEARLY,
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
from numpyro_orthgp.tabular.tails import left_out
from numpyro_orthgp.training import fit_lbfgs

__all__ = ["distances", "function_of", "log_densities", "new_guide", "predictor_of", "search"]

MANY_HELD = 500  # rows by which the tails of a distribution are known
MOST_WORK = 1e10  # N M^2 of the last step, which has no gradient
STEP, MOST_CHANGES = 1.4, 6  # factors of the noise
TOLERANCE = 0.05  # nats, of a search


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
        options: dict[str, Any] = {
            "num_steps": self.budget.num_steps,
            "tolerance": TOLERANCE,
            "restarts": 1,
            "callback": self.budget.watch,
        }
        fit = fit_lbfgs(self.svi, jax.random.PRNGKey(0), (X, y), init_params=as_params(values), Z=Z, **options)
        if fit.status == "interrupted" and self.budget.allows(0.0):  # by the user, not by the clock
            raise KeyboardInterrupt
        values = as_values(fit.params)
        score = self.score(values, X, y, Z).mean() if len(self.y_held) else np.nan
        lower, upper = _bounds(jax.tree.map(jnp.asarray, values), X, y, Z) if num_points < num_rows else (0.0, 0.0)
        gap = float(upper - lower) / num_rows
        loss, seconds = float(fit.losses.min(initial=np.inf)), self.budget.spent - begin
        return Stage(num_rows, num_points, name, loss, fit.status, fit.num_steps, float(score), gap, seconds), values

    def score(self, values: Values, X: Any, y: Any, Z: Any, near: bool = False) -> np.ndarray:
        return log_densities(values, predictor_of(values, X, y, Z, near), self.X_held, self.y_held)

    def rows_for(self, num_points: int) -> int:
        return min(len(self.y), max(LEAST_ROWS, ROWS_PER_POINT * num_points))


def search(X: np.ndarray, y: np.ndarray, num_held: int, budget: Budget) -> Found:
    """
    :param X: standardized columns, shape (N, D), rows in random order.
    :param y: standardized outputs, shape (N,).
    :param num_held: how many of the first rows are held out from the searches; they are in the fit that is returned.
    """
    searches = _Searches(X[num_held:], y[num_held:], X[:num_held], y[:num_held], budget)
    num_rows = len(searches.y)
    first = min(budget.num_points or FIRST_POINTS, num_rows)
    rows = searches.rows_for(first)
    begin = starts(searches.X[:rows], searches.y[:rows])
    tried = [searches.stage(first, name, values | {"noise": np.array(0.3)}) for name, values in begin.items()]
    stages, (last, values), grows = while_it_pays(tried, searches.stage, budget, num_rows, num_held, searches.rows_for)
    return finish(X, y, searches, values, stages, last, grows)


def finish(X: Any, y: Any, searches: _Searches, values: Values, stages: list[Stage], last: Stage, grows: bool) -> Found:
    """All rows, and the points for them; the mean instead, where that predicts the held-out rows better."""
    num_points, baseline, is_mean, near_noise = last.num_points, np.nan, False, None
    if grows:
        most = min(MOST_POINTS, int((MOST_WORK / len(y)) ** 0.5))
        num_points = min(len(y), max(num_points, min(most, 2 * num_points)))
    if len(searches.y_held):
        baseline = float(np.mean(-0.5 * (np.log(2 * np.pi) + searches.y_held**2)))
        values, near_noise, score = calibrate(searches, values, min(num_points, len(searches.y)))
        is_mean = bool(score < baseline)
    if is_mean:
        values = values | {"scale": np.array(1e-3), "slope": np.array(1e-3), "noise": np.array(1.0)}
    Z = points_for(values, X, num_points)
    params = {name: np.asarray(value) for name, value in as_params(values).items()}
    return Found(values, Z, params, stages, baseline, is_mean, None if is_mean else near_noise)


def distances(found: Found, X: np.ndarray, y: np.ndarray, num_held: int) -> np.ndarray:
    """Distances of outputs from predictions without them, in predicted standard deviations: of held-out rows if there are
    many; of all rows, a fifth at a time with the hyperparameters as they are, if there are not."""
    near = found.near_noise is not None
    values = found.values | ({"noise": np.array(found.near_noise)} if near else {})

    def of(known: np.ndarray, new: np.ndarray) -> np.ndarray:
        Z = found.Z[: len(known)]
        mean, variance = moments(predictor_of(values, X[known], y[known], Z, near), X[new])
        return (y[new] - mean) / np.sqrt(variance + values["noise"] ** 2)

    if num_held >= MANY_HELD:
        return of(np.arange(num_held, len(y)), np.arange(num_held))
    return left_out(len(y), of)


def calibrate(searches: _Searches, values: Values, num_points: int) -> tuple[Values, float | None, float]:
    """The noise, changed if held-out rows are clearly predicted better with it; that of predictions with neighbours, if these are
    clearly better; the mean log density of the held-out rows then.

    Of few rows, and of outputs with heavy tails, modes of the hyperparameters leave too small a noise. Where there are fewer points
    than rows, the rows near each input may say more than the points do, and with them what the points miss is no noise any longer.
    """
    Z = points_for(values, searches.X, num_points)

    def climb(values: Values, near: bool, factors: tuple[float, ...]) -> tuple[Values, float]:
        best = float(searches.score(values, searches.X, searches.y, Z, near).sum())
        for factor in factors:
            for _ in range(MOST_CHANGES):
                other = values | {"noise": values["noise"] * factor}
                score = float(searches.score(other, searches.X, searches.y, Z, near).sum())
                if score < best + CLEARLY:
                    break
                values, best = other, score
        return values, best

    chosen, best = climb(values, False, (STEP,))
    if num_points < len(searches.y):
        with_near, score = climb(values, True, (1 / STEP, STEP))
        if score > best + CLEARLY:
            return chosen, float(with_near["noise"]), score / len(searches.y_held)
    return chosen, None, best / len(searches.y_held)
