"""Hyperparameters and inducing points of a collapsed regression: a few searches, each with more rows and more points.

A search is L-BFGS with points that stay where they are. They are picked for the kernel that the search before has found, where it
is least certain (Burt et al. 2020), which is what Ober et al. 2024 recommend. Hyperparameters are known from twenty rows a point,
so early searches are cheap; all rows come in at the end, in closed form. It goes on while held-out rows gain by it (where these are
few: while the bounds leave a gap) and time is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from numpyro_orthgp.init import greedy_variance
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.models import covariance, regression_model
from numpyro_orthgp.tabular.starts import starts
from numpyro_orthgp.training import FitResult, fit_lbfgs

__all__ = ["Found", "Stage", "function_of", "moments", "predictor_of", "search"]

Values = dict[str, np.ndarray]  # of the hyperparameters, by site

FIRST_POINTS, LEAST_ROWS, ROWS_PER_POINT = 100, 1000, 20
MOST_POINTS = 1600
PAYS = 0.005  # nats for a held-out row, that twice the points must gain
ENOUGH = 200  # held-out rows to go by; with fewer the gap between lower and upper bound must be worth as much
MOST_WORK = 1e10  # N M^2 of the last step, which has no gradient
STEP, MOST_CHANGES, CLEARLY = 1.4, 6, 1.0  # factors of the noise, and nats of all held-out rows that each must gain
TOLERANCE = 0.05  # nats, of a search
ROWS_AT_ONCE = 1024  # of predictions


class Stage(NamedTuple):
    """One search.

    :param num_rows, num_points: of it.
    :param start: its name, or where the one before ended.
    :param fit: what the optimizer says.
    :param held_out: mean log density of the held-out rows, standardized; NaN if there are none.
    :param gap: upper less lower bound of the log evidence, per row, nats; NaN where it was not computed.
    :param seconds: compilation too.
    """

    num_rows: int
    num_points: int
    start: str
    fit: FitResult
    held_out: float
    gap: float
    seconds: float


@dataclass
class Found:
    """
    :param values: of the hyperparameters.
    :param Z: inducing points for all rows.
    :param params: of the guide.
    :param stages: the searches.
    :param baseline: mean log density of held-out rows under a normal distribution that knows no inputs.
    :param is_mean: whether that one is better, so that it was taken.
    :param near_noise: the noise of predictions that also use the rows nearest to each input; ``None`` where they do not.
    """

    values: Values
    Z: np.ndarray
    params: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    baseline: float = np.nan
    is_mean: bool = False
    near_noise: float | None = None


def kernel_of(values: Values) -> Kernel:
    """The model's kernel at these hyperparameters."""
    with numpyro.handlers.block(), numpyro.handlers.substitute(data=values):
        return covariance(len(values["lengthscale"]))


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


@jax.jit
def _moments(f: GPFunction | NeighborFunction, X: Any) -> tuple[Any, Any]:
    marginals = f(X)
    return marginals.mean, marginals.variance


def moments(f: GPFunction | NeighborFunction, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances at any number of inputs: blocks of one size, so that there is one program."""
    means, variances = [], []
    for first in range(0, len(X), ROWS_AT_ONCE):
        rows = X[first : first + ROWS_AT_ONCE]
        padded = np.concatenate([rows, np.repeat(rows[:1], ROWS_AT_ONCE - len(rows), axis=0)])
        mean, variance = _moments(f, jnp.asarray(padded))
        means.append(np.asarray(mean)[: len(rows)])
        variances.append(np.asarray(variance)[: len(rows)])
    return np.concatenate(means), np.concatenate(variances)


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

    def stage(self, num_rows: int, num_points: int, name: str, values: Values) -> tuple[Stage, Values]:
        begin = self.budget.spent
        X, y = self.X[:num_rows], self.y[:num_rows]
        Z = np.asarray(greedy_variance(kernel_of(values), jnp.asarray(X), num_points))
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
        return Stage(num_rows, num_points, name, fit, float(score), gap, self.budget.spent - begin), values

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
    first = min(budget.num_points or FIRST_POINTS, len(searches.y))
    rows = searches.rows_for(first)
    tried = [searches.stage(rows, first, *start) for start in starts(searches.X[:rows], searches.y[:rows]).items()]
    stages = [stage for stage, _ in tried]
    _, values = min(tried, key=lambda pair: pair[0].fit.losses.min(initial=np.inf))
    last = min(stages, key=lambda stage: stage.fit.losses.min(initial=np.inf))
    pays = budget.num_points is None
    while pays and last.num_points < min(MOST_POINTS, len(searches.y)):
        num_points = min(2 * last.num_points, len(searches.y))
        rows = searches.rows_for(num_points)
        growth = max(1.0, rows * num_points**2 / (last.num_rows * last.num_points**2))
        if not budget.allows(min(0.25 * growth, 1.0) * last.seconds):
            break
        stage, new = searches.stage(rows, num_points, "the search before", values)
        stages.append(stage)
        pays = stage.held_out > last.held_out + PAYS if num_held >= ENOUGH else stage.gap > PAYS
        if num_held < ENOUGH or stage.held_out > last.held_out - PAYS:  # else the points before were better
            values, last = new, stage
    return finish(X, y, searches, values, stages, last, grows=pays)


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
    Z = np.asarray(greedy_variance(kernel_of(values), jnp.asarray(X), num_points))
    params = {name: np.asarray(value) for name, value in as_params(values).items()}
    return Found(values, Z, params, stages, baseline, is_mean, None if is_mean else near_noise)


def calibrate(searches: _Searches, values: Values, num_points: int) -> tuple[Values, float | None, float]:
    """The noise, changed if held-out rows are clearly predicted better with it; that of predictions with neighbours, if these are
    clearly better; the mean log density of the held-out rows then.

    Of few rows, and of outputs with heavy tails, modes of the hyperparameters leave too small a noise. Where there are fewer points
    than rows, the rows near each input may say more than the points do, and with them what the points miss is no noise any longer.
    """
    Z = np.asarray(greedy_variance(kernel_of(values), jnp.asarray(searches.X), num_points))

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
