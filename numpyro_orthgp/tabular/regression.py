""":func:`regression`, from a table and a column of numbers to predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.diagnostics import Report
from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.neighbors import NeighborFunction
from numpyro_orthgp.tabular.atoms import atoms_of
from numpyro_orthgp.tabular.blocks import moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.classification import classification
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.files import Arrays, describe_function, function_from
from numpyro_orthgp.tabular.fits import TableFit
from numpyro_orthgp.tabular.fitted_atoms import AtomsFit
from numpyro_orthgp.tabular.left_out import calibration_words, finish
from numpyro_orthgp.tabular.mixtures import STANDARD, moments_of
from numpyro_orthgp.tabular.models import regression_model
from numpyro_orthgp.tabular.near import Near
from numpyro_orthgp.tabular.predictions import Predictions
from numpyro_orthgp.tabular.rows import observed_numbers, order_of, warn_of_copies
from numpyro_orthgp.tabular.search import MANY_HELD, Rows, everything, function_of, functions_of, new_guide, search
from numpyro_orthgp.tabular.serving import moments_at
from numpyro_orthgp.tabular.settings import fitting, own_settings
from numpyro_orthgp.tabular.stages import FOLDS
from numpyro_orthgp.tabular.stored import PART, all_rows, part_of, table_of
from numpyro_orthgp.tabular.strays import NONE, StrayNumbers, weight_of
from numpyro_orthgp.tabular.units import Units, may_be_logarithms
from numpyro_orthgp.types import Array

__all__ = ["RegressionFit", "regression"]

OF_ATOMS = 0.4  # share of the time for their probabilities
PASS = 0.25  # least share of the time for all rows, where the searches see a part of them


def regression(
    X: Any, y: Any, *, time: float | None = 60.0, M: int | None = None, num_steps: int | None = None, seed: int = 0
) -> RegressionFit:
    r"""Gaussian-process regression of y on the columns of a table; all options have defaults.

    ::

        fit = ogp.regression(X, y)  # a minute at most
        print(fit)  # what was done, with results
        new = fit.predict(X_new)
        lower, upper = new.interval(0.95)

    **Data.** Columns are standardized. Categories become columns of -1 and 1, and a category of more than twenty levels also a
    column with the mean of y at each level, from other rows. Dates become days, and places in the day, the week and the year as far
    as they show these. Missing entries become the median, and a further column marks them. Rows without y are left out.

    **Model.** :func:`numpyro_orthgp.tabular.regression_model` has a Matern 5/2 kernel with a lengthscale for each column, plus a
    plane, Gaussian noise, weak priors, and the collapsed bound of Titsias 2025 (:class:`~numpyro_orthgp.CollapsedGP`).

    **Search.** :func:`~numpyro_orthgp.fit_lbfgs` finds posterior modes of the hyperparameters, always in float64. It has two
    starts: equal lengthscales, and lengthscales from the relevance of each single column. If both take y for noise, a third
    start has lengthscales a tenth as long. Skewed columns are also mapped to less skewed numbers, arcsinh((x - loc) / scale).
    100 rows say which comes first, as time may be short, and whether one has far shorter lengthscales. Positive, skewed outputs
    are also tried as logarithms. All bounds are densities of y, and the largest wins. Then the number of inducing points
    doubles, with new points for the current kernel, until the held-out rows (a tenth, at most 1000) gain
    less than 0.005 nats each, or the time is over. With fewer than 200 held-out rows the gap between the bounds decides
    instead; above 0.2 nats per row the points are quadrupled. Hyperparameters see twenty rows per inducing point, at least
    1000; the returned function sees all rows.

    **Many rows.** X may be an array on disk, memory-mapped or of h5py, zarr or :func:`numpyro_orthgp.training.columns`. From more
    than 100,000 rows on disk, or a million in memory, 100,000 random rows serve the search and the calibration. Then the function
    is given all rows in one pass (:func:`~numpyro_orthgp.online.from_blocks`), or those that can be read before the time is over.
    This pass has at least a quarter of ``time``.

    **Calibration.** It uses the held-out rows if there are 500 or more. Otherwise all rows are left out in turn, a fifth at a time,
    and the hyperparameters of each fifth come from a search on the other rows, while time is left. If larger noise clearly predicts
    these rows better, the noise grows in steps of a factor of 1.4. If the rows nearest to each input clearly help, predictions use
    them (:func:`~numpyro_orthgp.with_neighbors`), and the noise may also shrink. With 500 held-out rows such predictions have
    hyperparameters of their own, learned from training rows that are each predicted from their nearest others. Errors of new
    outputs follow the errors of these rows: a normal distribution, or a mixture of up to four, which can have heavy and skewed
    tails. Schwarz's criterion decides; with fewer than 20 rows it is normal, and with fewer than 40 a fifth is held out. N rows do
    not rule out that the next one is unlike them all, such as a slip of the pen. So quantiles and densities give a very wide
    distribution of the size of y the weight 1 / (2 (N + 1)), its expectation under Jeffreys' prior. Outputs that are multiples of
    some step were rounded to it, so the noise is at least that of rounding. If the distribution of y alone predicts better, by
    normal distributions and by mixtures, the fit returns it, and the page says so.

    **Values that recur.** If a twentieth of the rows or more have one value, such as 0, five times as many as have any other, its
    probability is from :func:`~numpyro_orthgp.classification` of all rows (``numpyro_orthgp/tabular/atoms.py``), and all else is of
    the other rows.

    **Next steps.** ``SVI`` and ``NUTS`` take ``fit.model``, ``fit.guide``, ``fit.params`` and ``fit.arguments``.

    >>> import numpy as np
    >>> import numpyro_orthgp as ogp
    >>> x = np.linspace(0.0, 10.0, 80)
    >>> fit = ogp.regression(x, 100 + 5 * np.sin(x), M=20, num_steps=50)
    >>> fit.predict([[1.5], [4.7]]).mean.round(0)
    array([105.,  95.])

    :param X: a pandas or polars table, or an array of numbers, shape (N, D) or (N,), in memory or on disk.
    :param y: numbers, shape (N,); NaN where missing.
    :param time: time limit in seconds, of which searches take two thirds at most; None for no limit. A running search stops
        within a step. Compilation is not interrupted, so a fit may take some seconds more. Ctrl-C during a search means that the
        time is over: the fit of what was found is returned, and says so. Before the first step Ctrl-C is raised.
    :param M: number of inducing points. It is used at once, without a time limit: the same fit on any machine.
    :param num_steps: maximum number of steps of each search, by default 200; if it is given, there is no time limit.
    :param seed: seed of the order of rows; the first rows are held out.
    :return: the fit.
    :raises TypeError: for columns that are neither numbers nor categories, and outputs that are no numbers.
    :raises ValueError: if table and outputs do not match; for fewer than ten outputs, constant outputs, infinite numbers, and
        invalid options.

    **References:**
        1. Ober et al. Recommendations for Baselines and Benchmarking Approximate Gaussian Processes. 2024.
        2. Titsias. New Bounds for Sparse Variational Gaussian Processes. 2025.
        3. Schwarz. Estimating the Dimension of a Model. 1978.
    """
    budget = Budget.of(time, M, num_steps)
    seed, table = check_integer("seed", seed, 0), table_of(X)
    known, seen = observed_numbers(y, table.num_rows, table.index)
    if len(values := atoms_of(known)):
        outputs = np.full(len(seen), np.nan)
        outputs[seen] = known
        return with_atoms(X, outputs, values, budget, {"M": M, "num_steps": num_steps, "seed": seed})
    part, of_part = part_of(table, seen, seed, PART)
    used, outputs = table.rows(part), known[of_part]
    logs = known.min() > 0 and may_be_logarithms(outputs)
    columns, inputs = Columns.learn(used, (np.log(outputs) if logs else outputs)[:, None], seed)
    warn_of_copies(inputs, outputs, part)
    order, num_held = order_of(len(part), seed, 1 / FOLDS)
    inputs, outputs = inputs[order], outputs[order]
    other, warped = columns.warped(used, inputs, order)
    tried = [Units.of(outputs, is_log) for is_log in (False, True)[: 1 + logs]]
    with fitting():
        searches, stages, last, ended, grows = search(
            inputs, [units.standardized(outputs) for units in tried], num_held, budget, warped
        )
        columns = other if searches.X is warped else columns
        found, units = finish(searches, stages, last, ended, grows), ended.outputs.units
        rows, num_given = everything(searches.X, ended.outputs.values, num_held), len(part)
        if of_part.all() or found.is_mean:
            f, predictor = functions_of(found, rows)
        else:
            others = np.full(len(seen), np.nan)
            others[np.flatnonzero(seen)[~of_part]] = units.standardized(known[~of_part]).values
            sums = all_rows(found.values, found.Z, (rows.X, rows.y), table, columns, others, budget.renewed(PASS))
            f, predictor = functions_of(found, rows, sums)
            num_given = sums.num_rows
        jax.block_until_ready((f, predictor))  # or the first prediction would wait for them
    fixed = num_held, int((~seen).sum()), budget.words(), len(known)
    return RegressionFit(columns, found, rows.X, rows.y, f, *fixed, units, predictor, num_given)


def with_atoms(X: Any, y: np.ndarray, values: np.ndarray, budget: Budget, options: dict[str, Any]) -> RegressionFit:
    """A fit of the rows that are at no atom, with a classification of all rows.

    :param y: outputs, shape (N,); NaN where missing.
    :param values: the atoms, in order, shape (K,).
    """
    place = np.minimum(np.searchsorted(values, y), len(values) - 1)
    at = values[place] == y
    classes = np.where(np.isnan(y), np.nan, np.where(at, place, len(values)))
    of_atoms = classification(X, classes, time=budget.part(OF_ATOMS).seconds, **options)
    if of_atoms.was_interrupted:
        raise KeyboardInterrupt  # the other rows have no fit
    left = None if budget.seconds is None else max(budget.left, (1 - OF_ATOMS) * budget.seconds / 2)
    fit = regression(X, np.where(at, np.nan, y), time=left, **options)
    words = budget.words(fit.was_interrupted)
    return replace(fit, atoms=AtomsFit(values, of_atoms), num_dropped=of_atoms.num_dropped, budget=words)


@dataclass(frozen=True, repr=False)
class RegressionFit(TableFit):
    """The result of :func:`numpyro_orthgp.regression`; ``print`` it.

    :param columns: the encoding of the table's columns.
    :param found: hyperparameters, inducing points and the searches for them.
    :param X, y: standardized rows, (N, D) and (N,), in the random order of the fit, held-out rows first.
    :param function: the model's function of standardized columns, given all rows.
    :param num_held: number of rows that the searches did not see.
    :param num_dropped: number of rows without y.
    :param budget: the budget of the fit, in words.
    :param num_rows: number of rows with y. If there are many, ``X`` and ``y`` are a part of them.
    :param units: mean and standard deviation of y or of log y, and which of the two is modelled.
    :param predictor: the function that predicts: ``function``, or one with other noise that also uses the rows near each input.
    :param num_given: number of rows that the function is given.
    :param atoms: the fit of the probabilities of values that recur, or ``None``; all else is of the rows at other values.
    """

    units: Units
    predictor: GPFunction | NeighborFunction
    num_given: int
    atoms: AtomsFit | None = None

    kind = "regression"
    title = "Gaussian-process regression"
    bounds = "loss and gap of the bounds in nats, "
    model = staticmethod(regression_model)

    @property
    def baseline(self) -> str:  # type: ignore[override]
        """The predictions without inputs that the fit is compared with."""
        return f"mean and sd of {self._modelled}"

    @property
    def guide(self) -> Any:
        """``AutoDelta`` of the hyperparameters, a new one at each call."""
        return new_guide()

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model, which ``NUTS(fit.model)`` takes unchanged."""
        return {"X": self.X, "y": self.y, "Z": self.found.Z}

    @property
    def noise(self) -> float:
        """Standard deviation of the predictions' noise, in standardized units."""
        return float(self.found.values["noise"]) if self.found.near is None else self.found.near.noise

    @property
    def strays(self) -> StrayNumbers:
        """Rows that are unlike those the fit was calibrated on."""
        num_seen = len(self.X) if self.num_held < MANY_HELD else self.num_held
        return NONE if self.found.is_mean else StrayNumbers(weight_of(num_seen), self.units.loc, self.units.scale)

    def predict(self, X: Any) -> Predictions:
        """Predict new outputs at the rows of a table, in the units of y. At most three programs serve any number of rows.

        :param X: a table with the columns of training, or an array with as many columns.
        :raises ValueError: for other columns.
        """
        table = read_table(X)
        with own_settings():
            mean, variance = moments(self.predictor, self.columns.encode(table))
        given = self._distribution(mean, variance)
        atoms = None if self.atoms is None else self.atoms.at(X)
        return Predictions(*given, table.index, table.like, self.found.errors, self.units.is_log, self.strays, atoms)

    def check(self, **options: Any) -> Report:
        """As for every fit, without advice on tails and neighbours that the predictions already have.

        :param options: options of ``check``, such as ``nuts=200``.
        """
        report = super().check(**options)
        if not self.found.errors.is_standard:
            report = replace(report, outputs={n: replace(o, gain=0.0) for n, o in report.outputs.items()})
        return report if self.found.near is None else replace(report, nearby={})

    def _distribution(self, mean: Any, variance: Any, xp: Any = np) -> tuple[Any, Any, Any]:
        """Location and scale of new outputs, and the function's standard deviation in the units of y.

        :param mean, variance: the function's moments, standardized.
        """
        loc, scale, is_log = self.units
        loc, spread = loc + scale * mean, scale * xp.sqrt(xp.maximum(variance, 0))
        return loc, scale * xp.sqrt(variance + self.noise**2), moments_of(STANDARD, loc, spread, is_log, xp)[1]

    def _program(self, X: Array, *more: Array) -> dict[str, Array]:
        loc, scale, function_sd = self._distribution(*moments_at(self.predictor, X), jnp)
        mean, sd = moments_of(self.found.errors, loc, scale, self.units.is_log, jnp)
        return {"mean": mean, "sd": sd, "function_sd": function_sd, "loc": loc, "scale": scale}

    def _recipe(self, near: Near | None = None) -> Callable[[], GPFunction]:
        return partial(function_of, (of := near or self.found).values, self._rows, of.Z)

    @property
    def _rows(self) -> Rows:
        return everything(self.X, self.y, self.num_held)

    @property
    def _modelled(self) -> str:
        return "log y" if self.units.is_log else "y"

    def _more(self) -> tuple[dict[str, Any], Arrays]:
        arrays: Arrays = {}
        if isinstance(self.predictor, NeighborFunction):
            with own_settings():
                arrays = describe_function(self.predictor.f, self._recipe(self.found.near), "near")
        atoms, of_atoms = (None, {}) if self.atoms is None else self.atoms.described()
        return {"units": list(self.units), "num_given": self.num_given, "atoms": atoms}, arrays | of_atoms

    @classmethod
    def _with_more(cls, common: dict[str, Any], more: dict[str, Any], arrays: Arrays) -> RegressionFit:
        units, num_given = Units(*more["units"]), more["num_given"]
        atoms = None if more["atoms"] is None else AtomsFit.restored(more["atoms"], arrays)
        return cls(**common, units=units, predictor=common["function"], num_given=num_given, atoms=atoms)

    def _with_functions(self, arrays: Arrays) -> RegressionFit:
        f: GPFunction = function_from(arrays, self._recipe())
        near = self.found.near
        if near is None:
            return replace(self, function=f, predictor=f)
        of_near: GPFunction = function_from(arrays, self._recipe(near), "near")
        return replace(self, function=f, predictor=near.given(of_near, self.X, self.y))

    def _model_words(self) -> list[str]:
        v = self.found.values
        noise = float(v["noise"]) * self.units.scale
        unit = f"{100 * np.expm1(noise):.2g} % of y" if self.units.is_log else f"{noise:.3g} in units of y"
        return [
            f"model, standardized units: {self._modelled} = f(x) + noise,",
            "  f ~ GP(0, scale^2 Matern52(lengthscale) + slope^2 / D Linear)",
            f"  scale {v['scale']:.3g}, slope {v['slope']:.3g}, noise {v['noise']:.3g} ({unit})",
        ]

    def importance(self) -> dict[str, float]:
        """As for every fit; with atoms, for each column the larger share: of the function, or of their probabilities."""
        found = super().importance()
        if self.atoms is not None:
            others = self.atoms.fit.importance()
            found = {name: max(share, others[name]) for name, share in found.items()}
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def as_array(self, X: Any) -> np.ndarray:
        """As for every fit; with atoms, their fit's array stands beside that of the others, shape (N, twice the columns)."""
        own = super().as_array(X)
        return own if self.atoms is None else np.hstack([own, self.atoms.fit.as_array(X)])

    @property
    def _num_columns(self) -> int:
        return super()._num_columns * (1 if self.atoms is None else 2)

    def _program_of_table(self, X: Array, *more: Array) -> dict[str, Array]:
        found = super()._program_of_table(X[:, : len(self.columns.columns)])
        if self.atoms is None:
            return found
        atoms = self.atoms.of_program(X[:, len(self.columns.columns) :])
        mean, sd = atoms.mixed_moments(found["mean"], found["sd"])
        return found | {"mean": mean, "sd": sd, "atoms": atoms.probabilities}

    def _part_words(self) -> list[str]:
        words = super()._part_words()
        if not self.found.is_mean:
            whole = self.num_given == self.num_rows
            given = "all" if whole else f"{self.num_given}, as many as came in before the time was over"
            words = [f"{of_part}; the function is given {given}" for of_part in words]
        return words if self.atoms is None else [self.atoms.words(), *words]

    def _left_out_words(self) -> str:
        return super()._left_out_words() if self.num_held >= MANY_HELD else "all rows, left out a fifth at a time"

    def _prediction_words(self) -> list[str]:
        part = f" among {len(self.X)} rows" if len(self.X) < self.num_rows else ""
        return calibration_words(self.found, self.strays.weight, part)
