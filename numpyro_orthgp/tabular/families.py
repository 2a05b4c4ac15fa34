r"""Families of counts, and the choice between them: Poisson, negative binomial, with more zeros, or with less variance.

A search for negative binomial counts comes first. If they vary more than Poisson ones and some are zero, another search adds zeros
(Lambert 1992):

.. math::
    p(0 \mid x) = \pi(x) + (1 - \pi(x)) \, p_{NB}(0 \mid x), \qquad p(y \mid x) = (1 - \pi(x)) \, p_{NB}(y \mid x),
    \qquad \operatorname{logit} \pi(x) = a + b^\top x .

Where a part of the rows cannot have events, a negative binomial distribution alone is too wide for the others. If this is not
better, a search for Poisson counts, or for counts with less variance (``renewal``), begins where the first one ended. Held-out rows
decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods import NegativeBinomial, Poisson
from numpyro_orthgp.tabular.blocks import in_blocks, moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.latent import LatentSearch
from numpyro_orthgp.tabular.models import counts_model, extra_zeros
from numpyro_orthgp.tabular.points import Values
from numpyro_orthgp.tabular.predicted_counts import CountPredictions
from numpyro_orthgp.tabular.settings import own_settings
from numpyro_orthgp.tabular.stages import CLEARLY, ENOUGH, Found, Stage, Tried, lowest

__all__ = ["found_for", "is_better", "log_rates", "one_rate", "predictions", "zeros_at"]

STEP, MOST_REGULAR = 1.4, 100.0  # factors of the regularity, and where they end
LEAST_ZEROS = 5  # counts of zero, from which more zeros than negative binomial ones are tried
WIDE = 2.0  # and the concentration in mean counts, up to which they are

Begun = tuple[LatentSearch, list[Tried], list[Tried]]  # a search that goes on, its first searches, and those of others


def log_rates(y: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Logarithms of rates relative to the expected counts, also of zero counts."""
    return np.asarray(np.log((y + 0.5) / (expected + 0.5)))


def found_for(
    data: dict[str, np.ndarray], warped: np.ndarray | None, num_held: int, budget: Budget
) -> tuple[Found, LatentSearch]:
    """The fit and the search that found it, whose data have ``warped`` in place of the inputs if that is better."""
    relevant = [log_rates(data["y"], data["expected"])]

    def searching(overdispersed: bool = False, zero_inflated: bool = False, regularity: float = 1.0) -> LatentSearch:
        options = {"overdispersed": overdispersed, "zero_inflated": zero_inflated, "regularity": regularity}
        score = partial(scored, regularity=regularity)
        return LatentSearch(counts_model, data, options, num_held, budget, relevant, score, warped)

    wide = searching(overdispersed=True)
    tried = wide.first()
    search, chosen, others = wide, tried, list[Tried]()
    if may_have_more_zeros(data["y"][num_held:], lowest(tried)[1]["values"]) and budget.allows(0.0):
        search, chosen, others = or_more_zeros(searching(True, True), wide, tried)
    if search is wide:
        search, chosen, more = or_less_variance(partial(searching, False, False), wide, tried, budget)
        others = others + more
    found = search.search(chosen)
    if not search.options["overdispersed"]:
        f = search.function(search.best["params"], search.best["Z"])
        found = replace(found, regularity=regularity_of(f, search.best["values"], search.held))
    found = replace(found, stages=[stage for stage, _ in others] + found.stages)
    if num_held:
        found = or_one_rate(found, search)
    return found, search


def may_have_more_zeros(y: np.ndarray, values: Values) -> bool:
    """Whether some counts are zero, and negative binomial ones of the mean have half as much variance again as Poisson ones."""
    return bool((y == 0).sum() >= LEAST_ZEROS and WIDE * y.mean() > values["concentration"])


def or_more_zeros(gated: LatentSearch, wide: LatentSearch, tried: list[Tried]) -> Begun:
    """The search that goes on, with more zeros or without; its first searches, and the others."""
    gated.take(wide.data["X"])
    best, ended = lowest(tried)
    no_slope = np.zeros(len(ended["values"]["lengthscale"]))
    start = ended["values"] | {"gate": np.array(-1.0), "gate_slope": no_slope}
    new = gated.first({"more zeros, where the other ended": start})
    return (gated, new, tried) if is_better(new[0][0], best, wide.num_held) else (wide, tried, new)


def or_less_variance(
    searching: Callable[[float], LatentSearch], wide: LatentSearch, tried: list[Tried], budget: Budget
) -> Begun:
    """Likewise with less variance: of Poisson counts, or of more regular ones.

    :param searching: a search for counts of a regularity.
    """
    best, ended = lowest(tried)
    f = wide.function(ended["params"], ended["Z"])
    ended = ended | {"values": without(ended["values"]), "params": without(ended["params"])}
    regularity = regularity_of(f, ended["values"], wide.held, best.held_out)
    narrow = searching(regularity)
    narrow.take(wide.data["X"])
    if budget.allows(0.0):
        name = "less variance" if regularity > 1 else "Poisson"
        plain = narrow.first({f"{name}, where the other ended": ended["values"]})
        is_wide = is_better(best, plain[0][0], wide.num_held, comparable=regularity == 1)
        return (wide, tried, plain) if is_wide else (narrow, plain, tried)
    return (wide, tried, []) if regularity == 1 else (narrow, [(best, ended)], tried)


def without(values: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters or parameters of negative binomial counts as those of Poisson ones."""
    return {name: value for name, value in values.items() if not name.startswith("concentration")}


def is_better(new: Stage, old: Stage, num_held: int, comparable: bool = True) -> bool:
    """Whether counts are of the larger family, by the best searches for this and for the smaller one. A few held-out rows that say
    neither may miss those that are far from the mean, so the bound decides then.

    :param comparable: whether losses compare. Those of a power of the likelihood do not.
    """
    gain = num_held * (new.held_out - old.held_out)
    by_rows = abs(gain) > CLEARLY or num_held >= ENOUGH or not comparable
    return bool(gain > CLEARLY if by_rows else new.loss < old.loss)


def regularity_of(f: GPFunction, values: Values, held: dict[str, np.ndarray], least: float = -np.inf) -> float:
    """How many times less held-out rows vary than Poisson ones. It grows while each step clearly predicts them better.

    :param least: mean log probability of held-out rows by negative binomial counts, which is to be exceeded.
    """
    if not len(held["y"]):
        return 1.0
    regularity, score = 1.0, float(scored(f, values, held).sum())
    while regularity < MOST_REGULAR:
        new = float(scored(f, values, held, STEP * regularity).sum())
        if new < score + CLEARLY:
            break
        regularity, score = STEP * regularity, new
    return regularity if score > least * len(held["y"]) else 1.0


def scored(f: GPFunction, values: Values, rows: dict[str, np.ndarray], regularity: float = 1.0) -> np.ndarray:
    """Log probabilities of the rows' counts, shape (N,)."""
    mean, variance = moments(f, rows["X"])
    given = mean + values["offset"] + np.log(rows["expected"]), np.sqrt(np.maximum(variance, 0))
    zeros = zeros_at(values, rows["X"])
    return predictions(values, *given, regularity=regularity, extra_zeros=zeros).log_density(rows["y"])


def zeros_at(values: Values, X: Any) -> Any:
    """Probabilities of additional zeros at standardized rows, shape (N,), or zero if there are none."""
    xp = np if isinstance(X, np.ndarray) else jnp
    return extra_zeros(X, values["gate"], values["gate_slope"], xp) if "gate" in values else 0.0


def predictions(values: Values, log_mean: np.ndarray, log_sd: np.ndarray, **more: Any) -> CountPredictions:
    """Distributions of counts, for normal log rates."""
    k = values.get("concentration")
    return CountPredictions(log_mean, log_sd, np.inf if k is None else float(k), _Densities(k), **more)


def or_one_rate(found: Found, search: LatentSearch) -> Found:
    """The fit, or one rate for all rows if this rate predicts held-out rows better."""
    seen, held, gated = search.seen, search.held, "gate" in found.values
    rate, k, zeros = one_rate(seen["y"], seen["expected"], gated)
    k = k if "concentration" in found.values else np.inf
    baseline = float(_pmf(held["y"], rate * held["expected"], k, zeros).mean())
    found = replace(found, baseline=baseline)
    if search.best_stage.held_out >= baseline:
        return found
    values = found.values | {"scale": np.array(1e-3), "slope": np.array(1e-3), "offset": np.log(np.array(rate))}
    if "concentration" in values:
        values["concentration"] = np.array(k)
    if gated:
        values |= {"gate": scipy.special.logit(np.array(zeros)), "gate_slope": 0 * values["gate_slope"]}
    params = found.params | {f"{name}_auto_loc": value for name, value in values.items()}
    params["f.u0_loc"] = np.zeros_like(params["f.u0_loc"])
    return replace(found, values=values, params=params, is_mean=True, regularity=1.0)


def one_rate(y: np.ndarray, expected: np.ndarray, gated: bool = False) -> tuple[float, float, float]:
    """If counts do not depend on inputs: the rate, relative to the expected counts, the concentration, and the probability of
    additional zeros, of maximum likelihood for the mean of the counts.

    :param gated: whether there may be such zeros.
    """
    rate = float(y.sum() / expected.sum())

    def loss(found: np.ndarray) -> float:
        zeros = float(scipy.special.expit(found[1])) if gated else 0.0
        k = float(np.exp(np.clip(found[0], -5.0, 12.0)))
        return -float(_pmf(y, rate / (1 - zeros) * expected, k, zeros).sum())

    if not gated:
        best = scipy.optimize.minimize_scalar(
            lambda log_k: loss(np.array([log_k])), bounds=(-5.0, 12.0), method="bounded"
        )
        return rate, float(np.exp(best.x)), 0.0
    log_k, logit = scipy.optimize.minimize(loss, [1.0, -1.0], method="Nelder-Mead").x
    zeros = float(scipy.special.expit(logit))
    return rate / (1 - zeros), float(np.exp(np.clip(log_k, -5.0, 12.0))), zeros


def _pmf(y: np.ndarray, mean: np.ndarray, k: float, zeros: float = 0.0) -> np.ndarray:
    counted = scipy.stats.poisson.logpmf(y, mean) if np.isinf(k) else scipy.stats.nbinom.logpmf(y, k, k / (k + mean))
    found = np.log1p(-zeros) + counted
    return np.where(y == 0, np.logaddexp(np.log(zeros), found), found) if zeros else np.asarray(found)


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
        with own_settings():
            return log_densities(self.concentration, log_mean, log_sd, y)
