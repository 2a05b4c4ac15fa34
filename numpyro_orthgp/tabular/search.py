"""Search for hyperparameters and inducing points of a collapsed regression. Each search has more rows and more points.

A search is L-BFGS with fixed inducing points. They are picked where the conditional variance is largest (Burt et al. 2020), for the
kernel of the previous search, as Ober et al. 2024 recommend. Twenty rows per point determine the hyperparameters, so early searches
are cheap. All rows enter at the end, in closed form. Searches go on while held-out rows gain (if these are few, while the bounds
leave a gap) and time is left.

On small tables, compilation takes longer than a run. If rows are few, different rows are left out repeatedly. All programs then
have one shape: they take all rows, and rows left out are marked as not observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import Trace_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoDelta

from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.collapsed.blocks import RowSums
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.neighbors import NeighborFunction
from numpyro_orthgp.math.compiled import quick_jit
from numpyro_orthgp.tabular.blocks import moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.models import regression_model
from numpyro_orthgp.tabular.near import Near
from numpyro_orthgp.tabular.points import Values, as_params, as_values, kernel_of, points_for
from numpyro_orthgp.tabular.stages import (
    ENOUGH,
    FIRST_POINTS,
    FOLDS,
    LEAST_ROWS,
    ROWS_PER_POINT,
    Found,
    Stage,
    lowest,
    while_it_pays,
)
from numpyro_orthgp.tabular.starts import SHORTER, Alternative, in_order, shorter
from numpyro_orthgp.tabular.units import Outputs
from numpyro_orthgp.training import FitResult, fit_lbfgs
from numpyro_orthgp.training.objective import OfArguments

__all__ = [
    "MANY_HELD", "Rows", "Searched", "Searches", "everything", "function_of", "functions_of", "new_guide",
    "predictor_of", "search",
]  # fmt: skip

MANY_HELD = 500  # held-out rows that suffice for the distribution of errors
TOLERANCE = 0.05  # tolerance of a search, nats
TAKEN_FOR_NOISE = 0.9  # noise above which a further search starts from shorter lengthscales
SEARCHES = 2 / 3  # share of the time for the searches
SEARCHES_OF_MANY = 0.5  # the same for many rows, which are learned from once more


class Rows(NamedTuple):
    """Training rows.

    :param X, y: standardized columns and outputs, (N, D) and (N,).
    :param observed: False for rows that are left out, shape (N,); ``None`` if none are.
    """

    X: np.ndarray
    y: np.ndarray
    observed: np.ndarray | None = None

    @property
    def num(self) -> int:
        return len(self.y) if self.observed is None else int(self.observed.sum())

    def points(self, values: Values, num_points: int) -> np.ndarray:
        return points_for(values, self.X, num_points, self.observed)


def everything(X: np.ndarray, y: np.ndarray, num_held: int) -> Rows:
    """All rows, in the form that most programs of :class:`Searches` take."""
    return Rows(X, y, np.ones(len(y), bool) if num_held < MANY_HELD else None)


def function_of(values: Values, rows: Rows, Z: Any) -> GPFunction:
    """The function given the rows, in closed form, by one compiled program."""
    return _function(*_arrays(values, rows), jnp.asarray(Z))


def predictor_of(near: Near, rows: Rows) -> NeighborFunction:
    """The function for predictions that also use the rows nearest to each input."""
    seen = slice(None) if rows.observed is None else rows.observed
    return near.given(function_of(near.values, rows, near.Z), rows.X[seen], rows.y[seen])


def functions_of(
    found: Found, rows: Rows, sums: RowSums | None = None
) -> tuple[GPFunction, GPFunction | NeighborFunction]:
    """The model's function and the one that predicts, given the rows, or given those in ``sums``."""
    near = found.near
    f = function_of(found.values, rows, found.Z) if sums is None else sums.function()
    if near is None:
        return f, f
    if sums is None or near.own:
        return f, predictor_of(near, rows)
    return f, near.given(sums.function(near.noise / float(found.values["noise"])), rows.X, rows.y)


def _arrays(values: Values, rows: Rows) -> tuple[Any, Any]:
    return jax.tree.map(jnp.asarray, (values, rows))


def _collapsed(values: Any, rows: Any, Z: Any) -> CollapsedGP:
    return CollapsedGP(kernel_of(values), rows.X, Z, values["noise"], observed=rows.observed)


def _given(values: Any, rows: Any, Z: Any) -> GPFunction:
    return _collapsed(values, rows, Z).posterior(rows.y)


def _both_bounds(values: Any, rows: Any, Z: Any) -> tuple[Any, Any]:
    d = _collapsed(values, rows, Z)
    return d.log_prob(rows.y), d.upper_bound(rows.y)


_function, _bounds = quick_jit(_given, 0), quick_jit(_both_bounds, 0)


def new_guide() -> AutoDelta:
    """A guide of posterior modes. Its model hides y, since its setup would evaluate the bound operation by operation. Each fit is
    given initial values, so the cheapest initialization suffices here."""
    return AutoDelta(numpyro.handlers.block(regression_model, hide=["y"]), init_loc_fn=init_to_feasible())


class Searched(NamedTuple):
    """Start or result of a search.

    :param values: values of the hyperparameters.
    :param outputs: y or its logarithm.
    """

    values: Values
    outputs: Outputs


@dataclass
class Searches:
    """Searches on rows in random order, the first ``num_held`` of which are held out.

    :param X: standardized columns, shape (N, D); after :func:`search` those of the best search.
    """

    X: np.ndarray
    num_held: int
    budget: Budget

    def __post_init__(self) -> None:
        self.svi = OfArguments(regression_model, new_guide(), optax.adam(0.01), Trace_ELBO())

    @property
    def are_few(self) -> bool:
        """Whether held-out rows are so few that all rows are left out in turn."""
        return self.num_held < MANY_HELD

    def rows_for(self, num_points: int) -> int:
        return min(len(self.X) - self.num_held, max(LEAST_ROWS, ROWS_PER_POINT * num_points))

    def rows(self, y: np.ndarray, num: int) -> Rows:
        """The first ``num`` rows that are not held out. If rows are few, held-out ones are included, marked as not observed."""
        first, last = self.num_held, self.num_held + num
        if self.are_few:
            return Rows(self.X[:last], y[:last], np.arange(last) >= first)
        return Rows(self.X[first:last], y[first:last])

    def stage(self, num_points: int, name: str, begun: Searched) -> tuple[Stage, Searched]:
        begin, num_rows = self.budget.spent, self.rows_for(num_points)
        y, log_slopes, *_ = begun.outputs
        held, seen = slice(0, self.num_held), slice(self.num_held, self.num_held + num_rows)
        rows = self.rows(y, num_rows)
        Z = rows.points(begun.values, num_points)
        fit = self.fitted(rows, Z, begun.values)
        values = as_values(fit.params)
        score, gap = (
            np.nan,
            np.nan,
        )  # the gap's program takes seconds to compile, and is not needed if held-out rows decide
        if self.num_held:
            f = function_of(values, rows, Z)
            score = float((log_densities(values, f, self.X[held], y[held]) + log_slopes[held]).mean())
        if self.num_held < ENOUGH:
            lower, upper = (0.0, 0.0) if len(Z) == num_rows else _bounds(*_arrays(values, rows), jnp.asarray(Z))
            gap = float(upper - lower) / num_rows
        loss = float(fit.losses.min(initial=np.inf)) - float(log_slopes[seen].sum())
        seconds = self.budget.spent - begin
        stage = Stage(num_rows, len(Z), name, loss, fit.status, fit.num_steps, score, gap, seconds)
        return stage, Searched(values, begun.outputs)

    def first(self, num_points: int, inputs: list[np.ndarray], outputs: list[Outputs]) -> list[tuple[Stage, Searched]]:
        """The searches from all starts while there is time, and one at least. The inputs of the best are those of further ones.

        :param inputs, outputs: the alternatives, as for :func:`search`.
        """
        plain, *others = outputs
        seen = slice(self.num_held, self.num_held + self.rows_for(num_points))
        forms = [Alternative(o.values[seen, None], float(o.log_slopes[seen].mean())) for o in outputs]
        order = in_order([X[seen] for X in inputs], [plain.values[seen]], forms)
        tried: list[tuple[Stage, Searched]] = []
        best = self.X

        def go(name: str, values: Values, outputs: Outputs) -> None:
            nonlocal best
            if not tried or self.budget.allows(0.0):
                tried.append(self.stage(num_points, name, Searched({"noise": np.array(0.3)} | values, outputs)))
                best = self.X if lowest(tried) is tried[-1] else best

        for place, (i, begin) in enumerate(order):
            self.X = inputs[i]
            chosen = lowest(tried)[1].outputs if tried else plain
            for name, values in begin.items():
                go(name, values, chosen)
            if place == 0:
                if SHORTER not in begin and lowest(tried)[1].values["noise"] > TAKEN_FOR_NOISE:
                    go(SHORTER, shorter(self.X.shape[1]), plain)
                for other in others:
                    go("the logarithm of y", lowest(tried)[1].values, other)
        self.X = best
        return tried

    def fitted(self, rows: Rows, Z: np.ndarray, start: Values) -> FitResult:
        options: dict[str, Any] = {"num_steps": self.budget.num_steps, "tolerance": TOLERANCE, "restarts": 1}
        options |= {"init_params": as_params(start), "callback": self.budget.watch, "Z": Z}
        if rows.observed is not None:
            options["observed"] = rows.observed
        fit = fit_lbfgs(self.svi, jax.random.key(0), (rows.X, rows.y), **options)
        self.budget.note(fit)
        return fit


def log_densities(values: Values, f: GPFunction, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    mean, variance = moments(f, X)
    variance = variance + values["noise"] ** 2
    return -0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)


def search(
    X: np.ndarray, outputs: list[Outputs], num_held: int, budget: Budget, warped: np.ndarray | None = None
) -> tuple[Searches, list[Stage], Stage, Searched, bool]:
    """
    :param X: standardized columns, shape (N, D), rows in random order.
    :param warped: X with maps of skewed columns, if it is to be tried. Bounds for both are densities of y, so the lower loss wins.
    :param outputs: y, and its logarithm if that is to be tried; the lower loss wins.
    :param num_held: number of first rows that the searches do not see; the returned fit includes them.
    :return: a ``Searches`` for further searches; all stages; the best one and its result; whether more points still paid.
    """
    searches = Searches(X, num_held, budget.part(SEARCHES if num_held < MANY_HELD else SEARCHES_OF_MANY))
    num_rows = len(X) - num_held
    # As many rows remain when a fifth is left out, so the programs are the same.
    most = num_rows if budget.num_points is not None else max(len(X) - -(-len(X) // FOLDS), 1)
    first = min(budget.num_points or FIRST_POINTS, most)
    tried = searches.first(first, [X] if warped is None else [X, warped], outputs)
    stages, (last, ended), grows = while_it_pays(
        tried, searches.stage, searches.budget, num_rows, num_held, searches.rows_for
    )
    searches.budget = budget  # the whole budget, for later searches
    return searches, stages, last, ended, grows
