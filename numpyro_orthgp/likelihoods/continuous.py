"""Real outputs with non-Gaussian noise, and outputs between 0 and 1."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator
from numpyro_orthgp.likelihoods.checks import OPEN_FRACTION
from numpyro_orthgp.likelihoods.links import PROBABILITY_LINKS, squared_distances
from numpyro_orthgp.likelihoods.special import (
    LOG_ROOT_TWO_PI,
    expected_log1p_square,
    folded_mean,
    log_half_laplace,
    log_rising,
    log_tilted,
    positive_part_mean,
    stirling,
)
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["AsymmetricLaplace", "Beta", "Laplace", "StudentT"]


class StudentT(ExpectedLikelihood):
    r"""y = f(x) + Student-t noise: robust to outliers.

    The expectation is that of :math:`\log(1 + (y - f)^2 / (\nu s^2))`, which is known to nine digits however narrow the noise is
    beside the posterior of f (``expected_log1p_square`` in ``likelihoods/special.py``).

    :param marginals: f(X), shape (B,) or (B, P).
    :param df: degrees of freedom; broadcasts to f(X).
    :param scale: scale of the noise, in units of y (its standard deviation times sqrt((df - 2) / df)).
    :param integrator: for its expectation in place of that formula, and for nothing else.
    :raises ValueError: if a concrete ``df`` or ``scale`` is not positive.
    """

    pytree_data_fields: tuple[str, ...] = ("df", "scale")

    def __init__(
        self,
        marginals: Marginals,
        df: ArrayLike,
        scale: ArrayLike,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.df = self._parameter(marginals, "df", df)
        self.scale = self._parameter(marginals, "scale", scale)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.StudentT(self.df, f, self.scale)

    def log_density(self, f: Array, y: Array) -> Array:
        z = (y - f) / self.scale
        return self._log_height - (self.df + 1) / 2 * jnp.log1p(z**2 / self.df)

    def expected_log_density(self, y: Array) -> Array:
        if not self.by_default:
            return super().expected_log_density(y)
        m, width = self.marginals, self.scale * jnp.sqrt(self.df)
        falls = expected_log1p_square((y - m.mean) / width, safe_sqrt(m.variance) / width)
        return (self._log_height - (self.df + 1) / 2 * falls).astype(
            m.mean.dtype
        )  # of f, also where df is of the default

    @property
    def _log_height(self) -> Array:
        """log p(y | f) at y = f, without a difference of log Gamma functions, which are large for many degrees of freedom."""
        df = self.df
        return log_rising(df / 2, jnp.asarray(0.5, df.dtype)) - jnp.log(df * math.pi) / 2 - jnp.log(self.scale)

    @property
    def variance(self) -> Array:
        """Var[y]; infinite for df up to 2."""
        df, heavy = self.df, self.df <= 2
        noise = jnp.where(heavy, jnp.inf, self.scale**2 * df / jnp.where(heavy, 1, df - 2))
        return self.marginals.variance + noise


class Laplace(ExpectedLikelihood):
    r"""y = f(x) + Laplace noise: median regression, robust to outliers. Everything has a closed form:

    .. math:: E_q[\log p(y \mid f)] &= -\log 2b - \frac{1}{b} E_q|y - f|, \\
        p(y) &= \frac{1}{2b} e^{v / 2b^2} \sum_{\pm} e^{\mp d / b}\, \Phi\!\left(\frac{\pm d - v / b}{\sqrt v}\right),

    where :math:`E_q|y - f|` is the mean of a folded normal variable, and d = y - m.

    :param marginals: f(X), shape (B,) or (B, P).
    :param scale: b, in units of y (the standard deviation of the noise is :math:`\sqrt 2\, b`); broadcasts to f(X).
    :raises ValueError: if a concrete ``scale`` is not positive.
    """

    pytree_data_fields: tuple[str, ...] = ("scale",)

    def __init__(
        self,
        marginals: Marginals,
        scale: ArrayLike,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.scale = self._parameter(marginals, "scale", scale)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Laplace(f, self.scale)

    def expected_log_density(self, y: Array) -> Array:
        m = self.marginals
        return -jnp.log(2 * self.scale) - folded_mean(y - m.mean, m.variance) / self.scale

    def log_predictive(self, value: ArrayLike) -> Array:
        d, v, rate = self._checked(value) - self.marginals.mean, self.marginals.variance, 1 / self.scale
        return jnp.logaddexp(log_half_laplace(d, v, rate), log_half_laplace(-d, v, rate)) - jnp.log(2 * self.scale)

    @property
    def support(self) -> Any:
        return constraints.real

    @property
    def mean(self) -> Array:
        return self.marginals.mean

    @property
    def variance(self) -> Array:
        return self.marginals.variance + 2 * self.scale**2


class AsymmetricLaplace(ExpectedLikelihood):
    r"""Quantile regression: f(x) is the quantile of y at a given probability :math:`\tau`.

    ::

        AsymmetricLaplace(f(X), scale, quantile=0.9)

    The density is NumPyro's ``AsymmetricLaplaceQuantile`` (Yu and Moyeed 2001). Up to a constant its logarithm is
    :math:`-\rho(y - f) / s` with the loss of quantile regression
    :math:`\rho(u) = \tau \max(u, 0) + (1 - \tau) \max(-u, 0)`. Everything has a closed form:

    .. math:: E_q[\log p(y \mid f)] &= \log \frac{\tau (1 - \tau)}{s} - \frac1s E_q[\rho(y - f)], \\
        p(y) &= \frac{\tau (1 - \tau)}{s} \sum_\pm e^{a_\pm^2 v / 2 \mp a_\pm d}\,
        \Phi\!\left(\frac{\pm d - a_\pm v}{\sqrt v}\right),

    where :math:`E_q[\rho]` follows from the mean of the positive part of a normal variable, d = y - m, :math:`a_+ = \tau / s` and
    :math:`a_- = (1 - \tau) / s`. The integrand has a kink at f = y. Gauss-Hermite nodes would miss it if s is small compared with
    the standard deviation of f.

    :param marginals: f(X), shape (B,) or (B, P).
    :param scale: s, in units of y; broadcasts to f(X). It is the unit of the loss: the smaller it is, the more the data count. At
        ``quantile`` 0.5 this likelihood is :class:`Laplace` with twice the scale.
    :param quantile: :math:`\tau`, the probability that y is below f, between 0 and 1. It broadcasts to f(X), so each of P outputs
        may have its own.
    :raises ValueError: if a concrete ``scale`` is not positive or a concrete ``quantile`` not between 0 and 1.
    """

    pytree_data_fields: tuple[str, ...] = ("scale", "quantile")

    def __init__(
        self,
        marginals: Marginals,
        scale: ArrayLike,
        quantile: ArrayLike = 0.5,
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.scale = self._parameter(marginals, "scale", scale)
        self.quantile = self._parameter(marginals, "quantile", quantile, OPEN_FRACTION)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.AsymmetricLaplaceQuantile(f, self.scale, self.quantile)

    def log_density(self, f: Array, y: Array) -> Array:
        above, below = self._rates
        return self._log_height - above * jnp.maximum(y - f, 0) - below * jnp.maximum(f - y, 0)

    def expected_log_density(self, y: Array) -> Array:
        above, below = self._rates
        d, v = y - self.marginals.mean, self.marginals.variance
        return self._log_height - above * positive_part_mean(d, v) - below * positive_part_mean(-d, v)

    def log_predictive(self, value: ArrayLike) -> Array:
        above, below = self._rates
        d, v = self._checked(value) - self.marginals.mean, self.marginals.variance
        return self._log_height + jnp.logaddexp(log_half_laplace(d, v, above), log_half_laplace(-d, v, below))

    @property
    def _rates(self) -> tuple[Array, Array]:
        """Slopes at which the log density falls above and below f."""
        return self.quantile / self.scale, (1 - self.quantile) / self.scale

    @property
    def _log_height(self) -> Array:
        """log p(y | f) at y = f."""
        return jnp.log(self.quantile) + jnp.log1p(-self.quantile) - jnp.log(self.scale)

    @property
    def support(self) -> Any:
        return constraints.real

    @property
    def mean(self) -> Array:
        """The mean of y; it is not the quantile f."""
        above, below = self._rates
        return self.marginals.mean + 1 / above - 1 / below

    @property
    def variance(self) -> Array:
        above, below = self._rates
        return self.marginals.variance + 1 / above**2 + 1 / below**2


class Beta(ExpectedLikelihood):
    r"""Outputs in (0, 1) with mean :math:`\mu = p(f)` and precision c: :math:`y \sim \mathrm{Beta}(c \mu, c (1 - \mu))`.

    :param marginals: f(X), shape (B,) or (B, P).
    :param concentration: c > 0, in pseudo-observations; broadcasts to f(X). The variance given f is
        :math:`\mu (1 - \mu) / (1 + c)`.
    :param link: maps f to the mean: "logit", "probit" or "cloglog".
    :param integrator: default nodes about the bend of the link.
    :raises ValueError: for another link, or if a concrete ``concentration`` is not positive.
    """

    pytree_data_fields: tuple[str, ...] = ("concentration",)
    pytree_aux_fields: tuple[str, ...] = ("link",)

    def __init__(
        self,
        marginals: Marginals,
        concentration: ArrayLike,
        link: str = "logit",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, PROBABILITY_LINKS)
        self.concentration = self._parameter(marginals, "concentration", concentration)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        link, c = PROBABILITY_LINKS[self.link], self.concentration
        tiny = jnp.finfo(f.dtype).tiny  # a beta distribution's parameters are positive
        return dist.Beta(jnp.maximum(c * link.p(f), tiny), jnp.maximum(c * link.not_p(f), tiny))

    def log_density(self, f: Array, y: Array) -> Array:
        # The density at mean y from Stirling's formula, and the divergence from there. log Gamma functions of c, c p and c (1 - p)
        # would cancel. log(c p) is known even if c p underflows.
        link, c = PROBABILITY_LINKS[self.link], self.concentration
        a, b, log_p, log_not_p = c * link.p(f), c * link.not_p(f), link.log_p(f), link.log_not_p(f)
        log_y, log_rest, log_c = jnp.log(y), jnp.log1p(-y), jnp.log(c)
        tilted = log_tilted(a, b, log_p, log_not_p, log_y, log_rest)
        remainder = stirling(c, log_c) - stirling(a, log_c + log_p) - stirling(b, log_c + log_not_p)
        return tilted + (log_c + log_p + log_not_p) / 2 - LOG_ROOT_TWO_PI + remainder - log_y - log_rest

    def _bends(self, y: Array | None) -> tuple[float, float, ArrayLike]:
        # The parameters reach one where the mean, or one minus it, is one over c.
        return 0.0, 0.0, PROBABILITY_LINKS[self.link].width + jnp.log1p(self.concentration) / 3

    def _rounded(self, y: Array, dtype: Any) -> Array:
        finfo = jnp.finfo(dtype)
        return jnp.clip(y.astype(dtype), finfo.tiny, 1 - finfo.epsneg)

    @property
    def support(self) -> Any:
        return constraints.open_interval(0.0, 1.0)

    @property
    def mean(self) -> Array:
        return self._average(PROBABILITY_LINKS[self.link].p)

    @property
    def variance(self) -> Array:
        link = PROBABILITY_LINKS[self.link]
        within = self._average(lambda f: link.p(f) * link.not_p(f) / (1 + self.concentration))
        return within + self._average(squared_distances(link, self._average(link.p), self._average(link.not_p)))
