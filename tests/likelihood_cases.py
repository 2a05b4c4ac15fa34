"""One row per likelihood: how to build it, outputs, and log p(y | f) in numpy and scipy, which share no code with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.tree_util import Partial
from numpyro.distributions.transforms import AffineTransform, ExpTransform
from scipy import stats
from scipy.special import (
    betaln,
    expit,
    gammaln,
    log_expit,
    log_ndtr,
    log_softmax,
    logsumexp,
    ndtr,
    xlog1py,
)

import numpyro_orthgp as ogp
from numpyro_orthgp import likelihoods
from numpyro_orthgp.likelihoods import ExpectedLikelihood

B = 4


@dataclass(frozen=True)
class Case:
    """A likelihood; ``log_density`` takes f of shape (S, B) or (S, B, P), the outputs and the parameters."""

    name: str
    build: Callable[..., ExpectedLikelihood]
    y: Any
    log_density: Callable[..., np.ndarray]
    params: dict[str, Any] = field(default_factory=dict)
    num_latents: int | None = None
    mixes: bool = False
    learned_v: bool = True  # tightened by the v that the guide learns, not by one of its own
    nodes: int = 100
    rtol: float = 1e-9  # of the expectation with that many nodes, or in closed form
    predictive_rtol: float = 1e-7
    quadrature_rtol: float = 1e-8  # of a closed form against that many nodes
    default_rtol: float = 1e-5  # with the default integrator
    grid: int = 2001  # points of the trapezoid rule
    huge: tuple[int, ...] = (-1, 1)  # signs of a mean of 1000 for which the truth is a number

    def __call__(self, m: ogp.Marginals, integrator: Any = None, **params: Any) -> ExpectedLikelihood:
        takes_none = self.build in (likelihoods.Gaussian, warped)
        options = {} if integrator is None or takes_none else {"integrator": integrator}
        return self.build(m, **{**self.params, **params}, **options)


SCALES = np.array([0.3, 0.5, 0.8, 1.1])
REAL = np.array([0.4, -1.2, 2.0, 0.1])
REAL2 = np.stack([REAL, REAL[::-1] - 0.3], -1)
UNIT = np.array([0.3, 0.9, 0.55, 0.02])
TIMES = np.array([0.5, 2.0, 0.05, 4.0])
CENSORED = np.array([False, True, False, True])
COUNTS = np.array([0, 3, 1, 6])
TOTALS = np.array([2, 3, 5, 6])
LABELS = np.array([0, 1, 1, 0])
GRADES = np.array([0, 3, 1, 2])
CLASSES = np.array([0, 2, 1, 2])
CUTS = np.array([-0.8, 0.1, 1.3])
EPSILON = 0.02


def warped(m, scale, shift):
    return likelihoods.Transformed(likelihoods.Gaussian(m, scale), [AffineTransform(shift, 0.5), ExpTransform()])


def exp_student(m, df, scale, **options):
    return likelihoods.Transformed(likelihoods.StudentT(m, df, scale, **options), ExpTransform())


def inflated_poisson(m, gate, **options):
    return likelihoods.ZeroInflated(likelihoods.Poisson(m, **options), gate)


def inflated_binomial(m, gate, **options):
    return likelihoods.ZeroInflated(likelihoods.Binomial(m, TOTALS, "cloglog", **options), gate)


def with_(cls, *args, **fixed):
    return lambda m, integrator=None, **params: cls(m, *args, **fixed, **params, integrator=integrator)


def log_normal(f, y, scale):
    return stats.norm.logpdf(y, f, scale)


def log_categorical(f, y):
    index = np.broadcast_to(y[:, None], (*f.shape[:-1], 1))
    return np.take_along_axis(log_softmax(f, -1), index, -1)[..., 0]


def log_robustmax(f, y, epsilon):
    return np.where(f.argmax(-1) == y, np.log(1 - epsilon), np.log(epsilon / (f.shape[-1] - 1)))


def log_negative_binomial(log_mean, y, c):
    odds = y * log_expit(log_mean - np.log(c)) + c * log_expit(np.log(c) - log_mean)
    return gammaln(y + c) - gammaln(c) - gammaln(y + 1) + odds


def log_binomial(log_p, log_not_p, y):
    ways = -betaln(y + 1, TOTALS - y + 1) - np.log(TOTALS + 1)
    return ways + y * log_p + (TOTALS - y) * log_not_p


def log_cloglog(f):
    x = np.exp(np.minimum(f, 6))
    return np.where(f < -30, f, np.log(-np.expm1(-np.where(f < -30, 1, x))))


def log_inflated(log_p, y, gate):
    return np.where(y == 0, np.logaddexp(np.log(gate), np.log1p(-gate) + log_p), np.log1p(-gate) + log_p)


def log_beta(f, y, concentration):
    a, b = concentration * ndtr(f), concentration * ndtr(-f)
    # gamma(a) = gamma(a + 1) / a, with log a where a is no number any more
    log_ab = 2 * np.log(concentration) + log_ndtr(f) + log_ndtr(-f)
    norm = gammaln(concentration) + log_ab - gammaln(a + 1) - gammaln(b + 1)
    return norm + (a - 1) * np.log(y) + xlog1py(b - 1, -y)


def log_ordinal(cdf, f, y, cutpoints):
    edges = np.array([-np.inf, *cutpoints, np.inf])
    high, low = edges[y + 1] - f, edges[y] - f
    mirrored = high + low > 0
    high, low = np.where(mirrored, -low, high), np.where(mirrored, -high, low)
    return np.log(cdf(high) - cdf(low))


def log_time(distribution, f, y, **shape):
    """Density of a time seen, survival function of one that is censored."""
    given = distribution(scale=np.exp(f), **shape)
    log_survival = given.logsf(y)
    if (
        distribution is stats.gamma
    ):  # scipy's is infinite where the function underflows: asymptotic series (DLMF 8.11.2)
        a, x = shape["a"], y * np.exp(-f)
        series = sum(np.prod([(a - j) / x for j in range(1, n + 1)], axis=0) for n in range(8))
        log_survival = np.where(x > 300, (a - 1) * np.log(x) - x - gammaln(a) + np.log(np.abs(series)), log_survival)
    return np.where(CENSORED, log_survival, given.logpdf(y))


def softplus(f):
    return np.logaddexp(0, f)


CASES = [
    Case("gaussian", likelihoods.Gaussian, REAL, log_normal, {"scale": 0.4}, learned_v=False),
    Case("gaussian per point", likelihoods.Gaussian, REAL, log_normal, {"scale": SCALES}, learned_v=False),
    Case(
        "gaussian (B, P)",
        likelihoods.Gaussian,
        REAL2,
        log_normal,
        {"scale": np.array([0.3, 0.7])},
        num_latents=2,
        learned_v=False,
    ),
    Case(
        "heteroskedastic exp",
        likelihoods.HeteroskedasticGaussian,
        REAL,
        lambda f, y: log_normal(f[..., 0], y, np.exp(f[..., 1])),
        num_latents=2,
        mixes=True,
        nodes=60,
        huge=(),
    ),
    Case(
        "heteroskedastic softplus",
        with_(likelihoods.HeteroskedasticGaussian, "softplus"),
        REAL,
        lambda f, y: log_normal(f[..., 0], y, softplus(f[..., 1])),
        num_latents=2,
        mixes=True,
        nodes=60,
        rtol=1e-7,
        default_rtol=1e-3,
        huge=(),
    ),
    Case(
        "student t",
        likelihoods.StudentT,
        REAL,
        lambda f, y, df, scale: stats.t.logpdf(y, df, f, scale),
        {"df": 6.0, "scale": 0.9},
        rtol=1e-5,
        predictive_rtol=1e-5,
        default_rtol=5e-3,
    ),
    Case(
        "laplace",
        likelihoods.Laplace,
        REAL,
        lambda f, y, scale: stats.laplace.logpdf(y, f, scale),
        {"scale": 0.6},
        quadrature_rtol=2e-2,
        grid=200_001,
    ),
    Case(
        "asymmetric laplace",
        likelihoods.AsymmetricLaplace,
        REAL,
        lambda f, y, scale, quantile: (
            np.log(quantile * (1 - quantile) / scale) - (y - f) / scale * (quantile - (y < f))
        ),
        {"scale": 0.4, "quantile": np.array([0.1, 0.5, 0.75, 0.95])},
        quadrature_rtol=3e-2,
        grid=200_001,
    ),
    Case(
        "beta",
        with_(likelihoods.Beta, link="probit"),
        UNIT,
        log_beta,
        {"concentration": 4.0},
        rtol=1e-7,
        predictive_rtol=1e-5,
        default_rtol=5e-3,
    ),
    Case("logit", likelihoods.Bernoulli, LABELS, lambda f, y: log_expit((2 * y - 1) * f)),
    Case("probit", with_(likelihoods.Bernoulli, "probit"), LABELS, lambda f, y: log_ndtr((2 * y - 1) * f)),
    Case(
        "cloglog",
        with_(likelihoods.Bernoulli, "cloglog"),
        LABELS,
        lambda f, y: np.where(y == 1, log_cloglog(f), -np.exp(f)),
        huge=(-1,),
    ),
    Case(
        "binomial",
        with_(likelihoods.Binomial, TOTALS),
        COUNTS,
        lambda f, y: log_binomial(log_expit(f), log_expit(-f), y),
        default_rtol=1e-4,
    ),
    Case(
        "binomial cloglog",
        with_(likelihoods.Binomial, TOTALS, "cloglog"),
        COUNTS,
        lambda f, y: log_binomial(log_cloglog(f), -np.exp(f), y),
        default_rtol=1e-3,
        huge=(-1,),
    ),
    Case(
        "poisson",
        likelihoods.Poisson,
        COUNTS,
        lambda f, y, exposure: stats.poisson.logpmf(y, exposure * np.exp(f)),
        {"exposure": np.array([0.5, 1.0, 2.0, 3.0])},
        default_rtol=1e-4,
        huge=(-1,),
    ),
    Case(
        "poisson softplus",
        with_(likelihoods.Poisson, link="softplus"),
        COUNTS,
        lambda f, y, exposure: y * np.log(exposure * softplus(f)) - exposure * softplus(f) - gammaln(y + 1),
        {"exposure": 1.5},
        default_rtol=1e-4,
        huge=(1,),  # numpy's softplus of -1000 is zero
    ),
    Case(
        "negative binomial",
        likelihoods.NegativeBinomial,
        COUNTS,
        lambda f, y, concentration, exposure: log_negative_binomial(f + np.log(exposure), y, concentration),
        {"concentration": 2.5, "exposure": np.array([0.5, 1.0, 2.0, 3.0])},
        rtol=1e-7,
        default_rtol=1e-4,
    ),
    Case(
        "negative binomial softplus",
        with_(likelihoods.NegativeBinomial, link="softplus"),
        COUNTS,
        lambda f, y, concentration: log_negative_binomial(np.log(softplus(f)), y, concentration),
        {"concentration": 40.0},
        rtol=1e-7,
        default_rtol=1e-4,
        huge=(1,),
    ),
    Case(
        "zero-inflated poisson",
        inflated_poisson,
        COUNTS,
        lambda f, y, gate: log_inflated(stats.poisson.logpmf(y, np.exp(f)), y, gate),
        {"gate": 0.2},
        default_rtol=1e-4,
        huge=(-1,),
    ),
    Case(
        "zero-inflated binomial",
        inflated_binomial,
        COUNTS,
        lambda f, y, gate: log_inflated(log_binomial(log_cloglog(f), -np.exp(f), y), y, gate),
        {"gate": np.array([0.3, 0.1, 0.2, 0.4])},
        default_rtol=1e-3,
        huge=(-1,),
    ),
    Case(
        "exponential",
        with_(likelihoods.Exponential, CENSORED),
        TIMES,
        lambda f, y: log_time(stats.expon, f, y),
        default_rtol=1e-3,
        predictive_rtol=1e-6,
        huge=(1,),
    ),
    Case(
        "weibull",
        with_(likelihoods.Weibull, censored=CENSORED),
        TIMES,
        lambda f, y, concentration: log_time(stats.weibull_min, f, y, c=concentration),
        {"concentration": np.array([0.7, 0.9, 1.3, 1.6])},
        default_rtol=2e-3,
        predictive_rtol=1e-6,
        huge=(1,),
    ),
    Case(
        "gamma",
        with_(likelihoods.Gamma, censored=CENSORED),
        TIMES,
        lambda f, y, concentration: log_time(stats.gamma, f, y, a=concentration),
        {"concentration": np.array([0.6, 1.4, 2.5, 3.0])},
        rtol=1e-8,
        predictive_rtol=1e-5,
        default_rtol=5e-3,
        huge=(1,),
    ),
    Case(
        "log-normal",
        with_(likelihoods.LogNormal, censored=CENSORED),
        TIMES,
        lambda f, y, scale: log_time(stats.lognorm, f, y, s=scale),
        {"scale": 0.8},
    ),
    Case(
        "log-normal, all seen",
        likelihoods.LogNormal,
        TIMES,
        lambda f, y, scale: stats.lognorm.logpdf(y, s=scale, scale=np.exp(f)),
        {"scale": SCALES},
        learned_v=False,
        huge=(),  # scipy wants exp(f)
    ),
    Case(
        "ordinal",
        likelihoods.Ordinal,
        GRADES,
        lambda f, y, cutpoints: log_ordinal(ndtr, f, y, cutpoints),
        {"cutpoints": CUTS},
        rtol=1e-6,
        default_rtol=1e-3,
    ),
    Case(
        "ordinal logit",
        with_(likelihoods.Ordinal, link="logit"),
        GRADES,
        lambda f, y, cutpoints: log_ordinal(expit, f, y, cutpoints),
        {"cutpoints": CUTS},
    ),
    Case(
        "categorical",
        likelihoods.Categorical,
        CLASSES,
        log_categorical,
        num_latents=3,
        mixes=True,
        nodes=40,
        default_rtol=2e-2,
        huge=(),
    ),
    Case(
        "robustmax",
        with_(likelihoods.Categorical, "robustmax"),
        CLASSES,
        log_robustmax,
        {"epsilon": EPSILON},
        num_latents=3,
        mixes=True,
        rtol=1e-5,
        predictive_rtol=1e-5,
        default_rtol=1e-3,
    ),
    Case(
        "warped gaussian",
        warped,
        TIMES,
        lambda f, y, scale, shift: log_normal(f, 2 * (np.log(y) - shift), scale) - np.log(y / 2),
        {"scale": 0.4, "shift": 0.3},
        learned_v=False,
    ),
    Case(
        "exponentiated student t",
        exp_student,
        TIMES,
        lambda f, y, df, scale: stats.t.logpdf(np.log(y), df, f, scale) - np.log(y),
        {"df": 6.0, "scale": 0.9},
        rtol=1e-5,
        predictive_rtol=1e-5,
        default_rtol=5e-3,
    ),
    Case(
        "general negative binomial",
        lambda m, c, **k: ogp.Likelihood(
            m, Partial(lambda c, f: dist.NegativeBinomial2(jnp.exp(f), c), jnp.asarray(c)), **k
        ),
        COUNTS,
        lambda f, y, c: log_negative_binomial(f, y, c),
        {"c": 2.5},
        rtol=1e-7,
        default_rtol=1e-4,
        huge=(),
    ),
    Case(
        "general heteroskedastic",
        lambda m, floor, **k: ogp.Likelihood(m, lambda f: dist.Normal(f[..., 0], jnp.exp(f[..., 1]) + floor), **k),
        REAL,
        lambda f, y, floor: log_normal(f[..., 0], y, np.exp(f[..., 1]) + floor),
        {"floor": 0.3},
        num_latents=2,
        mixes=True,
        nodes=60,
        rtol=1e-7,
        huge=(),
    ),
    Case(
        "elementwise exponential",
        lambda m, rate, **k: ogp.Likelihood(m, lambda f: dist.Exponential(rate * jnp.exp(f)), **k),
        np.exp(REAL2),
        lambda f, y, rate: np.log(rate) + f - rate * np.exp(f) * y,
        {"rate": np.array([0.7, 1.6])},
        num_latents=2,
        huge=(),
    ),
]
BY_NAME = {case.name: case for case in CASES}


def marginals(num_latents: int | None = None, dtype: Any = float, **fields: Any) -> ogp.Marginals:
    rng = np.random.default_rng(1)
    shape = (B,) if num_latents is None else (B, num_latents)
    if num_latents == 2:  # two functions, put side by side
        parts = [(rng.normal(size=B), rng.uniform(0.05, 0.3, B), rng.uniform(0.05, 0.3, B)) for _ in range(2)]
        v = fields.pop("residual_scale", None)
        v = [None, None] if v is None else np.broadcast_to(v, (2,))
        return ogp.stack(
            [
                ogp.Marginals(
                    *(jnp.asarray(a, dtype) for a in part), residual_scale=None if s is None else jnp.asarray(s, dtype)
                )
                for part, s in zip(parts, v, strict=True)
            ]
        )
    mean, explained, residual = rng.normal(size=shape), rng.uniform(0.1, 0.6, shape), rng.uniform(0.1, 0.6, shape)
    return ogp.Marginals(*(jnp.asarray(a, dtype) for a in (mean, explained, residual)), **fields)


def tightened(case: Case, dtype: Any = float) -> tuple[ogp.Marginals, np.ndarray, np.ndarray]:
    """Marginals with a v that the guide learned (if the case uses it), their variance, and what log_prob pays."""
    if not case.learned_v:
        m = marginals(case.num_latents, dtype)
        return m, np.asarray(m.explained + m.residual), np.zeros(np.shape(case.y))
    v = np.array([0.6, 1.7, 0.3])[: case.num_latents] if case.num_latents else np.array(0.6)
    m = marginals(case.num_latents, dtype, residual_scale=jnp.asarray(v, dtype))
    cost = np.broadcast_to((v - np.log(v) - 1) / 2, m.shape)
    return m, np.asarray(m.explained) + v * np.asarray(m.residual), cost.sum(-1) if case.mixes else cost


def integrate(case: Case, mean, variance, fn) -> tuple[np.ndarray, np.ndarray]:
    """E[fn(f)] and log E[exp(fn(f))], f independent normal, by the trapezoid rule on +-8 standard deviations."""
    dim = case.num_latents if case.mixes else 1
    t = np.linspace(-8, 8, {1: case.grid, 2: 401, 3: 41}[dim])
    log_w = stats.norm.logpdf(t) + np.log(t[1] - t[0])
    grid = np.stack(np.meshgrid(*[t] * dim, indexing="ij"), -1).reshape(-1, dim)
    log_weights = sum(np.meshgrid(*[log_w] * dim, indexing="ij")).ravel()
    nodes = grid[:, None, :] if case.mixes else grid.reshape(-1, *(1,) * np.ndim(mean))
    values = fn(np.asarray(mean) + np.sqrt(variance) * nodes)
    log_terms = log_weights.reshape(-1, *(1,) * (values.ndim - 1)) + values
    return np.tensordot(np.exp(log_weights), values, 1), logsumexp(log_terms, axis=0)


def largest_of_three(mean, variance, epsilon, y) -> tuple[np.ndarray, np.ndarray]:
    """Expectation and log predictive density of robustmax, from the distribution function of two differences of f."""
    p = np.empty(len(y))
    for i, c in enumerate(y):
        others = np.delete(np.arange(3), c)
        covariance = variance[i, c] + np.diag(variance[i, others])
        given = stats.multivariate_normal(np.zeros(2), covariance, abseps=1e-12, releps=1e-12)
        p[i] = given.cdf(mean[i, c] - mean[i, others])
    expectation = p * np.log(1 - epsilon) + (1 - p) * np.log(epsilon / 2)
    return expectation, np.log((1 - epsilon) * p + epsilon / 2 * (1 - p))
