"""Successes and failures: labels, and counts out of a total."""

from __future__ import annotations

from abc import abstractmethod

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import ndtr, ndtri

from numpyro_orthgp.errors import check_option
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator, expectation
from numpyro_orthgp.likelihoods.checks import WHOLE, real, signs
from numpyro_orthgp.likelihoods.links import POSITIVE_LINKS, PROBABILITY_LINKS, ProbabilityLink, squared_distances
from numpyro_orthgp.likelihoods.softplus import expected_sigmoid, softplus_gap
from numpyro_orthgp.likelihoods.special import binomial_top, log_binomial, log_ndtr
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["Bernoulli", "Binomial"]


class _Trials(ExpectedLikelihood):
    """Independent trials with success probability p(f), for one of three links.

    For "cloglog" :math:`\\log(1 - p) = -e^f`, whose expectation has a closed form, so failures need no integration.
    """

    pytree_aux_fields: tuple[str, ...] = ("link",)
    _log_concave = True

    def __init__(
        self, marginals: Marginals, link: str, *, integrator: Integrator | None, validate_args: bool | None
    ) -> None:
        self.link = check_option("link", link, PROBABILITY_LINKS)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    @property
    def _link(self) -> ProbabilityLink:
        return PROBABILITY_LINKS[self.link]

    @abstractmethod
    def _outcomes(self, y: Array) -> tuple[Array, Array]:
        """Numbers of successes and of failures."""

    def _log_probabilities(self, f: Array, y: Array) -> tuple[Array, Array]:
        """log p and log(1 - p). For an outcome that did not happen it uses f = 0, so that no logarithm is infinite."""
        successes, failures = self._outcomes(y)
        log_p = self._link.log_p(jnp.where(successes > 0, f, 0))
        return log_p, self._link.log_not_p(jnp.where(failures > 0, f, 0))

    def log_density(self, f: Array, y: Array) -> Array:
        return log_binomial(*self._outcomes(y), *self._log_probabilities(f, y))

    def expected_log_density(self, y: Array) -> Array:
        successes, failures = self._outcomes(y)
        if self.link == "logit" and self.by_default:
            # softplus is the only part of log p that is not linear in f
            gap = softplus_gap(self.marginals.mean, self.marginals.variance)
            return self.log_density(self.marginals.mean, y) - (successes + failures) * gap
        if self.link != "cloglog":
            return super().expected_log_density(y)
        # Relative to the value where p is the share of successes: large counts would cancel against the number of arrangements.
        log_share, log_other, top = binomial_top(successes, failures)
        f, weights = self._values(y)
        excess = expectation(weights, self._log_probabilities(f, y)[0] - log_share)
        rate = jnp.exp(jnp.where(failures > 0, self.marginals.mean + self.marginals.variance / 2, 0))
        return successes * excess - failures * (rate + log_other) + top

    def _bends(self, y: Array | None) -> tuple[float, float, float]:
        return 0.0, 0.0, self._link.width

    @property
    def _probabilities(self) -> tuple[Array, Array]:
        """E_q(f)[p(f)] and E_q(f)[1 - p(f)], shape of f(X)."""
        if self.link == "logit" and self.by_default:
            m, v = self.marginals.mean, self.marginals.variance
            return expected_sigmoid(m, v), expected_sigmoid(-m, v)
        if self.link == "probit":
            return ndtr(self._probit_argument), ndtr(-self._probit_argument)
        return self._average(self._link.p), self._average(self._link.not_p)

    @property
    def _probit_argument(self) -> Array:
        return self.marginals.mean / jnp.sqrt(1 + self.marginals.variance)


class Bernoulli(_Trials):
    r"""Binary labels.

    ========= ==========================================
    link      :math:`p(y = 1 \mid f)`
    ========= ==========================================
    "logit"   :math:`1 / (1 + e^{-f})`
    "probit"  :math:`\Phi(f)`
    "cloglog" :math:`1 - \exp(-e^{f})`
    ========= ==========================================

    :param marginals: f(X), shape (B,) or (B, P).
    :param link: "logit", "probit" or "cloglog" (whether a count with rate :math:`e^f` is above zero). With "probit", ``mean`` and
        ``log_predictive`` have the closed form :math:`\Phi(m / \sqrt{1 + v})`. With "cloglog", the expectation for y = 0 has the
        closed form :math:`-e^{m + v / 2}`.
    :param integrator: default for "logit" a closed form, else nodes about the bend of the link.
    :raises ValueError: for another link.
    """

    def __init__(
        self,
        marginals: Marginals,
        link: str = "logit",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(marginals, link, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.BernoulliLogits(f) if self.link == "logit" else dist.BernoulliProbs(self._link.p(f))

    def _outcomes(self, y: Array) -> tuple[Array, Array]:
        y = real(y, self.marginals.mean.dtype)
        return y, 1 - y

    def log_density(self, f: Array, y: Array) -> Array:
        if self.link == "cloglog":
            log_p, log_not_p = self._log_probabilities(f, y)
            return jnp.where(y > 0, log_p, log_not_p)
        return self._link.log_p(signs(y, f.dtype) * f)  # the other links are symmetric: 1 - p(f) = p(-f)

    def log_predictive(self, value: ArrayLike) -> Array:
        if self.link != "probit":
            return super().log_predictive(value)
        argument = self._probit_argument
        return log_ndtr(signs(self._checked(value), argument.dtype) * argument)

    @property
    def mean(self) -> Array:
        return self._probabilities[0]

    @property
    def variance(self) -> Array:
        p, not_p = self._probabilities
        return p * not_p


class Binomial(_Trials):
    r"""The number of successes in ``total_count`` trials. Each has the success probability of :class:`Bernoulli`.

    :param marginals: f(X), shape (B,) or (B, P).
    :param total_count: number of trials; broadcasts to f(X).
    :param link: "logit", "probit" or "cloglog". With "cloglog" the failures' part of the expectation has a closed form.
    :param integrator: default for "logit" a closed form, else nodes about the bend of the link.
    :raises ValueError: for another link, or if a concrete ``total_count`` is negative or not a whole number.
    """

    pytree_data_fields: tuple[str, ...] = ("total_count",)

    def __init__(
        self,
        marginals: Marginals,
        total_count: ArrayLike,
        link: str = "logit",
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.total_count = self._parameter(marginals, "total_count", total_count, WHOLE)
        super().__init__(marginals, link, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        n = self.total_count.astype(int)  # NumPyro needs integers to draw
        return dist.BinomialLogits(f, n) if self.link == "logit" else dist.BinomialProbs(self._link.p(f), n)

    def _outcomes(self, y: Array) -> tuple[Array, Array]:
        y = real(y, self.marginals.mean.dtype)
        return y, self.total_count - y

    def _place_of_zeros(self, level: Array) -> Array:
        """Where -log p(0 | f) is ``level``."""
        level = level / jnp.maximum(self.total_count, 1)
        if self.link == "probit":
            return -ndtri(jnp.exp(-level))
        return jnp.log(level) if self.link == "cloglog" else POSITIVE_LINKS["softplus"].inverse(level)

    @property
    def mean(self) -> Array:
        return self.total_count * self._probabilities[0]

    @property
    def variance(self) -> Array:
        link, n, squares = self._link, self.total_count, squared_distances(self._link, *self._probabilities)
        return n * self._average(lambda f: link.p(f) * link.not_p(f) + n * squares(f))
