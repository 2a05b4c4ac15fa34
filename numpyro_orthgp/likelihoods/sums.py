r"""Counts of areas and of bins: one y that sees a positive function of f at several inputs, summed.

The rate of y is :math:`\lambda = \sum_q w_q\, g(f(x_q))`, which is not linear in f. Its logarithm has a bound, since log-sum-exp is
convex, and its expectation needs the marginals alone (Law et al. 2018, for :math:`g = \exp`):

.. math:: E[\log \lambda] \ge \log \sum_q w_q\, e^{E[\log g(f(x_q))]}, \qquad E[\lambda] = \sum_q w_q\, E[g(f(x_q))]

It is what Jensen's inequality gives with responsibilities, :math:`\sum_q r_q (E \log g_q + \log w_q - \log r_q)`, at the best ones.
For one node it is exact. Otherwise it is below by no more than :math:`\log E[\lambda]` less the bound. A log density that falls
with the logarithm of a sum has Jensen's inequality in the other direction, :math:`-E \log(k + \lambda) \ge -\log(k + E \lambda)`.

Draws instead of the bound have to be joint: nodes of an area vary together, and as if independent they would average out.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_option, inspect
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, MonteCarlo, expectation
from numpyro_orthgp.likelihoods.checks import POSITIVE, WHOLE, Allowed, real
from numpyro_orthgp.likelihoods.counts import log_negative_binomial, log_poisson
from numpyro_orthgp.likelihoods.integrators import log_expectation
from numpyro_orthgp.likelihoods.links import POSITIVE_LINKS, PROBABILITY_LINKS
from numpyro_orthgp.likelihoods.special import log_binomial
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.quadrature import gauss_hermite
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["BinomialOfAverage", "NegativeBinomialOfSum", "PoissonOfSum"]

_NODES = 20  # of the one-dimensional rule for E[log g(f)] and E[g(f)], which are smooth
_DRAWS = 1024  # joint draws of predictions, at least


class _OfSum(ExpectedLikelihood):
    """Counts that see weighted sums of g(f) over Q inputs each: f(X) of shape (B Q,), y of shape (B,)."""

    pytree_data_fields: tuple[str, ...] = ("weights",)
    pytree_aux_fields: tuple[str, ...] = ("link",)
    sees_several = True

    def __init__(
        self,
        marginals: Marginals,
        weights: ArrayLike,
        integrator: MonteCarlo | None,
        validate_args: bool | None,
        **of_areas: tuple[ArrayLike, Allowed],
    ) -> None:
        """
        :param of_areas: parameters of each area, by their name, and what they may be.
        """
        if integrator is not None and not isinstance(integrator, MonteCarlo):
            raise TypeError(
                f"{type(self).__name__} takes joint draws, integrator=MonteCarlo(num_points), or None for the bound of means and "
                f"variances; got {type(integrator).__name__}, whose nodes are of each input by itself."
            )
        self._take_weights(marginals, weights)
        for name, (value, allowed) in of_areas.items():
            setattr(self, name, self._parameter(marginals, name, value, allowed))
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def _take_weights(self, marginals: Marginals, weights: ArrayLike) -> None:
        m = self._required(marginals)
        w, own = jnp.asarray(weights).astype(m.mean.dtype), m.own_shape
        shape = (own[0] // max(w.shape[0], 1), *w.shape) if w.ndim == 1 and len(own) == 1 else w.shape
        if len(own) != 1 or len(shape) != 2 or shape[0] * shape[1] != own[0]:
            raise ValueError(
                f"{type(self).__name__} needs f(X) of shape (B Q,), the Q inputs of one y beside each other, and `weights` of "
                f"shape (B, Q) or (Q,); got f(X) of shape {own} and weights {w.shape}. For nodes of shape (B, Q, D): "
                "f(nodes.reshape(B * Q, D))."
            )
        inspect(partial(_refuse_weights, type(self).__name__), w)
        self.weights = jnp.broadcast_to(w, shape)

    def _shape_of_points(self, marginals: Marginals) -> tuple[int, ...]:
        return self.weights.shape[-2:-1]

    def _log_sum(self, log_values: Array) -> Array:
        """log of the weighted sum of exp(log_values), (..., B Q) to (..., B)."""
        some = self.weights > 0
        log_w = jnp.where(some, jnp.log(jnp.where(some, self.weights, 1)), -jnp.inf)
        return logsumexp(log_values.reshape(*log_values.shape[:-1], *self.weights.shape) + log_w, axis=-1)

    def _at_nodes(self, function: Any) -> Array:
        """E[function(f)] at each input, by a rule of one dimension; shape (..., B Q)."""
        m = self.marginals
        nodes, weights = (jnp.asarray(a, m.mean.dtype) for a in gauss_hermite(_NODES, 1))
        nodes = nodes.reshape((-1,) + (1,) * m.mean.ndim)
        return expectation(weights, function(m.mean + safe_sqrt(m.variance) * nodes))

    @abstractmethod
    def _bound(self, y: Array) -> Array:
        """A lower bound of E[log p(y | f)] by means and variances."""

    def expected_log_density(self, y: Array) -> Array:
        mean = self.marginals.mean
        if not isinstance(self.integrator, MonteCarlo):
            return self._bound(real(y, mean.dtype))
        f, weights = self._values(y)
        values = expectation(weights, self.log_density(f, y))
        # What is linear in f about its mean is zero on average, and most of the noise.
        error = expectation(weights, f) - mean
        _, linear = jax.jvp(lambda f: self.log_density(f, y), (jnp.broadcast_to(mean, error.shape),), (error,))
        return values - linear

    def log_predictive(self, value: ArrayLike) -> Array:
        y = self._checked(value)
        return self._log_average(lambda f: self.log_density(f, y), y)

    def sample(self, key: PRNGKey | None, sample_shape: tuple[int, ...] = ()) -> Array:
        self._refuse_independent()
        return super().sample(key, sample_shape)

    @property
    def tightening_cost(self) -> Array:
        cost = self.marginals.tightening_cost
        return cost.reshape(*cost.shape[:-1], *self.weights.shape).sum(-1)

    # ---------------------------------------------------------------- joint draws, in the place of nodes

    def _values(self, y: Array | None = None) -> tuple[Array, Array]:
        return self._drawn(self.rng_key, self.integrator.num_points, y)

    def _average(self, value: Any, y: Array | None = None, *, line: bool = False) -> Array:
        f, weights = self._predicted(y)
        return expectation(weights, value(f))

    def _log_average(self, log_value: Any, y: Array | None = None, *, line: bool = False) -> Array:
        f, weights = self._predicted(y)
        return log_expectation(weights, log_value(f))

    def _predicted(self, y: Array | None) -> tuple[Array, Array]:
        rule = self.integrator
        num = max(rule.num_points, _DRAWS) if isinstance(rule, MonteCarlo) else _DRAWS
        return self._drawn(None, num, y)

    def _drawn(self, key: PRNGKey | None, num: int, y: Array | None) -> tuple[Array, Array]:
        """Draws of f at all inputs, with axes of size one for samples of y; without a key the same ones each time."""
        self._refuse_independent()
        m = self.marginals
        f = m.draw(jax.random.PRNGKey(0) if key is None else key, (num,))
        samples = 0 if y is None else max(y.ndim - len(self.batch_shape), 0)
        return f.reshape(num, *(1,) * samples, *f.shape[1:]), jnp.full(num, 1 / num, m.mean.dtype)

    def _refuse_independent(self) -> None:
        if self.marginals.joint is None:
            raise ValueError(
                f"Draws of {type(self).__name__} need f at all inputs of an area together, and these marginals have no joint "
                "draws: leave out `.independent()`. Beyond 8192 inputs predict in batches of whole areas."
            )


class _RateOfSum(_OfSum):
    """Counts whose mean given f is a weighted sum of positive links of f."""

    def _log_rate(self, f: Array) -> Array:
        return self._log_sum(POSITIVE_LINKS[self.link].log(f))

    def _log_rates(self) -> tuple[Array, Array]:
        """The bound of E[log rate], and log E[rate]."""
        m, link = self.marginals, POSITIVE_LINKS[self.link]
        if self.link == "exp":
            return self._log_sum(m.mean), self._log_sum(m.mean + m.variance / 2)
        return self._log_sum(self._at_nodes(link.log)), self._log_sum(jnp.log(self._at_nodes(link.value)))

    @property
    def support(self) -> Any:
        return constraints.nonnegative_integer

    @property
    def mean(self) -> Array:
        """Expected counts, shape (B,); in closed form for "exp"."""
        return jnp.exp(self._log_rates()[1])


class PoissonOfSum(_RateOfSum):
    r"""Counts of areas or bins, with the rate :math:`\lambda_b = \sum_q w_{bq}\, e^{f(x_{bq})}`, or softplus in the place of exp.

    ::

        f = gp("f", kernel, Z)
        with numpyro.plate("areas", B):
            numpyro.sample("y", PoissonOfSum(f(nodes.reshape(B * Q, D)), weights), obs=y)

    In a fit each y has a bound in closed form of means and variances at its nodes, Q times the cost of a row:

    .. math:: E_q[\log p(y \mid f)] \ge y \log \sum_q w_q e^{m_q} - \sum_q w_q e^{m_q + v_q / 2} - \log y!

    exact for one node, and below by :math:`y (\log \sum_q w_q e^{m_q + v_q / 2} - \log \sum_q w_q e^{m_q})` at most [1].
    ``integrator=MonteCarlo(16)`` takes joint draws of f in its place: without that gap, with noise, at a cost of (B Q)^3 in each
    step, 2048 inputs at most. Draws of y, ``log_predictive`` and ``variance`` are by joint draws of f, 1024 at least.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import gp, kernels, likelihoods
    >>> nodes, people = jnp.linspace(0.0, 1.0, 12).reshape(4, 3, 1), jnp.full((4, 3), 100.0)
    >>> with numpyro.handlers.seed(rng_seed=0):
    ...     f = gp("f", kernels.RBF(0.3), nodes[:, 0])
    >>> likelihoods.PoissonOfSum(f(nodes.reshape(12, 1)), people).log_prob(jnp.array([250, 300, 310, 180])).shape
    (4,)

    :param marginals: f(X), shape (B Q,), the Q inputs of one y beside each other; with what else the log rate has at each input,
        f(X) + offset.
    :param weights: w >= 0, what each node stands for (people, area, time), shape (B, Q) or (Q,); zero where a row has fewer nodes.
    :param link: "exp" or "softplus", for which expectations at a node are by 20 Gauss-Hermite nodes.
    :param integrator: ``None`` for the bound, or :class:`MonteCarlo` for joint draws.
    :raises TypeError: for another integrator.
    :raises ValueError: for another link; for shapes that do not go together; if a concrete weight is negative, or all of a row are
        zero; from draws, if the marginals have none that are joint.

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
        integrator: MonteCarlo | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, POSITIVE_LINKS)
        super().__init__(marginals, weights, integrator, validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.Poisson(jnp.exp(self._log_rate(f)))

    def log_density(self, f: Array, y: Array) -> Array:
        return log_poisson(self._log_rate(f), 0, real(y, f.dtype))

    def _bound(self, y: Array) -> Array:
        low, high = self._log_rates()
        return log_poisson(low, high - low, y)


class NegativeBinomialOfSum(_RateOfSum):
    r"""Counts of mean :math:`\lambda` as :class:`PoissonOfSum` has it, and variance :math:`\lambda + \lambda^2 / k`.

    .. math:: E_q[\log p(y \mid f)] \ge y\, l - (y + k) \log(k + E \lambda) + \text{const}, \qquad
        l = \log \sum_q w_q\, e^{E[\log g(f_q)]}

    :param marginals: f(X), shape (B Q,), the Q inputs of one y beside each other.
    :param weights: w >= 0, what each node stands for, shape (B, Q) or (Q,).
    :param concentration: k > 0, of the areas, shape () or (B,); the larger, the closer to :class:`PoissonOfSum`.
    :param link: "exp" or "softplus".
    :param integrator: ``None`` for the bound, or :class:`MonteCarlo` for joint draws.
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
        integrator: MonteCarlo | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, POSITIVE_LINKS)
        super().__init__(marginals, weights, integrator, validate_args, concentration=(concentration, POSITIVE))

    def conditional(self, f: Array) -> dist.Distribution:
        return dist.NegativeBinomial2(jnp.exp(self._log_rate(f)), self.concentration)

    def log_density(self, f: Array, y: Array) -> Array:
        return log_negative_binomial(self._log_rate(f), 0, self.concentration, real(y, f.dtype))

    def _bound(self, y: Array) -> Array:
        low, high = self._log_rates()
        return log_negative_binomial(low, high - low, self.concentration, y)


class BinomialOfAverage(_OfSum):
    r"""Successes among ``total_count`` of an area, each with the probability :math:`p_b = \sum_q w_{bq}\, p(f(x_{bq}))`.

    A share of those who live somewhere in the area, where p varies within it: prevalence surveys, elections. Weights are
    divided by their sum. Both logarithms have the bound of the module,

    .. math:: E_q[\log p_b] \ge \log \sum_q w_q\, e^{E[\log p(f_q)]}, \qquad
        E_q[\log(1 - p_b)] \ge \log \sum_q w_q\, e^{E[\log(1 - p(f_q))]}.

    :param marginals: f(X), shape (B Q,), the Q inputs of one y beside each other.
    :param weights: w >= 0, shares of the nodes, shape (B, Q) or (Q,).
    :param total_count: number of trials of the areas, shape () or (B,).
    :param link: "logit", "probit" or "cloglog", whose expectations at a node are by 20 Gauss-Hermite nodes.
    :param integrator: ``None`` for the bound, or :class:`MonteCarlo` for joint draws.
    :raises TypeError, ValueError: as :class:`PoissonOfSum`; if a concrete ``total_count`` is negative or not whole.
    """

    pytree_data_fields: tuple[str, ...] = ("total_count",)

    def __init__(
        self,
        marginals: Marginals,
        weights: ArrayLike,
        total_count: ArrayLike,
        link: str = "logit",
        *,
        integrator: MonteCarlo | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.link = check_option("link", link, PROBABILITY_LINKS)
        super().__init__(marginals, weights, integrator, validate_args, total_count=(total_count, WHOLE))

    def _take_weights(self, marginals: Marginals, weights: ArrayLike) -> None:
        super()._take_weights(marginals, weights)
        self.weights = self.weights / self.weights.sum(-1, keepdims=True)

    def conditional(self, f: Array) -> dist.Distribution:
        p = jnp.exp(self._log_sum(PROBABILITY_LINKS[self.link].log_p(f)))
        return dist.BinomialProbs(jnp.minimum(p, 1), self.total_count.astype(int))

    def log_density(self, f: Array, y: Array) -> Array:
        link = PROBABILITY_LINKS[self.link]
        return self._log_binomial(self._log_sum(link.log_p(f)), self._log_sum(link.log_not_p(f)), real(y, f.dtype))

    def _bound(self, y: Array) -> Array:
        link = PROBABILITY_LINKS[self.link]
        return self._log_binomial(
            self._log_sum(self._at_nodes(link.log_p)), self._log_sum(self._at_nodes(link.log_not_p)), y
        )

    def _log_binomial(self, log_p: Array, log_not_p: Array, y: Array) -> Array:
        total = jnp.logaddexp(log_p, log_not_p)  # below zero where these are bounds
        n = self.total_count
        return log_binomial(y, n - y, log_p - total, log_not_p - total) + n * total

    @property
    def support(self) -> Any:
        return constraints.integer_interval(0, self.total_count)

    @property
    def mean(self) -> Array:
        """Expected successes, shape (B,)."""
        p = self._at_nodes(PROBABILITY_LINKS[self.link].p)
        return self.total_count * jnp.exp(self._log_sum(jnp.log(p)))


def _refuse_weights(likelihood: str, weights: Array) -> None:
    values = np.asarray(weights)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"`weights` of {likelihood} must be finite and not negative; got a value of {values.min()}.")
    empty = np.flatnonzero(~(values.sum(-1) > 0))
    if empty.size:
        raise ValueError(
            f"`weights` of {likelihood} are all zero in row {empty[0]}: a count there would have the rate zero."
        )
