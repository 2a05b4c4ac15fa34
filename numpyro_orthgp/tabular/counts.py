""":func:`counts`, from a table and a column of counts to predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.tabular import renewal
from numpyro_orthgp.tabular.blocks import moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.families import found_for, log_rates, predictions, zeros_at
from numpyro_orthgp.tabular.files import Arrays
from numpyro_orthgp.tabular.fits import TableFit
from numpyro_orthgp.tabular.latent import USUAL_STEPS, latent_function, new_guide
from numpyro_orthgp.tabular.meanings import warn_of_far
from numpyro_orthgp.tabular.models import counts_model
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.rows import observed_counts, order_of, positive_column
from numpyro_orthgp.tabular.serving import moments_at
from numpyro_orthgp.tabular.settings import fitting, own_settings
from numpyro_orthgp.tabular.stored import MOST, part_of, table_of
from numpyro_orthgp.tabular.strays import NONE, StrayCounts, weight_of
from numpyro_orthgp.types import Array

__all__ = ["CountsFit", "counts"]


def counts(
    X: Any,
    y: Any,
    exposure: Any = None,
    *,
    time: float | None = 60.0,
    M: int | None = None,
    num_steps: int | None = None,
    seed: int = 0,
) -> CountsFit:
    r"""Gaussian-process regression of counts on the columns of a table; all options have defaults.

    ::

        fit = ogp.counts(X, y, exposure=hours)  # a minute at most
        new = fit.predict(X_new, exposure=1.0)
        new.mean, new.interval(0.9), new.frame()

    **Model.** :func:`numpyro_orthgp.tabular.counts_model`: the mean count is the exposure times the exponential of a Gaussian
    process and an offset. The kernel is Matern 5/2 with a lengthscale for each column, plus a plane.

    **Search.** As in :func:`~numpyro_orthgp.classification`. Counts are Poisson, or negative binomial, with larger variance, if
    this clearly predicts held-out rows better. If fewer than 200 held-out rows say neither, the larger bound decides. If counts are
    negative binomial and some are zero, additional zeros (Lambert 1992) are tried by the same rule: a count is zero whatever its
    rate with a probability whose logit is linear in the columns. If one rate for all rows predicts held-out rows better, the fit
    returns this rate, and the page says so. As in ``regression``, probabilities and quantiles allow for rows unlike those seen.

    **Less variance.** Grades, years or numbers of rooms vary less than Poisson counts of the same mean. If counts of events at more
    regular times (``numpyro_orthgp/tabular/renewal.py``) clearly predict held-out rows better, the fit predicts such counts. Their
    variance is about :math:`1 / \alpha` times that of Poisson ones, and a search with the likelihood to the power of
    :math:`\alpha` finds the function.

    **Next steps.** ``SVI`` and ``NUTS`` take ``fit.model``, ``fit.guide``, ``fit.params`` and ``fit.arguments``.

    >>> import numpy as np
    >>> import numpyro_orthgp as ogp
    >>> x = np.linspace(0.0, 10.0, 80)
    >>> y = np.random.default_rng(0).poisson(np.exp(2 + np.sin(x)))
    >>> fit = ogp.counts(x, y, M=20, num_steps=100)
    >>> bool(fit.predict([[1.5]]).mean > 2 * fit.predict([[4.7]]).mean)
    True

    :param X: a pandas or polars table, or an array of numbers, shape (N, D) or (N,), in memory or on disk. Of more than a million
        rows a random million is used.
    :param y: counts, shape (N,); NaN where missing.
    :param exposure: time, area or number of people that each count is for: positive, shape (N,); by default 1.
    :param time: as for :func:`~numpyro_orthgp.classification`.
    :param M: likewise.
    :param num_steps: likewise.
    :param seed: likewise.
    :return: the fit.
    :raises TypeError: for columns, counts or exposures that are not numbers.
    :raises ValueError: for negative numbers or fractions, fewer than ten counts, counts that are all zero, exposures that are not
        positive, tables and counts that do not match, and invalid options.

    **References:**
        1. Cox. Renewal Theory. 1962.
        2. Winkelmann. Duration Dependence and Dispersion in Count-Data Models. 1995.
        3. Lambert. Zero-Inflated Poisson Regression, with an Application to Defects in Manufacturing. 1992.
    """
    budget = Budget.of(time, M, num_steps, USUAL_STEPS)
    seed, table = check_integer("seed", seed, 0), table_of(X)
    y, seen = observed_counts(y, table.num_rows, table.index)
    part, of_part = part_of(table, seen, seed, MOST)
    exposure = positive_column("exposure", exposure, table.num_rows, table.index)
    warn_of_far("`y`", np.flatnonzero(seen), y, y / exposure[seen])
    used, y, exposure = table.rows(part), y[of_part], exposure[part]
    rate = float(y.sum() / exposure.sum())
    columns, inputs = Columns.learn(used, log_rates(y, rate * exposure)[:, None], seed)
    order, num_held = order_of(len(y), seed)
    data = {"X": inputs[order], "y": y[order], "expected": rate * exposure[order]}
    other, warped = columns.warped(used, data["X"], order)
    with fitting():
        found, search = found_for(data, warped, num_held, budget)
        X, y, expected = (search.data[name] for name in ("X", "y", "expected"))
        columns = other if X is warped else columns
        f = search.function(found.params, found.Z)
    fixed = num_held, int((~seen).sum()), budget.words(), int(seen.sum())
    family = search.options["overdispersed"], search.options["zero_inflated"]
    return CountsFit(columns, found, X, y, f, *fixed, expected, rate, *family)


@dataclass(frozen=True, repr=False)
class CountsFit(TableFit):
    """The result of :func:`numpyro_orthgp.counts`; ``print`` it.

    :param columns: the encoding of the table's columns.
    :param found: hyperparameters, inducing points and the searches for them.
    :param X, y: standardized rows, (N, D), and counts, (N,), in the random order of the fit, held-out rows first.
    :param function: the fitted function of standardized columns: the log rate without the offset.
    :param num_held: number of rows that the searches did not see.
    :param num_dropped: number of rows without a count.
    :param budget: the budget of the fit, in words.
    :param num_rows: number of rows with y. If there are many, ``X`` and ``y`` are a part of them.
    :param expected: counts at the mean rate, (N,): exposure times rate.
    :param rate: the mean rate, counts per unit of exposure.
    :param overdispersed: whether counts are negative binomial.
    :param zero_inflated: whether there are additional zeros.
    """

    expected: np.ndarray
    rate: float
    overdispersed: bool
    zero_inflated: bool

    kind = "counts"
    title = "Gaussian-process regression of counts"
    baseline = "one rate for all rows"
    num_more = 1
    model = staticmethod(counts_model)

    @property
    def guide(self) -> Any:
        """``AutoSparseGP`` with posterior modes of the hyperparameters, a new one at each call."""
        return new_guide(self.model)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the model, which ``NUTS(fit.model)`` takes unchanged."""
        data = {"X": self.X, "y": self.y, "expected": self.expected}
        return {**data, "Z": self.found.Z, **self._family, "regularity": self.found.regularity}

    @property
    def _family(self) -> dict[str, bool]:
        return {"overdispersed": self.overdispersed, "zero_inflated": self.zero_inflated}

    def predict(self, X: Any, exposure: Any = None) -> CountPredictions:
        """Predict new counts at the rows of a table. At most three programs are compiled for any number of rows.

        :param X: a table with the columns of training, or an array with as many columns.
        :param exposure: exposure of each new count, shape (N,), or a scalar; by default 1.
        :raises ValueError: for other columns, and exposures that are not positive.
        """
        table, values = read_table(X), self.found.values
        if exposure is None and not np.allclose(self.expected, self.rate):
            warnings.warn(
                "The fit had an `exposure`, and these predictions are for an exposure of 1. Pass the exposure of their rows, or "
                "exposure=1 for rates.",
                stacklevel=2,
            )
        exposure = positive_column("exposure", exposure, table.num_rows, table.index)
        with own_settings():
            columns = self.columns.encode(table)
            mean, variance = moments(self.function, columns)
        log_mean = mean + float(values["offset"]) + np.log(self.rate * exposure)
        log_sd = np.sqrt(np.maximum(variance, 0))
        strays = NONE if self.found.is_mean else StrayCounts(weight_of(len(self.y)), self.rate * exposure)
        more = {"index": table.index, "like": table.like, "strays": strays, "regularity": self.found.regularity}
        more["extra_zeros"] = zeros_at(values, columns)
        return predictions(values, log_mean, log_sd, **more)

    def _mean_at(self, X: np.ndarray) -> np.ndarray:
        """Of the logarithms of rates, with those of the shares without additional zeros."""
        return super()._mean_at(X) + np.log1p(-zeros_at(self.found.values, X))

    def _program(self, X: Array, *more: Array) -> dict[str, Array]:
        mean, variance = moments_at(self.function, X)
        values, shape = self.found.values, self.found.values.get("concentration", np.inf)
        mean = jnp.exp(mean + values["offset"] + jnp.log(self.rate * more[0]) + variance / 2)
        spread, given = jnp.expm1(variance), mean
        if self.found.regularity > 1:
            given = renewal.variance(mean, self.found.regularity, jnp)
        zeros = zeros_at(values, X)
        square = given + mean**2 * (spread + (1 + spread) / shape + zeros)
        return {"mean": (1 - zeros) * mean, "sd": jnp.sqrt((1 - zeros) * square)}

    def _recipe(self) -> Callable[[], GPFunction]:
        data = {"X": self.X, "y": self.y, "expected": self.expected}
        return partial(latent_function, self.model, self.found.params, self.found.Z, data, self._family)

    def _more(self) -> tuple[dict[str, Any], Arrays]:
        return {"rate": self.rate, **self._family}, {"expected": self.expected}

    @classmethod
    def _with_more(cls, common: dict[str, Any], more: dict[str, Any], arrays: Arrays) -> CountsFit:
        return cls(**common, expected=arrays["expected"], **more)

    def _model_words(self) -> list[str]:
        v = self.found.values
        family = "negative binomial" if self.overdispersed else "Poisson"
        k = f", concentration {v['concentration']:.3g}" if self.overdispersed else ""
        return [
            f"model: {family} counts of mean exposure * {self.rate:.3g} * exp(f(x) + offset), f ~ GP(0, scale^2 "
            "Matern52(lengthscale) + slope^2 / D Linear)",
            f"  scale {v['scale']:.3g}, slope {v['slope']:.3g}, offset {v['offset']:.3g}{k}",
        ]

    def _prediction_words(self) -> list[str]:
        times = self.found.regularity
        if times > 1:
            return [f"new counts: with {times:.3g} times less variance than Poisson ones"]
        if not self.zero_inflated:
            return []
        share = float(np.mean(zeros_at(self.found.values, self.X)))
        return [
            f"new counts: zero by themselves in {100 * share:.3g} % of the rows, and negative binomial in the others"
        ]
