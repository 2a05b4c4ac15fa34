"""Counts without an upper limit, and counts with additional zeros."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, nn
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator, expectation
from numpyro_orthgp.likelihoods.checks import FRACTION, real
from numpyro_orthgp.likelihoods.links import POSITIVE_LINKS, PositiveLink
from numpyro_orthgp.likelihoods.softplus import softplus_gap
from numpyro_orthgp.likelihoods.special import LOG_ROOT_TWO_PI, branches, expm1, log_binomial, stirling
from numpyro_orthgp.likelihoods.trials import Binomial
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["NegativeBinomial", "Poisson", "ZeroInflated", "log_negative_binomial", "log_poisson"]


def log_poisson(log_rate: Array, extra: ArrayLike, y: Array) -> Array:
    """y log rate - rate exp(extra) - log y!, relative to its value at rate y: for large y the terms themselves cancel."""
    some = y > 0
    y = jnp.where(some, y, 1)
    log_y = jnp.log(y)
    d = log_rate - log_y
    top = -log_y / 2 - LOG_ROOT_TWO_PI - stirling(y, log_y)
    return jnp.where(some, y * (d - expm1(d + extra)) + top, -jnp.exp(d + extra))


def log_negative_binomial(log_mean: Array, extra: ArrayLike, k: Array, y: Array) -> Array:
    """y log(mean / k) - (y + k) log(1 + mean exp(extra) / k), plus the log of the number of arrangements."""
    # The density of y successes before k failures is k / (y + k) times that of y successes among y + k trials.
    log_odds = log_mean + extra - jnp.log(k)
    return log_binomial(y, k, nn.log_sigmoid(log_odds), nn.log_sigmoid(-log_odds)) - jnp.log1p(y / k) - y * extra


class _Rate(ExpectedLikelihood):
    """Counts whose mean given f is exposure times a positive link of f."""

    pytree_data_fields: tuple[str, ...] = ("exposure",)
    pytree_aux_fields: tuple[str, ...] = ("link",)
    _log_concave = True

    def __init__(
        self,
        marginals: Marginals,
        exposure: ArrayLike,
        link: str,
        *,
        integrator: Integrator | None,
        validate_args: bool | None,
    ) -> None:
        self.link = check_option("link", link, POSITIVE_LINKS)
        self.exposure = self._parameter(marginals, "exposure", exposure)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    @property
    def _link(self) -> PositiveLink:
        return POSITIVE_LINKS[self.link]

    def _rate(self, f: Array) -> Array:
        return self.exposure * self._link.value(f)

    def _log_rate(self, f: Array) -> Array:
        return jnp.log(self.exposure) + self._link.log(f)

    @property
    def support(self) -> Any:
        return constraints.nonnegative_integer

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        return None if self.link == "exp" else (0.0, 0.0, 2.0)

    def _place_of_zeros(self, level: Array) -> Array:
        """Where -log p(0 | f) is ``level``."""
        return self._link.inverse(self._rate_of_zeros(level) / self.exposure)

    def _rate_of_zeros(self, level: Array) -> Array:
        return level

    @property
    def mean(self) -> Array:
        """Expected counts, shape of f(X)."""
        if self.link == "exp":
            return self.exposure * jnp.exp(self.marginals.mean + self.marginals.variance / 2)
        if self.by_default:
            m = self.marginals
            return self.exposure * (nn.softplus(m.mean) + softplus_gap(m.mean, m.variance))
        return self._average(self._rate)


class Poisson(_Rate):
    r"""Counts with rate :math:`c\, e^{f}` or :math:`c \log(1 + e^f)` ("softplus"). For "exp" the expectation has a closed form:

    .. math:: E_q[\log p(y \mid f)] = y\,(m + \log c) - c\, e^{m + v / 2} - \log y!

    :param marginals: f(X), shape (B,) or (B, P).
    :param exposure: c > 0, such as time, area or population; the rate is proportional to it. It broadcasts to f(X).
    :param link: "exp", or "softplus", which grows only linearly.
    :param integrator: for "softplus", by default nodes about its bend; for ``log_predictive``, by default nodes around the peak.
    :raises ValueError: for another link, or if a concrete ``exposure`` is not positive.
    """

    def __init__(
        self,
        marginals: Marginals,
        exposure: ArrayLike = 1.0,
        link: str = "exp",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(marginals, exposure, link, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Poisson(self._rate(f))

    def log_density(self, f: Array, y: Array) -> Array:
        return log_poisson(self._log_rate(f), 0, real(y, f.dtype))

    def expected_log_density(self, y: Array) -> Array:
        if self.link != "exp":
            return super().expected_log_density(y)
        m = self.marginals
        return log_poisson(self._log_rate(m.mean), m.variance / 2, real(y, m.mean.dtype))

    @property
    def variance(self) -> Array:
        if self.link != "exp":
            return super().variance
        return self.mean + self.mean**2 * jnp.expm1(self.marginals.variance)


class NegativeBinomial(_Rate):
    r"""Overdispersed counts with mean :math:`\mu = c\, e^f` or :math:`c \log(1 + e^f)` and variance :math:`\mu + \mu^2 / k`.

    :param marginals: f(X), shape (B,) or (B, P).
    :param concentration: k > 0; broadcasts to f(X). The larger it is, the closer to :class:`Poisson`.
    :param exposure: c > 0, such as time, area or population; the mean is proportional to it. It broadcasts to f(X).
    :param link: "exp" or "softplus".
    :param integrator: default for "exp" a closed form, for "softplus" nodes about its bend.
    :raises ValueError: for another link, or if a concrete ``concentration`` or ``exposure`` is not positive.
    """

    pytree_data_fields: tuple[str, ...] = ("concentration",)

    def __init__(
        self,
        marginals: Marginals,
        concentration: ArrayLike,
        exposure: ArrayLike = 1.0,
        link: str = "exp",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.concentration = self._parameter(marginals, "concentration", concentration)
        super().__init__(marginals, exposure, link, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.NegativeBinomial2(self._rate(f), self.concentration)

    def log_density(self, f: Array, y: Array) -> Array:
        return log_negative_binomial(self._log_rate(f), 0, self.concentration, real(y, f.dtype))

    def expected_log_density(self, y: Array) -> Array:
        if self.link != "exp" or not self.by_default:
            return super().expected_log_density(y)
        # softplus of the log odds is the only part that is not linear in f
        m, k = self.marginals, self.concentration
        gap = softplus_gap(self._log_rate(m.mean) - jnp.log(k), m.variance)
        return self.log_density(m.mean, y) - (real(y, m.mean.dtype) + k) * gap

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        place = self._link.inverse(self.concentration / self.exposure)
        return (place, place, 2.0) if self.link == "exp" else (jnp.minimum(place, 0), 0.0, 2.0)

    def _rate_of_zeros(self, level: Array) -> Array:
        k = self.concentration
        return k * jnp.expm1(level / k)

    @property
    def variance(self) -> Array:
        if self.link != "exp":
            mean = self.mean

            def squared(f: Array) -> Array:
                rate = self._rate(f)
                return rate + rate**2 / self.concentration + (rate - mean) ** 2

            return self._average(squared)
        spread = jnp.expm1(self.marginals.variance)
        return self.mean + self.mean**2 * (spread + (1 + spread) / self.concentration)


class ZeroInflated(ExpectedLikelihood):
    r"""Counts that are 0 with probability ``gate``, and follow a given likelihood otherwise.

    ::

        ZeroInflated(Poisson(f(X)), gate=0.2)

    For y > 0 the expectation is that of the wrapped likelihood (closed form or not). For y = 0,
    :math:`\log(\pi + (1 - \pi)\, p(0 \mid f))` is integrated.

    :param likelihood: :class:`Poisson`, :class:`NegativeBinomial` or :class:`Binomial`, with its own marginals.
    :param gate: :math:`\pi`, at least 0 and less than 1; broadcasts to f(X).
    :param integrator: default that of ``likelihood``.
    :raises TypeError: if ``likelihood`` is not one of these.
    :raises ValueError: if a concrete ``gate`` is out of range.
    """

    pytree_data_fields: tuple[str, ...] = ("likelihood", "gate")

    def __init__(
        self,
        likelihood: Poisson | NegativeBinomial | Binomial,
        gate: ArrayLike,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(likelihood, (Poisson, NegativeBinomial, Binomial)):
            raise TypeError(
                f"ZeroInflated wraps Poisson, NegativeBinomial or Binomial; got {type(likelihood).__name__}. "
                "For other counts use Likelihood(f(X), lambda f: numpyro.distributions.ZeroInflatedDistribution(..., gate=gate))."
            )
        self.likelihood = likelihood
        self.gate = self._parameter(likelihood.marginals, "gate", gate, FRACTION)
        by_default = integrator is None and likelihood.by_default
        integrator = integrator or likelihood.integrator
        super().__init__(likelihood.marginals, integrator=integrator, validate_args=validate_args)
        self.by_default = by_default

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.ZeroInflatedDistribution(self.likelihood.conditional(f), gate=self.gate)

    def log_density(self, f: Array, y: Array) -> Array:
        counted = self.likelihood.log_density(f, y)
        return jnp.where(y == 0, self._log_zero(counted), jnp.log1p(-self.gate) + counted)

    def expected_log_density(self, y: Array) -> Array:
        f, weights = self._values(y)
        # No further than where log p(0) and its derivative are finite; the gate hides it there.
        last = self.likelihood._place_of_zeros(jnp.asarray(float(jnp.finfo(f.dtype).max) ** 0.75, f.dtype))
        f = jnp.where(f < last, f, lax.stop_gradient(last))
        zero = expectation(weights, self._log_zero(self.likelihood.log_density(f, jnp.zeros_like(y))))
        return jnp.where(y == 0, zero, jnp.log1p(-self.gate) + self.likelihood.expected_log_density(y))

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        # Where the wrapped likelihood's probability of zero bends, and where it falls below the gate.
        inner, dtype = self.likelihood, self.marginals.mean.dtype
        most = -math.log(jnp.finfo(dtype).tiny)
        falls = inner._place_of_zeros(jnp.clip(-jnp.log(jnp.asarray(self.gate, dtype)), 1, most))
        found = inner._bends(y)
        return falls if found is None else jnp.minimum(found[0], falls), falls, 1.0

    def _log_zero(self, log_p: Array) -> Array:
        """log(gate + (1 - gate) p). At gate 0 it has a derivative if log p is not below -30."""
        tiny, low, near = branches(log_p, -30.0)
        log_gate = jnp.where(self.gate > 0, jnp.log(jnp.where(self.gate > 0, self.gate, 1)), -jnp.inf)
        far = jnp.logaddexp(log_gate, jnp.log1p(-self.gate) + low)
        return jnp.where(tiny, far, near + jnp.log1p(self.gate * jnp.expm1(-near)))

    @property
    def support(self) -> Any:
        return self.likelihood.support

    @property
    def mean(self) -> Array:
        return (1 - self.gate) * self.likelihood.mean

    @property
    def variance(self) -> Array:
        inner = self.likelihood
        return (1 - self.gate) * (inner.variance + self.gate * inner.mean**2)
