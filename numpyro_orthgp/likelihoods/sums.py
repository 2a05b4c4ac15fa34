r"""Counts of areas or bins: each y depends on a sum of a positive function of f over several inputs.

The rate of y is :math:`\lambda = \sum_q w_q\, g(f(x_q))`, which is not linear in f. Its expected log density is an integral over
the joint distribution of f at the Q nodes of its area. It is computed with a quasi-Monte Carlo rule in Q dimensions and the
covariance within the area (``functions/within.py``), without bias. So B areas cost as much as B Q rows, plus B Q^3. The part that
is linear in f around its mean is zero on average and left out, so there is little noise.

Marginals alone give a bound, since log-sum-exp is convex (Law et al. 2018, for :math:`g = \exp`):

.. math:: E[\log \lambda] \ge \log \sum_q w_q\, e^{E[\log g(f(x_q))]}, \qquad E[\lambda] = \sum_q w_q\, E[g(f(x_q))]

It is Jensen's inequality with the best responsibilities r, :math:`\sum_q r_q (E \log g_q + \log w_q - \log r_q)`. The loss is as if
each node's share :math:`r_q y` of the count had been observed. So q underestimates the uncertainty of f within an area, the more so
the larger counts are. For one node the bound is exact. A log density that falls with the logarithm of a sum has Jensen's
inequality in the other direction, :math:`-E \log(k + \lambda) \ge -\log(k + E \lambda)`.

If several functions are mixed, the covariance within areas is not known, and f is drawn jointly at all inputs. Independent draws
would be wrong: variation would average out over nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_orthgp.errors import check_option, inspect
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.within import root_within
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, MonteCarlo, QuasiMonteCarlo, expectation
from numpyro_orthgp.likelihoods.checks import Allowed, real
from numpyro_orthgp.likelihoods.integrators import FOR_PREDICTIONS, by_blocks, log_expectation
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.math.quadrature import about_bends
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = ["OfSum"]

_WIDTH = 2.0  # on which g(f) and log g(f) bend, at zero
_RULE = QuasiMonteCarlo(64)  # in a fit, for each area


class OfSum(ExpectedLikelihood):
    """Counts that depend on weighted sums of g(f) over Q inputs each: f(X) of shape (B Q,), y of shape (B,)."""

    pytree_data_fields: tuple[str, ...] = ("weights",)
    pytree_aux_fields: tuple[str, ...] = ("link", "by_marginals")
    sees_several = True
    links: ClassVar[dict[str, Any]]

    def __init__(
        self,
        marginals: Marginals,
        weights: ArrayLike,
        link: str,
        integrator: QuasiMonteCarlo | MonteCarlo | None,
        by_marginals: bool,
        validate_args: bool | None,
        **of_areas: tuple[ArrayLike, Allowed],
    ) -> None:
        """
        :param of_areas: parameters of each area, by name, and their allowed values.
        """
        if not isinstance(integrator or _RULE, QuasiMonteCarlo | MonteCarlo):
            raise TypeError(
                f"{type(self).__name__} integrates over f at all inputs of an area together, by QuasiMonteCarlo(num_points) or "
                f"MonteCarlo(num_points); got {type(integrator).__name__}, whose nodes would be too many."
            )
        self.link = check_option("link", link, self.links)
        self._take_weights(marginals, weights)
        for name, (value, allowed) in of_areas.items():
            self._refuse_transposed(name, jnp.shape(value))
            setattr(self, name, self._parameter(marginals, name, value, allowed))
        self.by_marginals = bool(by_marginals)
        super().__init__(marginals, integrator=integrator or _RULE, validate_args=validate_args)
        self.by_default = integrator is None

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

    def _refuse_transposed(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise an error for weights of shape (Q, B), which also fit f(X). A parameter whose length is Q, not B, reveals them."""
        B, Q = self.weights.shape
        if shape and 1 < shape[-1] == Q != B:
            raise ValueError(
                f"`{name}` has {Q} areas, and `weights` have {B}: shape (B, Q) = {(B, Q)}, a row of {Q} nodes for each area. Did "
                f"you mean weights.T? The Q inputs of one area are beside each other in f(X)."
            )

    def check(self, y: Array, name: str = "obs", mask: Any = True) -> None:
        self._refuse_transposed(name, y.shape)
        super().check(y, name, mask)

    @property
    def _link(self) -> Any:
        return self.links[self.link]

    def _shape_of_points(self, marginals: Marginals) -> tuple[int, ...]:
        return self.weights.shape[-2:-1]

    def _log_sum(self, log_values: Array) -> Array:
        """log of the weighted sum of exp(log_values), from (..., B Q) to (..., B)."""
        some = self.weights > 0
        log_w = jnp.where(some, jnp.log(jnp.where(some, self.weights, 1)), -jnp.inf)
        return logsumexp(log_values.reshape(*log_values.shape[:-1], *self.weights.shape) + log_w, axis=-1)

    def _at_nodes(self, function: Any) -> Array:
        """E[function(f)] at each input, by a one-dimensional rule, shape (..., B Q)."""
        m, scale = self.marginals, safe_sqrt(self.marginals.variance)
        nodes, weights = about_bends(m.mean, scale, 0.0, 0.0, _WIDTH)
        return expectation(weights, function(m.mean + scale * nodes))

    @abstractmethod
    def _bound(self, y: Array) -> Array:
        """A lower bound of E[log p(y | f)] from means and variances."""

    def expected_log_density(self, y: Array) -> Array:
        mean = self.marginals.mean
        if self.by_marginals:
            return self._bound(real(y, mean.dtype))
        f, weights = self._values(y)
        values = expectation(weights, self.log_density(f, y))
        error = expectation(weights, f) - mean
        _, linear = jax.jvp(lambda f: self.log_density(f, y), (jnp.broadcast_to(mean, error.shape),), (error,))
        return values - linear

    def log_predictive(self, value: ArrayLike) -> Array:
        y = self._checked(value)
        return self._log_average(lambda f: self.log_density(f, y), y)

    @property
    def tightening_cost(self) -> Array:
        cost = self.marginals.tightening_cost
        return self._charged(cost.reshape(*cost.shape[:-1], *self.weights.shape).sum(-1))

    # ---------------------------------------------------------------- f at all inputs of an area together

    def sample(self, key: PRNGKey | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        self._refuse_independent()
        return super().sample(key, sample_shape)

    def _values(self, y: Array | None = None) -> tuple[Array, Array]:
        root, (B, Q) = self._root(), self.weights.shape
        if root is None:
            return self._drawn(self.rng_key, self.integrator.num_points, y)
        nodes, weights = self.integrator.nodes(self.rng_key, (B,), Q, root.dtype)
        return self._spread(root, nodes, y), weights

    def _average(self, value: Any, y: Array | None = None, *, line: bool = False) -> Array:
        return self._predicted(lambda f, w: expectation(w, value(f)), y).sum(0)

    def _log_average(self, log_value: Any, y: Array | None = None, *, line: bool = False) -> Array:
        return logsumexp(self._predicted(lambda f, w: log_expectation(w, log_value(f)), y), axis=0)

    def _predicted(self, function: Any, y: Array | None) -> Array:
        """``function`` of values of f and weights, with one leading axis for its blocks."""
        root, num = self._root(), FOR_PREDICTIONS if self.by_default else self.integrator.num_points
        if root is None:
            return function(*self._drawn(None, num, y))[None]
        nodes, weights = type(self.integrator)(num).shared_nodes(1, self.weights.shape[1], root.dtype)
        return by_blocks(lambda x, w: function(self._spread(root, x, y), w), nodes, weights)

    def _root(self) -> Array | None:
        self._refuse_independent()
        return root_within(self.marginals.joint, self.weights.shape[1])

    def _spread(self, root: Array, nodes: Array, y: Array | None) -> Array:
        """f at standard-normal nodes (S, B or 1, Q) of each area, shape (S, ..., B Q)."""
        f = jnp.matmul(root, self._aligned(nodes, y)[..., None], precision=PRECISION)[..., 0]
        return self.marginals.mean + f.reshape(*f.shape[:-2], -1)

    def _drawn(self, key: PRNGKey | None, num: int, y: Array | None) -> tuple[Array, Array]:
        """Draws of f at all inputs of all areas. Without a key, draws are the same each time."""
        m = self.marginals
        f = m._draw(jax.random.key(0) if key is None else key, (num,))
        samples = 0 if y is None else max(y.ndim - len(self.batch_shape), 0)
        return f.reshape(num, *(1,) * samples, *f.shape[1:]), jnp.full(num, 1 / num, m.mean.dtype)

    def _refuse_independent(self) -> None:
        if self.marginals.joint is None:
            raise ValueError(
                f"{type(self).__name__} needs f at all inputs of an area together, and these marginals have no joint draws: leave "
                "out `.independent()`. (by_marginals=True has a bound that needs none.)"
            )


def _refuse_weights(likelihood: str, weights: Array) -> None:
    values = np.asarray(weights)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"`weights` of {likelihood} must be finite and not negative; got a value of {values.min()}.")
    empty = np.flatnonzero(~(values.sum(-1) > 0))
    if empty.size:
        raise ValueError(f"`weights` of {likelihood} are all zero in row {empty[0]}, whose counts would have no rate.")
