"""From a table and a column of numbers to predictions, :func:`regression`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics import Report, check
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.neighbors import NeighborFunction
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.importance import importance_of
from numpyro_orthgp.tabular.models import regression_model
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.rows import observed_numbers, order_of
from numpyro_orthgp.tabular.search import Found, function_of, moments, new_guide, predictor_of, search

__all__ = ["RegressionFit", "regression"]


def regression(
    X: Any, y: Any, *, time: float | None = 60.0, M: int | None = None, num_steps: int | None = None, seed: int = 0
) -> RegressionFit:
    r"""A Gaussian-process regression of y on the columns of a table, with nothing to choose.

    ::

        fit = ogp.regression(X, y)  # a minute at most
        print(fit)  # what was done, and what came of it
        new = fit.predict(X_new)
        lower, upper = new.interval(0.95)

    **What it does.** Columns are standardized, categories become columns of -1 and 1, missing entries the median and a column that
    tells which; rows whose y is missing are left out. The model is :func:`numpyro_orthgp.tabular.regression_model`: Matern 5/2
    with a lengthscale for each column plus a plane, Gaussian noise, weak priors, and the collapsed bound of Titsias 2025
    (:class:`~numpyro_orthgp.CollapsedGP`). Hyperparameters are posterior modes, by :func:`~numpyro_orthgp.fit_lbfgs` in float64,
    whatever JAX is set to, from two starts: equal lengthscales, and such as the relevance of each column by itself suggests. Then
    the number of inducing points is doubled, picked anew for the kernel so far, until the rows that are held out (a tenth) gain
    less than 0.005 nats each, or, where these are fewer than 200, the bounds leave no larger gap; or the time is over. Of many
    rows the hyperparameters see twenty a point; the function that is returned is given all of them. If held-out rows are clearly
    predicted better with a larger noise, it is made larger, by steps of a factor of 1.4; if with the rows nearest to each input,
    predictions use these (:func:`~numpyro_orthgp.with_neighbors`), and the noise may become smaller too. If they are predicted
    better by the mean and the standard deviation of y, these are what is returned, and the page says so.

    **To go on.** ``fit.model``, ``fit.guide``, ``fit.params`` and ``fit.arguments`` are what ``SVI`` and ``NUTS`` take; the model
    is a few lines of the public pieces, to copy and change.

    >>> import numpy as np
    >>> import numpyro_orthgp as ogp
    >>> x = np.linspace(0.0, 10.0, 80)
    >>> fit = ogp.regression(x, 100 + 5 * np.sin(x), M=20, num_steps=50)
    >>> fit.predict([[1.5], [4.7]]).mean.round(0)
    array([105.,  95.])

    :param X: a pandas or polars table, or an array of numbers, shape (N, D) or (N,).
    :param y: numbers, shape (N,); NaN where it is missing.
    :param time: seconds. A search that has begun ends within a step; compilation is not interrupted, so that it may take some
        seconds more. None for no limit.
    :param M: the number of inducing points, at once and without looking at the clock: the same fit on any machine.
    :param num_steps: the most steps of each search, 200 if not given; with it no clock is looked at.
    :param seed: of the order of rows, the first of which are held out.
    :return: the fit.
    :raises TypeError: for columns or outputs that are neither numbers nor categories.
    :raises ValueError: for tables and outputs that do not fit each other, fewer than ten outputs, constant outputs, infinite
        numbers, and options that are not what they should be.

    **References:**
        1. Ober et al. Recommendations for Baselines and Benchmarking Approximate Gaussian Processes. 2024.
        2. Titsias. New Bounds for Sparse Variational Gaussian Processes. 2025.
    """
    budget = Budget.of(time, M, num_steps)
    table = read_table(X)
    outputs, seen = observed_numbers(y, table.num_rows)
    columns = Columns.learn(table.rows(seen))
    order, num_held = order_of(len(outputs), seed)
    inputs = columns.encode(table.rows(seen))[order]
    loc, scale = float(outputs.mean()), float(outputs.std())
    standardized = (outputs[order] - loc) / scale
    with jax.enable_x64(True):
        found = search(inputs, standardized, num_held, budget)
        rows = inputs, standardized, found.Z
        f = function_of(found.values, *rows)
        predictor: GPFunction | NeighborFunction = f
        if found.near_noise is not None:
            predictor = predictor_of(found.values | {"noise": np.array(found.near_noise)}, *rows, near=True)
    num_dropped = int((~seen).sum())
    return RegressionFit(columns, loc, scale, found, inputs, standardized, f, predictor, num_held, num_dropped, budget)


@dataclass(frozen=True, repr=False)
class RegressionFit:
    """What :func:`numpyro_orthgp.regression` returns; ``print`` shows what was done.

    :param columns: what becomes of the table's columns.
    :param loc, scale: mean and standard deviation of y.
    :param found: hyperparameters, points and the searches for them.
    :param X, y: standardized rows, (N, D) and (N,), in the random order of the fit, the held-out ones first.
    :param function: the function given all rows, of standardized columns, by the model.
    :param predictor: what predicts: the same, or a function with less noise and the rows near each input.
    :param num_held: number of rows that the searches did not see.
    :param num_dropped: number of rows without y.
    """

    columns: Columns
    loc: float
    scale: float
    found: Found
    X: np.ndarray
    y: np.ndarray
    function: GPFunction
    predictor: GPFunction | NeighborFunction
    num_held: int
    num_dropped: int
    budget: Budget

    model = staticmethod(regression_model)

    @property
    def guide(self) -> Any:
        """``AutoDelta`` of the hyperparameters, a new one each time."""
        return new_guide()

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of the guide."""
        return self.found.params

    @property
    def arguments(self) -> dict[str, np.ndarray]:
        """Keyword arguments of the model: ``NUTS(fit.model)`` takes them as they are."""
        return {"X": self.X, "y": self.y, "Z": self.found.Z}

    @property
    def hyperparameters(self) -> dict[str, np.ndarray]:
        """By site, in standardized units."""
        return dict(self.found.values)

    def predict(self, X: Any) -> Predictions:
        """New outputs at the rows of a table, in the units of y. Compiled once, for any number of rows.

        :param X: a table with the columns of training, or an array of as many columns.
        :raises ValueError: for other columns.
        """
        table = read_table(X)
        with jax.enable_x64(True):
            mean, variance = moments(self.predictor, self.columns.encode(table))
        near = self.found.near_noise
        noise = float(self.found.values["noise"]) if near is None else near
        sd, function_sd = (self.scale * np.sqrt(v) for v in (variance + noise**2, np.maximum(variance, 0)))
        return Predictions(self.loc + self.scale * mean, sd, function_sd, table.index, table.like)

    def importance(self) -> dict[str, float]:
        """For each column of the table the share of the variance of predictions that goes through it, the largest first.

        Total Sobol indices of the function's mean, by its inducing points, by exchanging the column between up to 1000 of the
        rows (Jansen 1999): columns that act together count the variance that they share once each, so that the sum may be
        more than one. Between columns that are correlated the function decides, not the data.
        """

        def mean(X: np.ndarray) -> np.ndarray:
            return moments(self.function, X)[0]

        with jax.enable_x64(True):
            return importance_of(mean, self.X, self.columns)

    def check(self, **options: Any) -> Report:
        """The page of :func:`numpyro_orthgp.check` on the model beneath. Rows that were held out are part of the data by now.

        :param options: of ``check``, ``nuts=200`` for one.
        """
        with jax.enable_x64(True):
            arguments: dict[str, Any] = {name: jnp.asarray(value) for name, value in self.arguments.items()}
            return check(self.model, self.guide, self.params, **arguments, **options)

    def __str__(self) -> str:
        found, values = self.found, self.found.values
        X, Z = self.X, found.Z
        dropped = f" ({self.num_dropped} without y left out)" if self.num_dropped else ""
        lines = [f"Gaussian-process regression: {len(X)} rows{dropped}, {X.shape[1]} columns, {len(Z)} inducing points"]
        lines += [f"  {line}" for line in self.columns.words()]
        lines.append(
            "model: y = f(x) + noise, f ~ GP(0, scale^2 Matern52(lengthscale) + slope^2 / D Linear), standardized units"
        )
        unit = f"{float(values['noise']) * self.scale:.3g} in units of y"
        lines.append(
            f"  scale {values['scale']:.3g}, slope {values['slope']:.3g}, noise {values['noise']:.3g} ({unit})"
        )
        lines += [
            "",
            f"searches ({self.budget.words()}); loss and gap of the bounds in nats, held-out log density per row",
        ]
        lines.append("   rows  points  steps      loss  gap/row  held out  from, and how it ended")
        for s in found.stages:
            loss, end = s.fit.losses.min(initial=np.inf), s.fit.status
            row = f"{s.num_rows:7d} {s.num_points:7d} {s.fit.num_steps:6d} {loss:9.1f} {s.gap:8.3f} {s.held_out:9.3f}"
            lines.append(f"{row}  {s.start}; {end}")
        if self.num_held:
            better = "BETTER than the fit, and returned instead of it" if found.is_mean else "by mean and sd of y alone"
            lines.append(f"held-out rows {self.num_held}: log density {found.baseline:.3f} {better}")
            if found.near_noise is not None:
                lines.append(
                    "predictions also use the 32 rows nearest to each input: held-out rows were clearly better with them, and with "
                    f"noise {found.near_noise:.3g}"
                )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self.X)} rows, {self.X.shape[1]} columns; print it to see what was done>"
        )
