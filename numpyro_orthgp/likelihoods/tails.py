"""log p(y | f) of NumPyro's censored, truncated and ordered distributions, also where f is far from y.

NumPyro computes a distribution function and takes its logarithm. The function rounds to zero or one where y is eight scales away
from f (five in float32), and its logarithm is infinite, or clipped to some number whose derivative is zero. Nodes of a wide q and
starts of fits are there. Here logarithms are computed at once, for bases that are known; for others they are NumPyro's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.likelihoods.special import branches, log1mexp, log_gammaincc, log_ndtr, log_ndtr_difference
from numpyro_orthgp.types import Array

__all__ = ["log_prob"]

_LEAST = -33.0  # of log x, below which log(1 - exp(-x)) is log x


def log_prob(given: Any, y: Array) -> Array:
    """``given.log_prob(y)``, with the precise formulas of this module where there are any.

    :param given: any distribution of NumPyro.
    """
    if isinstance(given, dist.Independent):
        values = log_prob(given.base_dist, y)
        return values.sum(tuple(range(values.ndim - given.reinterpreted_batch_ndims, values.ndim)))
    formula, base = _FORMULAS.get(type(given)), getattr(given, "base_dist", None)
    known = formula is not None and (base is None or type(base) in _TAILS)
    density: Array = formula(given, y) if formula is not None and known else given.log_prob(y)
    return density


def _left_censored(given: Any, y: Array) -> Array:
    return jnp.where(given.censored, _log_cdf(given.base_dist, y), given.base_dist.log_prob(y))


def _right_censored(given: Any, y: Array) -> Array:
    return jnp.where(given.censored, _log_survival(given.base_dist, y), given.base_dist.log_prob(y))


def _interval_censored(given: Any, y: Array) -> Array:
    """As NumPyro reads its two marks: left alone, right alone, both (outside of the interval), neither (inside, or a point)."""
    base, low, high = given.base_dist, y[..., 0], y[..., 1]
    left, right, inside, _, point = given._get_censoring_masks(y)
    low, high = jnp.where(left, high, low), jnp.where(right, low, high)  # what is not used may be anything
    between = _log_between(base, jnp.where(inside, low, high - 1), high)
    allowed = base.support.feasible_like(low)
    finite = jnp.where(jnp.isfinite(low), low, jnp.where(jnp.isfinite(high), high, allowed))
    below = _log_cdf(base, jnp.where(inside, finite, low))
    above = _log_survival(base, jnp.where(inside, finite, high))
    density = base.log_prob(jnp.where(point, low, allowed))
    return jnp.select([left, right, inside, point], [below, above, between, density], jnp.logaddexp(below, above))


def _left_truncated(given: Any, y: Array) -> Array:
    return given.base_dist.log_prob(y) - _log_survival(given.base_dist, given.low)


def _right_truncated(given: Any, y: Array) -> Array:
    return given.base_dist.log_prob(y) - _log_cdf(given.base_dist, given.high)


def _truncated(given: Any, y: Array) -> Array:
    return given.base_dist.log_prob(y) - _log_between(given.base_dist, given.low, given.high)


def _ordered_logistic(given: Any, y: Array) -> Array:
    infinite = jnp.full((*given.cutpoints.shape[:-1], 1), jnp.inf, given.cutpoints.dtype)
    ends = jnp.concatenate([-infinite, given.cutpoints, infinite], -1)
    shape = jnp.broadcast_shapes(y.shape, ends.shape[:-1])
    ends, y = jnp.broadcast_to(ends, (*shape, ends.shape[-1])), jnp.broadcast_to(y, shape).astype(int)[..., None]
    low, high = (jnp.take_along_axis(ends, y + i, -1)[..., 0] for i in (0, 1))
    return _log_between(dist.Logistic(given.predictor, 1.0), low, high)


_FORMULAS: dict[type, Callable[[Any, Array], Array]] = {
    dist.LeftCensoredDistribution: _left_censored,
    dist.RightCensoredDistribution: _right_censored,
    dist.IntervalCensoredDistribution: _interval_censored,
    dist.LeftTruncatedDistribution: _left_truncated,
    dist.RightTruncatedDistribution: _right_truncated,
    dist.TwoSidedTruncatedDistribution: _truncated,
    dist.OrderedLogistic: _ordered_logistic,
}


def _log_cdf(base: Any, y: Array) -> Array:
    return _TAILS[type(base)][0](base, y)


def _log_survival(base: Any, y: Array) -> Array:
    return _TAILS[type(base)][1](base, y)


def _log_between(base: Any, low: Array, high: Array) -> Array:
    """log P(low < Y < high); either may be infinite."""
    no_start, no_end = low == -jnp.inf, high == jnp.inf
    low = jnp.where(no_start, jnp.where(no_end, 0.0, high - 1), low)
    high = jnp.where(no_end, low + 1, high)
    outer = jnp.where(no_start, _log_cdf(base, high), _log_survival(base, low))
    between = _log_difference(base, low, high)
    return jnp.where(no_start & no_end, 0.0, jnp.where(no_start | no_end, outer, between))


def _log_difference(base: Any, low: Array, high: Array) -> Array:
    """:func:`_log_between` for finite ends, by the two probabilities on the side where they are small."""
    if type(base) in _SCORES:
        a, b = (_SCORES[type(base)](base, x) for x in (low, high))
        return log_ndtr_difference(b, b - a, jnp.zeros(b.shape, bool))
    if type(base) is dist.Logistic:
        a, b = _score(base, low), _score(base, high)
        return log1mexp(b - a) - jax.nn.softplus(-b) - jax.nn.softplus(a)
    above = _log_survival(base, low) < _log_cdf(base, high)
    larger = jnp.where(above, _log_survival(base, low), _log_cdf(base, high))
    smaller = jnp.where(above, _log_survival(base, high), _log_cdf(base, low))
    return larger + log1mexp(larger - smaller)


def _score(base: Any, y: Array) -> Array:
    return (y - base.loc) / base.scale


def _score_of_log(base: Any, y: Array) -> Array:
    return (_log(y) - base.loc) / base.scale


def _log(y: Array) -> Array:
    return jnp.log(jnp.maximum(y, jnp.finfo(jnp.result_type(y, float)).tiny))


def _log1mexp_of_exp(log_x: Array) -> Array:
    """log(1 - exp(-x)), also where x underflows."""
    below, low, near = branches(log_x, _LEAST)
    return jnp.where(below, low, log1mexp(jnp.exp(near)))


def _log_laplace(z: Array) -> Array:
    below, low, high = branches(z, 0.0)
    return jnp.where(below, low - jnp.log(2.0), jnp.log1p(-jnp.exp(-high) / 2))


def _mirrored(of_score: Callable[[Array], Array]) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Of a symmetric base, from the logarithm of its standard distribution function."""
    return lambda base, y: of_score(_score(base, y)), lambda base, y: of_score(-_score(base, y))


def _log_of_cdf(base: Any, y: Array) -> Array:
    return jnp.log(jnp.maximum(base.cdf(y), jnp.finfo(jnp.result_type(y, float)).tiny))


def _log_student_t(base: Any, z: Array) -> Array:
    """The derivative of the incomplete beta function has no digits about z = 0, where the distribution function is a line."""
    inner = z**2 < jnp.sqrt(jnp.finfo(z.dtype).eps)
    standard = dist.StudentT(base.df)
    line = 0.5 + jnp.exp(standard.log_prob(jnp.zeros((), z.dtype))) * jnp.where(inner, z, 0)
    outer = jnp.maximum(standard.cdf(jnp.where(inner, 1, z)), jnp.finfo(z.dtype).tiny)
    return jnp.log(jnp.where(inner, line, outer))


def _log_of_mirrored_cdf(base: Any, y: Array) -> Array:
    return _log_of_cdf(base, 2 * base.loc - y)


def _weibull(base: Any, y: Array) -> Array:
    return base.concentration * (_log(y) - jnp.log(base.scale))


_SCORES: dict[type, Callable[[Any, Array], Array]] = {dist.Normal: _score, dist.LogNormal: _score_of_log}
# log P(Y <= y) and log P(Y > y)
_TAILS: dict[type, tuple[Callable[[Any, Array], Array], Callable[[Any, Array], Array]]] = {
    dist.Normal: _mirrored(log_ndtr),
    dist.LogNormal: (lambda d, y: log_ndtr(_score_of_log(d, y)), lambda d, y: log_ndtr(-_score_of_log(d, y))),
    dist.Logistic: _mirrored(lambda z: -jax.nn.softplus(-z)),
    dist.Laplace: _mirrored(_log_laplace),
    dist.Cauchy: _mirrored(lambda z: jnp.log(jnp.arctan2(1.0, -z) / jnp.pi)),
    dist.StudentT: (lambda d, y: _log_student_t(d, _score(d, y)), lambda d, y: _log_student_t(d, -_score(d, y))),
    dist.SoftLaplace: (_log_of_cdf, _log_of_mirrored_cdf),
    dist.Gumbel: (lambda d, y: -jnp.exp(-_score(d, y)), lambda d, y: _log1mexp_of_exp(-_score(d, y))),
    dist.Weibull: (lambda d, y: _log1mexp_of_exp(_weibull(d, y)), lambda d, y: -jnp.exp(_weibull(d, y))),
    dist.Exponential: (lambda d, y: _log1mexp_of_exp(jnp.log(d.rate) + _log(y)), lambda d, y: -d.rate * y),
    dist.Gamma: (_log_of_cdf, lambda d, y: log_gammaincc(d.concentration, jnp.log(d.rate) + _log(y))),
}
