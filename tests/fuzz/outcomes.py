"""What y may be given the function: each likelihood as it is printed, and as a NumPy density.

A density takes y (N,) and values eta of shape (..., N), or (..., N, K) where y depends on K functions, and returns (..., N).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit, gammaln, log_ndtr, logsumexp, ndtr

Rng = np.random.Generator


class Outcome(NamedTuple):
    """A likelihood.

    :param ours: its expression as a likelihood of the package, of ``f``; ``None`` where it has none of its own name.
    :param plain: the same as a NumPyro distribution of values ``f``, for draws and the general ``Likelihood``; "" if there is none.
    :param log_density: see the module.
    :param draw: y given eta.
    :param columns: how many functions each y depends on.
    :param numbers: draws the numbers in braces.
    :param bound: what stands for E[log p(y | f)], given means and variances of f, shape (N, K), where that is a bound.
    :param random: whether the expectation is an estimate from random points.
    """

    ours: str | None
    plain: str
    log_density: Callable[..., np.ndarray]
    draw: Callable[..., np.ndarray]
    columns: int = 1
    numbers: Callable[[Rng], dict[str, Any]] = lambda rng: {}
    bound: Callable[..., np.ndarray] | None = None
    random: bool = False


def _normal(y, m, s):
    return -0.5 * np.log(2 * np.pi) - np.log(s) - 0.5 * ((y - m) / s) ** 2


def _student(y, f, df, s):
    const = gammaln((df + 1) / 2) - gammaln(df / 2) - 0.5 * np.log(df * np.pi) - np.log(s)
    return const - (df + 1) / 2 * np.log1p(((y - f) / s) ** 2 / df)


def _choose(n, y):
    return gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1)


def _log_sigmoid(f):
    return -np.logaddexp(0.0, -f)


def _ordinal(y, f, cuts):
    """P(c_(y-1) < f + e < c_y), e standard normal."""
    ends = np.concatenate([[-np.inf], cuts, [np.inf]])
    y = y.astype(int)
    # On the side where both tails are small.
    low, high = ends[y] - f, ends[y + 1] - f
    flip = low > 0
    a, b = np.where(flip, -high, low), np.where(flip, -low, high)
    la, lb = log_ndtr(a), log_ndtr(b)
    return lb + np.log1p(-np.exp(la - lb))


def _draw_ordinal(rng, f, cuts):
    return (f[..., None] + rng.normal(size=(*f.shape, 1)) > np.asarray(cuts)).sum(-1)


def _categorical(y, f):
    picked = np.take_along_axis(f, np.broadcast_to(y.astype(int)[:, None], (*f.shape[:-1], 1)), -1)[..., 0]
    return picked - logsumexp(f, axis=-1)


def _draw_categorical(rng, f):
    return (f + rng.gumbel(size=f.shape)).argmax(-1)


def _binomial(y, f, n):
    return _choose(n, y) + y * _log_sigmoid(f) + (n - y) * _log_sigmoid(-f)


def _negative_binomial(y, f, k):
    lo = f - np.log(k)
    return gammaln(y + k) - gammaln(y + 1) - gammaln(k) + y * _log_sigmoid(lo) + k * _log_sigmoid(-lo)


def _zero_inflated(y, f, gate):
    counted = np.log1p(-gate) + y * f - np.exp(f) - gammaln(y + 1)
    return np.where(y == 0, np.logaddexp(np.log(gate), counted), counted)


def _gamma(y, f, k):
    return (k - 1) * np.log(y) - k * f - y * np.exp(-f) - gammaln(k)


def _weibull(y, f, k):
    z = k * (np.log(y) - f)
    return np.log(k) - np.log(y) + z - np.exp(z)


def _beta(y, f, c):
    p = np.clip(expit(f), 1e-15, 1 - 1e-15)
    a, b = c * p, c * (1 - p)
    return gammaln(c) - gammaln(a) - gammaln(b) + (a - 1) * np.log(y) + (b - 1) * np.log1p(-y)


def _softplus_poisson(y, f):
    rate = np.logaddexp(0.0, f)
    log_rate = np.where(f < -30, f, np.log(np.maximum(rate, 1e-300)))  # log(1 + e^f) is e^f there, and may underflow
    return y * log_rate - rate - gammaln(y + 1)


def _scale(low: float = 0.3, high: float = 1.0) -> Callable[[Rng], float]:
    return lambda rng: round(float(rng.uniform(low, high)), 2)


def _numbers(**draws: Callable[[Rng], Any]) -> Callable[[Rng], dict[str, Any]]:
    return lambda rng: {name: draw(rng) for name, draw in draws.items()}


def _rate(f, w):
    return (w * np.exp(f)).sum(-1)


def _area_poisson(y, f, w):
    return y * np.log(_rate(f, w)) - _rate(f, w) - gammaln(y + 1)


def _draw_area_poisson(rng, f, w):
    return rng.poisson(_rate(np.minimum(f, 2), w))


def _bound_poisson(y, m, v, w):
    """Law et al. 2018: expectations of the sum, and of its logarithm by log-sum-exp of means."""
    return y * np.log(_rate(m, w)) - _rate(m + v / 2, w) - gammaln(y + 1)


def _area_negative_binomial(y, f, w, k):
    return _negative_binomial(y, np.log(_rate(f, w)), k)


def _share(f, w):
    return (w * expit(f)).sum(-1) / w.sum(-1)


def _area_share(y, f, w, n):
    p = _share(f, w)
    return _choose(n, y) + y * np.log(p) + (n - y) * np.log1p(-p)


def _cuts(rng: Rng) -> tuple[float, ...]:
    return tuple(np.round(np.sort(rng.uniform(-1, 1, 2)) + np.array([-0.2, 0.2]), 2).tolist())


positive = _scale(0.5, 2.5)

OUTCOMES = {
    "gaussian": Outcome(
        "likelihoods.Gaussian({f}, {s})",
        "dist.Normal({f}, {s})",
        lambda y, f, s: _normal(y, f, s),
        lambda rng, f, s: f + s * rng.normal(size=f.shape),
        numbers=_numbers(s=_scale()),
    ),
    "bernoulli": Outcome(
        "likelihoods.Bernoulli({f})",
        "dist.Bernoulli(logits={f})",
        lambda y, f: _log_sigmoid((2 * y - 1) * f),
        lambda rng, f: rng.uniform(size=f.shape) < expit(f),
    ),
    "probit": Outcome(
        'likelihoods.Bernoulli({f}, "probit")',
        "dist.Bernoulli(probs=jax.scipy.special.ndtr({f}))",
        lambda y, f: log_ndtr((2 * y - 1) * f),
        lambda rng, f: rng.uniform(size=f.shape) < ndtr(f),
    ),
    "binomial": Outcome(
        "likelihoods.Binomial({f}, {n})",
        "dist.Binomial({n}, logits={f})",
        lambda y, f, n: _binomial(y, f, n),
        lambda rng, f, n: rng.binomial(n, expit(f)),
        numbers=_numbers(n=lambda rng: int(rng.integers(2, 9))),
    ),
    "poisson": Outcome(
        "likelihoods.Poisson({f}, {e})",
        "dist.Poisson({e} * jnp.exp({f}))",
        lambda y, f, e: y * (f + np.log(e)) - e * np.exp(f) - gammaln(y + 1),
        lambda rng, f, e: rng.poisson(e * np.exp(np.minimum(f, 3))),
        numbers=_numbers(e=positive),
    ),
    "softplus_poisson": Outcome(
        'likelihoods.Poisson({f}, link="softplus")',
        "dist.Poisson(jax.nn.softplus({f}))",
        _softplus_poisson,
        lambda rng, f: rng.poisson(np.logaddexp(0.0, f)),
    ),
    "negative_binomial": Outcome(
        "likelihoods.NegativeBinomial({f}, {k})",
        "dist.NegativeBinomial2(jnp.exp({f}), {k})",
        _negative_binomial,
        lambda rng, f, k: rng.poisson(rng.gamma(k, np.exp(np.minimum(f, 3)) / k)),
        numbers=_numbers(k=positive),
    ),
    "zero_inflated": Outcome(
        "likelihoods.ZeroInflated(likelihoods.Poisson({f}), {gate})",
        "dist.ZeroInflatedPoisson({gate}, rate=jnp.exp({f}))",
        _zero_inflated,
        lambda rng, f, gate: rng.poisson(np.exp(np.minimum(f, 3))) * (rng.uniform(size=f.shape) > gate),
        numbers=_numbers(gate=_scale(0.1, 0.6)),
    ),
    "student": Outcome(
        "likelihoods.StudentT({f}, {df}, {s})",
        "dist.StudentT({df}, {f}, {s})",
        _student,
        lambda rng, f, df, s: f + s * np.clip(rng.standard_t(df, f.shape), -5, 5),
        numbers=_numbers(df=lambda rng: float(rng.integers(3, 9)), s=_scale(0.4, 1.0)),
    ),
    "laplace": Outcome(
        "likelihoods.Laplace({f}, {s})",
        "dist.Laplace({f}, {s})",
        lambda y, f, s: -np.log(2 * s) - np.abs(y - f) / s,
        lambda rng, f, s: f + rng.laplace(scale=s, size=f.shape),
        numbers=_numbers(s=_scale()),
    ),
    "beta": Outcome(
        "likelihoods.Beta({f}, {c})",
        "dist.Beta({c} * jax.nn.sigmoid({f}), {c} * jax.nn.sigmoid(-{f}))",
        _beta,
        lambda rng, f, c: np.clip(rng.beta(c * expit(f), c * expit(-f)), 0.02, 0.98),
        numbers=_numbers(c=_scale(2.0, 8.0)),
    ),
    "exponential": Outcome(
        "likelihoods.Exponential({f})",
        "dist.Exponential(jnp.exp(-{f}))",
        lambda y, f: -f - y * np.exp(-f),
        lambda rng, f: rng.exponential(np.exp(f)) + 0.02,
    ),
    "gamma": Outcome(
        "likelihoods.Gamma({f}, {k})",
        "dist.Gamma({k}, jnp.exp(-{f}))",
        _gamma,
        lambda rng, f, k: rng.gamma(k, np.exp(f)) + 0.02,
        numbers=_numbers(k=positive),
    ),
    "weibull": Outcome(
        "likelihoods.Weibull({f}, {k})",
        "dist.Weibull(jnp.exp({f}), {k})",
        _weibull,
        lambda rng, f, k: np.exp(f) * rng.weibull(k, f.shape) + 0.05,
        numbers=_numbers(k=_scale(0.7, 2.0)),
    ),
    "log_normal": Outcome(
        "likelihoods.LogNormal({f}, {s})",
        "dist.LogNormal({f}, {s})",
        lambda y, f, s: _normal(np.log(y), f, s) - np.log(y),
        lambda rng, f, s: np.exp(f + s * rng.normal(size=f.shape)) + 0.02,
        numbers=_numbers(s=_scale()),
    ),
    "warped": Outcome(
        "likelihoods.Transformed(likelihoods.Gaussian({f}, {s}), [dist.transforms.ExpTransform()])",
        "dist.TransformedDistribution(dist.Normal({f}, {s}), [dist.transforms.ExpTransform()])",
        lambda y, f, s: _normal(np.log(y), f, s) - np.log(y),
        lambda rng, f, s: np.exp(f + s * rng.normal(size=f.shape)) + 0.02,
        numbers=_numbers(s=_scale()),
    ),
    "ordinal": Outcome(
        "likelihoods.Ordinal({f}, A({cuts}))",
        "",
        _ordinal,
        _draw_ordinal,
        numbers=_numbers(cuts=_cuts),
    ),
    "heteroskedastic": Outcome(
        "likelihoods.HeteroskedasticGaussian({f})",
        "dist.Normal({f}[..., 0], jnp.exp({f}[..., 1]))",
        lambda y, f: _normal(y, f[..., 0], np.exp(f[..., 1])),
        lambda rng, f: f[..., 0] + np.exp(f[..., 1] / 2) * rng.normal(size=f.shape[:-1]),
        columns=2,
    ),
    "categorical": Outcome(
        "likelihoods.Categorical({f})",
        "dist.Categorical(logits={f})",
        _categorical,
        _draw_categorical,
        columns=3,
    ),
    "area_poisson": Outcome(
        "likelihoods.PoissonOfSum({f}, {w})",
        "",
        _area_poisson,
        _draw_area_poisson,
        columns=2,
        random=True,
    ),
    "area_bound": Outcome(
        "likelihoods.PoissonOfSum({f}, {w}, by_marginals=True)",
        "",
        _area_poisson,
        _draw_area_poisson,
        columns=3,
        bound=_bound_poisson,
    ),
    "area_negative_binomial": Outcome(
        "likelihoods.NegativeBinomialOfSum({f}, {w}, {k})",
        "",
        _area_negative_binomial,
        lambda rng, f, w, k: rng.poisson(rng.gamma(k, _rate(np.minimum(f, 2), w) / k)),
        columns=2,
        numbers=_numbers(k=positive),
        random=True,
    ),
    "area_share": Outcome(
        "likelihoods.BinomialOfAverage({f}, {w}, {n})",
        "",
        _area_share,
        lambda rng, f, w, n: rng.binomial(n, _share(f, w)),
        columns=3,
        numbers=_numbers(n=lambda rng: int(rng.integers(2, 9))),
        random=True,
    ),
}
AREAS = tuple(name for name in OUTCOMES if name.startswith("area_"))

WHOLE = (
    "bernoulli",
    "probit",
    "binomial",
    "poisson",
    "softplus_poisson",
    "negative_binomial",
    "zero_inflated",
    "ordinal",
    "categorical",
)
