r"""Times until an event, possibly censored: :math:`y = e^{f(x)}` times a standard variate.

In all four families :math:`e^f` is the scale of time (accelerated failure time models), so one can replace another.
``Exponential`` has mean :math:`e^f`, ``Gamma`` has scale :math:`e^f`. If an output is ``censored``, the time is only known to be
longer than y. The survival function :math:`S(y \mid f) = P(\text{time} > y)` then replaces the density.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from numpyro.distributions import constraints

from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator, expectation
from numpyro_orthgp.likelihoods.checks import check_censored
from numpyro_orthgp.likelihoods.gaussian import Gaussian
from numpyro_orthgp.likelihoods.links import PROBABILITY_LINKS
from numpyro_orthgp.likelihoods.special import (
    LOG_ROOT_TWO_PI,
    gamma_exponent,
    log_gamma_spread,
    log_gammaincc,
    log_largest,
    log_ndtr,
    stirling,
)
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Exponential", "Gamma", "LogNormal", "SurvivalLikelihood", "Weibull"]


_WIDE = 0.25  # variance of f from which on what grows as exp(-f) is integrated apart


class SurvivalLikelihood(ExpectedLikelihood):
    """The base class of times. ``mean``, ``variance`` and ``sample`` are those of the uncensored time.

    A subclass defines the density, the survival function, and the expectations with closed forms.
    """

    pytree_data_fields: tuple[str, ...] = ("censored",)
    _log_concave = True

    def __init__(
        self,
        marginals: Marginals,
        *,
        censored: ArrayLike | None = None,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.censored = check_censored(censored, self._required(marginals).own_shape, marginals.lead)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    @abstractmethod
    def log_survival(self, f: Array, y: Array) -> Array:
        """log P(time > y | f)."""

    @abstractmethod
    def expected_log_event(self, y: Array) -> Array:
        """E_q(f)[log p(y | f)] of an observed event time."""

    def expected_log_survival(self, y: Array) -> Array:
        """E_q(f)[log S(y | f)], by integration."""
        f, weights = self._values(y)
        return expectation(weights, self.log_survival(f, y))

    @property
    @abstractmethod
    def standard_moments(self) -> tuple[Array, Array]:
        """Mean and variance of the time at f = 0."""

    def log_density(self, f: Array, y: Array) -> Array:
        event = self._log_event(f, y)
        return event if self.censored is None else jnp.where(self.censored, self.log_survival(f, y), event)

    def _log_event(self, f: Array, y: Array) -> Array:
        """log p(y | f) of an observed event time."""
        return self.conditional(f).log_prob(y)

    def expected_log_density(self, y: Array) -> Array:
        event = self.expected_log_event(y)
        return event if self.censored is None else jnp.where(self.censored, self.expected_log_survival(y), event)

    def _rounded(self, y: Array, dtype: Any) -> Array:
        return jnp.maximum(y.astype(dtype), jnp.finfo(dtype).tiny)

    @property
    def support(self) -> Any:
        return constraints.positive

    @property
    def mean(self) -> Array:
        return self.standard_moments[0] * self._moment(1)

    @property
    def variance(self) -> Array:
        mean, variance = self.standard_moments
        spread = jnp.expm1(self.marginals.variance)
        return (variance * (1 + spread) + mean**2 * spread) * self._moment(1) ** 2

    def _moment(self, power: ArrayLike) -> Array:
        """E[exp(power f)]."""
        return jnp.exp(power * self.marginals.mean + jnp.square(power) * self.marginals.variance / 2)


class Weibull(SurvivalLikelihood):
    r"""Weibull times, whose hazard grows (k > 1) or falls (k < 1) with time: :math:`S(y \mid f) = \exp(-(y e^{-f})^k)`.

    The expectation has a closed form, censored or not:

    .. math:: E_q[\log S] = -y^k e^{-k m + k^2 v / 2}, \qquad
        E_q[\log p] = \log k + (k - 1) \log y - k m + E_q[\log S]

    :param marginals: f(X), shape (B,) or (B, P); :math:`e^f` is in the unit of y.
    :param concentration: k > 0; broadcasts to f(X).
    :param censored: boolean, broadcasts to f(X): where True, y is a lower bound of the time.
    :param integrator: for ``log_predictive``; by default nodes around the peak of the integrand.
    :raises ValueError: if a concrete ``concentration`` is not positive, or ``censored`` does not broadcast.
    :raises TypeError: if ``censored`` is not boolean.
    """

    pytree_data_fields: tuple[str, ...] = ("concentration",)

    def __init__(
        self,
        marginals: Marginals,
        concentration: ArrayLike,
        censored: ArrayLike | None = None,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.concentration = self._parameter(marginals, "concentration", concentration)
        super().__init__(marginals, censored=censored, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Weibull(jnp.exp(f), self.concentration)

    def log_density(self, f: Array, y: Array) -> Array:
        log_survival = self.log_survival(f, y)
        event = self._log_hazard(f, y) + log_survival
        return event if self.censored is None else jnp.where(self.censored, log_survival, event)

    def log_survival(self, f: Array, y: Array) -> Array:
        return -jnp.exp(self.concentration * (jnp.log(y) - f))

    def expected_log_event(self, y: Array) -> Array:
        return self._log_hazard(self.marginals.mean, y) + self.expected_log_survival(y)

    def expected_log_survival(self, y: Array) -> Array:
        k = self.concentration
        return -jnp.exp(k * (jnp.log(y) - self.marginals.mean) + k**2 * self.marginals.variance / 2)

    def _log_hazard(self, f: Array, y: Array) -> Array:
        # linear in f, so its expectation is its value at the mean
        k = self.concentration
        return jnp.log(k) + (k - 1) * jnp.log(y) - k * f

    @property
    def standard_moments(self) -> tuple[Array, Array]:
        first = jnp.exp(gammaln(1 + 1 / self.concentration))
        return first, first**2 * jnp.expm1(log_gamma_spread(1 / self.concentration))


class Exponential(Weibull):
    r"""Times with a constant hazard :math:`e^{-f}`: :class:`Weibull` with k = 1. The expectation has a closed form:

    .. math:: E_q[\log S] = -y\, e^{-m + v / 2}, \qquad E_q[\log p] = -m + E_q[\log S]

    :param marginals: f(X), shape (B,) or (B, P); :math:`e^f` is the mean of y.
    :param censored: boolean, broadcasts to f(X): where True, y is a lower bound of the time.
    :param integrator: for ``log_predictive``; by default nodes around the peak of the integrand.
    :raises ValueError: if ``censored`` does not broadcast.
    :raises TypeError: if ``censored`` is not boolean.
    """

    def __init__(
        self,
        marginals: Marginals,
        censored: ArrayLike | None = None,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(marginals, 1, censored, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Exponential(jnp.exp(-f))


class Gamma(SurvivalLikelihood):
    r"""Gamma times with shape k and scale :math:`e^f`. For observed events the expectation has a closed form:

    .. math:: E_q[\log p(y \mid f)] = (k - 1) \log y - k m - y\, e^{-m + v / 2} - \log \Gamma(k)

    For censored times the logarithm of the incomplete gamma function is integrated.

    :param marginals: f(X), shape (B,) or (B, P); :math:`k e^f` is the mean of y.
    :param concentration: k > 0; broadcasts to f(X).
    :param censored: boolean, broadcasts to f(X): where True, y is a lower bound of the time.
    :param integrator: for censored times, by default nodes about the bend of log S; for ``log_predictive``, nodes around the peak.
    :raises ValueError: if a concrete ``concentration`` is not positive, or ``censored`` does not broadcast.
    :raises TypeError: if ``censored`` is not boolean.
    """

    pytree_data_fields: tuple[str, ...] = ("concentration",)

    def __init__(
        self,
        marginals: Marginals,
        concentration: ArrayLike,
        censored: ArrayLike | None = None,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.concentration = self._parameter(marginals, "concentration", concentration)
        super().__init__(marginals, censored=censored, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Gamma(self.concentration, jnp.exp(-f))

    def log_survival(self, f: Array, y: Array) -> Array:
        return log_gammaincc(*jnp.broadcast_arrays(self.concentration, jnp.log(y) - f))

    def expected_log_survival(self, y: Array) -> Array:
        if not self.by_default:
            return super().expected_log_survival(y)
        # It falls as -y exp(-f), whose expectation is known, and for a wide q comes from far below the nodes.
        m, log_y = self.marginals, jnp.log(y)
        f, weights = self._values(y)
        wide = m.variance > _WIDE
        most = log_largest(m.mean.dtype)
        growth = jnp.where(wide, jnp.exp(jnp.where(wide, jnp.minimum(log_y - f, most), 0)), 0)
        rest = expectation(weights, self.log_survival(f, y) + growth)
        return rest - jnp.where(wide, jnp.exp(jnp.where(wide, log_y - m.mean + m.variance / 2, 0)), 0)

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        if y is None:
            return None
        place = jnp.log(y) - jnp.log(self.concentration)
        return place, place, 2 / (1 + jnp.sqrt(self.concentration) / 8)

    def expected_log_event(self, y: Array) -> Array:
        return self._event(self.marginals.mean, y, self.marginals.variance / 2)

    def _log_event(self, f: Array, y: Array) -> Array:
        return self._event(f, y, jnp.zeros_like(f))

    def _event(self, f: Array, y: Array, extra: Array) -> Array:
        """(k - 1) log y - k f - y exp(extra - f) - log Gamma(k), relative to its value at k e^f: for large k its terms cancel."""
        k, log_y = self.concentration, jnp.log(y)
        log_k, (u, of_k, extra) = jnp.log(k), jnp.broadcast_arrays(log_y - f, k, extra)
        return gamma_exponent(of_k, u, extra) + log_k / 2 - LOG_ROOT_TWO_PI - stirling(k, log_k) - log_y

    @property
    def standard_moments(self) -> tuple[Array, Array]:
        return self.concentration, self.concentration


class LogNormal(SurvivalLikelihood):
    r"""Times whose logarithm has Gaussian noise: :math:`\log y \sim N(f, s^2)`.

    For observed events everything is as in :class:`Gaussian` at log y, including the best tightening (Titsias 2025, Eq. 19). For
    censored times the expectation of :math:`\log \Phi((f - \log y) / s)` is integrated; ``log_predictive`` has a closed form.

    :param marginals: f(X), shape (B,) or (B, P); :math:`e^f` is the median of y.
    :param scale: s > 0, the standard deviation of log y; broadcasts to f(X).
    :param censored: boolean, broadcasts to f(X): where True, y is a lower bound of the time. With it, a tightened residual uses
        the v that the guide learns.
    :param integrator: for censored times; default nodes about the bend of log S.
    :raises ValueError: if a concrete ``scale`` is not positive, or ``censored`` does not broadcast.
    :raises TypeError: if ``censored`` is not boolean.
    """

    pytree_data_fields: tuple[str, ...] = ("scale",)

    def __init__(
        self,
        marginals: Marginals,
        scale: ArrayLike,
        censored: ArrayLike | None = None,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.scale = self._parameter(marginals, "scale", scale)
        super().__init__(marginals, censored=censored, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.LogNormal(f, self.scale)

    def log_prob(self, value: ArrayLike) -> Array:
        if self.censored is not None:
            return super().log_prob(value)
        log_y = jnp.log(self._checked(value))
        return self._logarithm.log_prob(log_y) - log_y

    def log_predictive(self, value: ArrayLike) -> Array:
        log_y = jnp.log(self._checked(value))
        event = self._logarithm.log_predictive(log_y) - log_y
        if self.censored is None:
            return event
        survival = log_ndtr((self.marginals.mean - log_y) / jnp.sqrt(self._logarithm.variance))
        return jnp.where(self.censored, survival, event)

    def log_survival(self, f: Array, y: Array) -> Array:
        return log_ndtr((f - jnp.log(y)) / self.scale)

    def _bends(self, y: Array | None) -> tuple[ArrayLike, ArrayLike, ArrayLike] | None:
        return None if y is None else (jnp.log(y), jnp.log(y), PROBABILITY_LINKS["probit"].width * self.scale)

    def expected_log_event(self, y: Array) -> Array:
        return self._logarithm.expected_log_density(jnp.log(y)) - jnp.log(y)

    @property
    def closed_form(self) -> bool:
        """Whether the residual is tightened as in :class:`Gaussian`. With censored times it is not."""
        return self.censored is None and self._logarithm.closed_form

    @property
    def residual_scale(self) -> Array:
        """The v of each point if ``closed_form``."""
        return self._logarithm.residual_scale

    @property
    def _logarithm(self) -> Gaussian:
        given = Gaussian(self.marginals._lifted(self.lead), self.scale)
        given.power = self.power  # of where this likelihood was made, which may be over
        return given

    @property
    def standard_moments(self) -> tuple[Array, Array]:
        s2 = self.scale**2
        return jnp.exp(s2 / 2), jnp.exp(s2) * jnp.expm1(s2)
