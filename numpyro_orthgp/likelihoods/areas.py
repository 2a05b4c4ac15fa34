"""Counts of areas or bins: rates and probabilities are sums over the nodes of an area.

``likelihoods/sums.py`` explains how such sums are integrated and bounded.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import MonteCarlo, QuasiMonteCarlo
from numpyro_orthgp.likelihoods.checks import POSITIVE, WHOLE, real
from numpyro_orthgp.likelihoods.counts import log_negative_binomial, log_poisson
from numpyro_orthgp.likelihoods.links import POSITIVE_LINKS, PROBABILITY_LINKS
from numpyro_orthgp.likelihoods.special import log_binomial
from numpyro_orthgp.likelihoods.sums import OfSum
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["BinomialOfAverage", "NegativeBinomialOfSum", "PoissonOfSum"]


class _RateOfSum(OfSum):
    """Counts whose mean given f is a weighted sum of positive links of f."""

    links: ClassVar[dict[str, Any]] = POSITIVE_LINKS

    @abstractmethod
    def _log_count(self, log_rate: Array, extra: ArrayLike, y: Array) -> Array:
        """log p(y). In the term with a minus sign, the log rate is increased by ``extra``."""

    def log_density(self, f: Array, y: Array) -> Array:
        return self._log_count(self._log_rate(f), 0, real(y, f.dtype))

    def _bound(self, y: Array) -> Array:
        low, high = self._log_rates()
        return self._log_count(low, high - low, y)

    def _log_rate(self, f: Array) -> Array:
        return self._log_sum(self._link.log(f))

    def _log_rates(self) -> tuple[Array, Array]:
        """The lower bound of E[log rate], and log E[rate]."""
        m, link = self.marginals, self._link
        if self.link == "exp":
            return self._log_sum(m.mean), self._log_sum(m.mean + m.variance / 2)
        return self._log_sum(self._at_nodes(link.log)), self._log_sum(jnp.log(self._at_nodes(link.value)))

    @property
    def support(self) -> Any:
        return constraints.nonnegative_integer

    @property
    def mean(self) -> Array:
        """Expected counts, shape (B,), with a closed form for "exp"."""
        return jnp.exp(self._log_rates()[1])


class PoissonOfSum(_RateOfSum):
    r"""Counts of areas or bins with rate :math:`\lambda_b = \sum_q w_{bq}\, e^{f(x_{bq})}`, or with softplus instead of exp.

    ::

        f = gp("f", kernel, Z)
        with numpyro.plate("areas", B):
            numpyro.sample("y", PoissonOfSum(f(nodes.reshape(B * Q, D)), weights), obs=y)

    :math:`E_q[\log p(y \mid f)]` is integrated jointly over f at the nodes of each area, with 64 quasi-Monte Carlo points in a fit
    and 2048 in predictions. One area costs as much as Q rows. ``by_marginals=True`` uses a bound of means and variances alone [1],

    .. math:: E_q[\log p(y \mid f)] \ge y \log \sum_q w_q e^{m_q} - \sum_q w_q e^{m_q + v_q / 2} - \log y!,

    without noise. But q then underestimates the uncertainty of f within areas, as if the node of each event were known. If f mixes
    several functions (``@``, ``Tasks``, ``stack``), joint draws at all inputs replace the integral, for up to 2048 inputs in a
    step.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import gp, kernels, likelihoods
    >>> nodes, people = jnp.linspace(0.0, 1.0, 12).reshape(4, 3, 1), jnp.full((4, 3), 100.0)
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f = gp("f", kernels.RBF(0.3), nodes[:, 0])
    >>> y = likelihoods.PoissonOfSum(f(nodes.reshape(12, 1)), people)
    >>> y.log_prob(jnp.array([250, 300, 310, 180])).shape
    (4,)

    :param marginals: f(X), shape (B Q,), the Q inputs of one y consecutive; f(X) + offset if the log rate has an offset at each
        input.
    :param weights: w >= 0, the size of each node (people, area, time), shape (B, Q) or (Q,); zero if a row has fewer nodes.
    :param link: "exp" or "softplus". For "softplus", expectations at a node are by nodes about its bend.
    :param integrator: default 64 quasi-Monte Carlo points.
    :param by_marginals: whether a fit uses the bound of means and variances.
    :raises TypeError: for another integrator.
    :raises ValueError: for another link; for shapes that do not match; if a concrete weight is negative, or all weights of a row
        are zero; if the marginals have no joint draws (only ``by_marginals`` works without).

    **References:**

    1. Law, Sejdinovic, Cameron, Lucas, Flaxman, Battle, Fukumizu. Variational Learning on Aggregate Outputs with Gaussian
       Processes. 2018.
    """

    def __init__(
        self,
        marginals: Marginals,
        weights: ArrayLike,
        link: str = "exp",
        *,
        integrator: QuasiMonteCarlo | MonteCarlo | None = None,
        by_marginals: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(marginals, weights, link, integrator, by_marginals, validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Poisson(jnp.exp(self._log_rate(f)))

    def _log_count(self, log_rate: Array, extra: ArrayLike, y: Array) -> Array:
        return log_poisson(log_rate, extra, y)


class NegativeBinomialOfSum(_RateOfSum):
    r"""Counts with mean :math:`\lambda`, as in :class:`PoissonOfSum`, and variance :math:`\lambda + \lambda^2 / k`.

    With ``by_marginals`` the bound is

    .. math:: E_q[\log p(y \mid f)] \ge y\, l - (y + k) \log(k + E \lambda) + \text{const}, \qquad
        l = \log \sum_q w_q\, e^{E[\log g(f_q)]}

    :param marginals: f(X), shape (B Q,), the Q inputs of one y consecutive.
    :param weights: w >= 0, the size of each node, shape (B, Q) or (Q,).
    :param concentration: k > 0 of each area, shape () or (B,). The larger it is, the closer to :class:`PoissonOfSum`.
    :param link: "exp" or "softplus".
    :param integrator: default 64 quasi-Monte Carlo points.
    :param by_marginals: whether a fit uses the bound of means and variances.
    :raises TypeError, ValueError: as :class:`PoissonOfSum`; if a concrete ``concentration`` is not positive.
    """

    pytree_data_fields: tuple[str, ...] = ("concentration",)

    def __init__(
        self,
        marginals: Marginals,
        weights: ArrayLike,
        concentration: ArrayLike,
        link: str = "exp",
        *,
        integrator: QuasiMonteCarlo | MonteCarlo | None = None,
        by_marginals: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(
            marginals, weights, link, integrator, by_marginals, validate_args, concentration=(concentration, POSITIVE)
        )

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.NegativeBinomial2(jnp.exp(self._log_rate(f)), self.concentration)

    def _log_count(self, log_rate: Array, extra: ArrayLike, y: Array) -> Array:
        return log_negative_binomial(log_rate, extra, self.concentration, y)


class BinomialOfAverage(OfSum):
    r"""Successes among ``total_count`` in an area, each with probability :math:`p_b = \sum_q w_{bq}\, p(f(x_{bq}))`.

    Use it for shares of people in an area within which p varies: prevalence surveys, elections. Weights are divided by their
    sum. With ``by_marginals`` both logarithms have a bound,

    .. math:: E_q[\log p_b] \ge \log \sum_q w_q\, e^{E[\log p(f_q)]}, \qquad
        E_q[\log(1 - p_b)] \ge \log \sum_q w_q\, e^{E[\log(1 - p(f_q))]}.

    :param marginals: f(X), shape (B Q,), the Q inputs of one y consecutive.
    :param weights: w >= 0, shares of the nodes, shape (B, Q) or (Q,).
    :param total_count: number of trials in each area, shape () or (B,).
    :param link: "logit", "probit" or "cloglog". Expectations at a node are by nodes about the bend of the link.
    :param integrator: default 64 quasi-Monte Carlo points.
    :param by_marginals: whether a fit uses the bound of means and variances.
    :raises TypeError, ValueError: as :class:`PoissonOfSum`; if a concrete ``total_count`` is negative or not whole.
    """

    pytree_data_fields: tuple[str, ...] = ("total_count",)
    links: ClassVar[dict[str, Any]] = PROBABILITY_LINKS

    def __init__(
        self,
        marginals: Marginals,
        weights: ArrayLike,
        total_count: ArrayLike,
        link: str = "logit",
        *,
        integrator: QuasiMonteCarlo | MonteCarlo | None = None,
        by_marginals: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(
            marginals, weights, link, integrator, by_marginals, validate_args, total_count=(total_count, WHOLE)
        )

    def _take_weights(self, marginals: Marginals, weights: ArrayLike) -> None:
        super()._take_weights(marginals, weights)
        self.weights = self.weights / self.weights.sum(-1, keepdims=True)

    def conditional(self, f: Array) -> dist.Distribution:
        p = jnp.exp(self._log_sum(self._link.log_p(f)))
        return dist.BinomialProbs(jnp.minimum(p, 1), self.total_count.astype(int))

    def log_density(self, f: Array, y: Array) -> Array:
        log_p, log_not_p = self._link.log_p(f), self._link.log_not_p(f)
        return self._log_binomial(self._log_sum(log_p), self._log_sum(log_not_p), real(y, f.dtype))

    def _bound(self, y: Array) -> Array:
        log_p, log_not_p = self._at_nodes(self._link.log_p), self._at_nodes(self._link.log_not_p)
        return self._log_binomial(self._log_sum(log_p), self._log_sum(log_not_p), y)

    def _log_binomial(self, log_p: Array, log_not_p: Array, y: Array) -> Array:
        total = jnp.logaddexp(log_p, log_not_p)  # below zero if these are bounds
        n = self.total_count
        return log_binomial(y, n - y, log_p - total, log_not_p - total) + n * total

    @property
    def support(self) -> Any:
        return constraints.integer_interval(0, self.total_count)

    @property
    def mean(self) -> Array:
        """Expected successes, shape (B,)."""
        p = self._at_nodes(self._link.p)
        return self.total_count * jnp.exp(self._log_sum(jnp.log(p)))
