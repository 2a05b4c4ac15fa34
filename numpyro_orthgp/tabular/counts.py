""":func:`counts`, from a table and a column of counts to predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods import NegativeBinomial, Poisson
from numpyro_orthgp.tabular import renewal
from numpyro_orthgp.tabular.blocks import in_blocks, moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.columns import Columns, read_table
from numpyro_orthgp.tabular.files import Arrays
from numpyro_orthgp.tabular.fits import TableFit
from numpyro_orthgp.tabular.latent import USUAL_STEPS, LatentSearch, latent_function, new_guide
from numpyro_orthgp.tabular.models import counts_model
from numpyro_orthgp.tabular.points import Values
from numpyro_orthgp.tabular.predictions import CountPredictions
from numpyro_orthgp.tabular.rows import observed_counts, order_of, positive_column
from numpyro_orthgp.tabular.serving import moments_at
from numpyro_orthgp.tabular.stages import CLEARLY, ENOUGH, Found, Stage, Tried
from numpyro_orthgp.tabular.stored import MOST, part_of, table_of
from numpyro_orthgp.tabular.strays import NONE, StrayCounts, weight_of
from numpyro_orthgp.types import Array

__all__ = ["CountsFit", "counts"]

STEP, MOST_REGULAR = 1.4, 100.0  # factors of the regularity, and where they end


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
    this clearly predicts held-out rows better. If fewer than 200 held-out rows say neither, the larger bound decides. If one rate
    for all rows predicts held-out rows better, the fit returns this rate, and the page says so. As in ``regression``,
    probabilities and quantiles allow for rows unlike those seen.

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
    """
    budget = Budget.of(time, M, num_steps, USUAL_STEPS)
    seed, table = check_integer("seed", seed, 0), table_of(X)
    y, seen = observed_counts(y, table.num_rows, table.index)
    part, of_part = part_of(table, seen, seed, MOST)
    used, y = table.rows(part), y[of_part]
    exposure = positive_column("exposure", exposure, table.num_rows, table.index)[part]
    rate = float(y.sum() / exposure.sum())
    columns, inputs = Columns.learn(used, log_rates(y, rate * exposure)[:, None], seed)
    order, num_held = order_of(len(y), seed)
    data = {"X": inputs[order], "y": y[order], "expected": rate * exposure[order]}
    other, warped = columns.warped(used, data["X"], order)
    with jax.enable_x64(True):
        found, search = found_for(data, warped, num_held, budget)
        X, y, expected = (search.data[name] for name in ("X", "y", "expected"))
        columns = other if X is warped else columns
        f = search.function(found.params, found.Z)
    fixed = num_held, int((~seen).sum()), budget.words(), int(seen.sum())
    return CountsFit(columns, found, X, y, f, *fixed, expected, rate, search.options["overdispersed"])


def log_rates(y: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Logarithms of rates relative to the expected counts, also of zero counts."""
    return np.asarray(np.log((y + 0.5) / (expected + 0.5)))


def found_for(
    data: dict[str, np.ndarray], warped: np.ndarray | None, num_held: int, budget: Budget
) -> tuple[Found, LatentSearch]:
    """The fit and the search that found it, whose data have ``warped`` in place of the inputs if that is better."""
    relevant = [log_rates(data["y"], data["expected"])]

    def searching(overdispersed: bool = False, regularity: float = 1.0) -> LatentSearch:
        options = {"overdispersed": overdispersed, "regularity": regularity}
        score = partial(scored, regularity=regularity)
        return LatentSearch(counts_model, data, options, num_held, budget, relevant, score, warped)

    wide = searching(overdispersed=True)
    tried = wide.first()
    best, ended = min(tried, key=lambda pair: pair[0].loss)
    f = wide.function(ended["params"], ended["Z"])
    ended = ended | {"values": without(ended["values"]), "params": without(ended["params"])}
    regularity = regularity_of(f, ended["values"], wide.held)
    narrow = searching(regularity=regularity)
    narrow.take(wide.data["X"])
    plain: list[Tried] = []
    if budget.allows(0.0):
        plain = narrow.first(
            {f"{'less variance' if regularity > 1 else 'Poisson'}, where the other ended": ended["values"]}
        )
    elif regularity > 1:
        plain = [(best, ended)]
    is_wide = not plain or (regularity == 1 and is_overdispersed(best, plain[0][0], num_held))
    search, chosen, other = (wide, tried, plain) if is_wide else (narrow, plain, tried)
    found = search.search(chosen)
    if not is_wide:
        f = search.function(search.best["params"], search.best["Z"])
        found = replace(found, regularity=regularity_of(f, search.best["values"], search.held))
    found = replace(found, stages=[stage for stage, _ in other] + found.stages)
    if num_held:
        found = or_one_rate(found, search)
    return found, search


def without(values: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters or parameters of negative binomial counts as those of Poisson ones."""
    return {name: value for name, value in values.items() if not name.startswith("concentration")}


def is_overdispersed(wide: Stage, plain: Stage, num_held: int) -> bool:
    """Whether counts are negative binomial, by the best searches for these and for Poisson ones. A few held-out rows that say
    neither may miss those that are far from the mean, so the bound decides then."""
    gain = num_held * (wide.held_out - plain.held_out)
    return gain > CLEARLY if abs(gain) > CLEARLY or num_held >= ENOUGH else wide.loss < plain.loss


def regularity_of(f: GPFunction, values: Values, held: dict[str, np.ndarray]) -> float:
    """How many times less held-out rows vary than Poisson ones. It grows while each step clearly predicts them better."""
    if not len(held["y"]):
        return 1.0
    regularity, score = 1.0, float(scored(f, values, held).sum())
    while regularity < MOST_REGULAR:
        new = float(scored(f, values, held, STEP * regularity).sum())
        if new < score + CLEARLY:
            break
        regularity, score = STEP * regularity, new
    return regularity


def scored(f: GPFunction, values: Values, rows: dict[str, np.ndarray], regularity: float = 1.0) -> np.ndarray:
    """Log probabilities of the rows' counts, shape (N,)."""
    mean, variance = moments(f, rows["X"])
    given = mean + values["offset"] + np.log(rows["expected"]), np.sqrt(np.maximum(variance, 0))
    return predictions(values, *given, regularity=regularity).log_density(rows["y"])


def predictions(values: Values, log_mean: np.ndarray, log_sd: np.ndarray, **more: Any) -> CountPredictions:
    """Distributions of counts, for normal log rates."""
    k = values.get("concentration")
    return CountPredictions(log_mean, log_sd, np.inf if k is None else float(k), _Densities(k), **more)


def or_one_rate(found: Found, search: LatentSearch) -> Found:
    """The fit, or one rate for all rows if this rate predicts held-out rows better."""
    seen, held = search.seen, search.held
    rate, k = one_rate(seen["y"], seen["expected"])
    baseline = float(_pmf(held["y"], rate * held["expected"], k).mean())
    found = replace(found, baseline=baseline)
    if search.best_stage.held_out >= baseline:
        return found
    values = found.values | {"scale": np.array(1e-3), "slope": np.array(1e-3), "offset": np.log(np.array(rate))}
    if "concentration" in values:
        values["concentration"] = np.array(k)
    params = found.params | {f"{name}_auto_loc": value for name, value in values.items()}
    params["f.u0_loc"] = np.zeros_like(params["f.u0_loc"])
    return replace(found, values=values, params=params, is_mean=True, regularity=1.0)


def one_rate(y: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Maximum-likelihood rate, relative to the expected counts, and concentration, if counts do not depend on inputs."""
    rate = float(y.sum() / expected.sum())

    def loss(log_k: float) -> float:
        return -float(_pmf(y, rate * expected, float(np.exp(log_k))).sum())

    return rate, float(np.exp(scipy.optimize.minimize_scalar(loss, bounds=(-5.0, 12.0), method="bounded").x))


def _pmf(y: np.ndarray, mean: np.ndarray, k: float) -> np.ndarray:
    return np.asarray(scipy.stats.nbinom.logpmf(y, k, k / (k + mean)))


@jax.jit
def _log_densities(concentration: Any, log_mean: Any, log_sd: Any, y: Any) -> tuple[Any]:
    marginals = Marginals(log_mean, log_sd**2, jnp.zeros_like(log_sd))
    if concentration is None:
        return (Poisson(marginals).log_predictive(y),)
    return (NegativeBinomial(marginals, concentration).log_predictive(y),)


def log_densities(concentration: Any, log_mean: np.ndarray, log_sd: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Log probabilities of counts with the function integrated out, shape (N,)."""
    k = None if concentration is None else jnp.asarray(concentration)
    return in_blocks(_log_densities, k, log_mean, log_sd, y)[0]


@dataclass(frozen=True)
class _Densities:
    """Log probabilities of counts for one concentration, in float64."""

    concentration: np.ndarray | None

    def __call__(self, log_mean: np.ndarray, log_sd: np.ndarray, y: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            return log_densities(self.concentration, log_mean, log_sd, y)


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
    """

    expected: np.ndarray
    rate: float
    overdispersed: bool

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
        kind = {"overdispersed": self.overdispersed, "regularity": self.found.regularity}
        return {**data, "Z": self.found.Z, **kind}

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
        with jax.enable_x64(True):
            mean, variance = moments(self.function, self.columns.encode(table))
        log_mean = mean + float(values["offset"]) + np.log(self.rate * exposure)
        log_sd = np.sqrt(np.maximum(variance, 0))
        strays = NONE if self.found.is_mean else StrayCounts(weight_of(len(self.y)), self.rate * exposure)
        more = {"index": table.index, "like": table.like, "strays": strays, "regularity": self.found.regularity}
        return predictions(values, log_mean, log_sd, **more)

    def _program(self, X: Array, *more: Array) -> dict[str, Array]:
        mean, variance = moments_at(self.function, X)
        values, shape = self.found.values, self.found.values.get("concentration", np.inf)
        mean = jnp.exp(mean + values["offset"] + jnp.log(self.rate * more[0]) + variance / 2)
        spread, given = jnp.expm1(variance), mean
        if self.found.regularity > 1:
            given = renewal.variance(mean, self.found.regularity, jnp)
        return {"mean": mean, "sd": jnp.sqrt(given + mean**2 * (spread + (1 + spread) / shape))}

    def _recipe(self) -> Callable[[], GPFunction]:
        data, options = {"X": self.X, "y": self.y, "expected": self.expected}, {"overdispersed": self.overdispersed}
        return partial(latent_function, self.model, self.found.params, self.found.Z, data, options)

    def _more(self) -> tuple[dict[str, Any], Arrays]:
        return {"rate": self.rate, "overdispersed": self.overdispersed}, {"expected": self.expected}

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
        return [f"new counts: with {times:.3g} times less variance than Poisson ones"] if times > 1 else []
