"""Any NumPyro distribution as a likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_orthgp.closures import as_pytree
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator
from numpyro_orthgp.likelihoods.tails import log_prob
from numpyro_orthgp.types import Array

__all__ = ["Likelihood"]


class Likelihood(ExpectedLikelihood):
    """Any NumPyro distribution as the distribution of y given f.

    ::

        Likelihood(f(X), lambda f: dist.NegativeBinomial2(jnp.exp(f), concentration))
        Likelihood(stack([f(X), g(X)]), lambda fg: dist.Normal(fg[..., 0], jnp.exp(fg[..., 1])))

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro_orthgp import Likelihood, Marginals, likelihoods
    >>> f = Marginals(mean=jnp.ones(1), explained=jnp.array([0.5]), residual=jnp.zeros(1))
    >>> counts = Likelihood(f, lambda f: dist.Poisson(jnp.exp(f)))
    >>> y = jnp.array([2])
    >>> print(counts.log_prob(y).round(4), likelihoods.Poisson(f).log_prob(y).round(4))
    [-2.1835] [-2.1835]

    :param marginals: f(X), shape (B,) or (B, P).
    :param fn: maps latent values of shape (..., B) or (..., B, P) to a distribution with the same batch shape, or (..., B)
        if y depends on all P. The leading axes are integration nodes, so index latent functions from the right:
        ``f[..., 0]``.
    :param integrator: :class:`GaussHermite`, :class:`QuasiMonteCarlo` or :class:`MonteCarlo`; by default 20 Gauss-Hermite nodes for
        one or two latent functions, and 128 quasi-Monte Carlo points for more. Twenty are enough for exp and logistic links, and
        wherever the density, as a function of f, is about as wide as q or wider. Where it is narrower (small noise, mixtures,
        kinks) give more, ``integrator=ogp.GaussHermite(100)``. :func:`~numpyro_orthgp.check` measures the error of a fit, and says
        it from 0.01 nats per point on.
    :raises TypeError: if ``fn`` does not return a distribution.
    :raises ValueError: for another batch shape; if the distribution of one row depends on f at several rows.
    """

    pytree_data_fields: tuple[str, ...] = ("fn",)
    _of_users = True

    def __init__(
        self,
        marginals: Marginals,
        fn: Callable[[Array], dist.Distribution],
        *,
        integrator: Integrator | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.fn: Any = as_pytree(fn)
        super().__init__(marginals, integrator=integrator, validate_args=validate_args)

    def conditional(self, f: Array) -> dist.Distribution:
        given = self.fn(f)
        if not isinstance(given, dist.Distribution):
            raise TypeError(f"`fn` must return a numpyro distribution; got {type(given).__name__}.")
        return given

    def log_density(self, f: Array, y: Array) -> Array:
        """log p(y | f). Of vectors y, which NumPyro's MultivariateNormal does not repeat for each node itself."""
        given = self.conditional(f)
        if given.event_shape:
            y = jnp.broadcast_to(y, jnp.broadcast_shapes(y.shape, given.shape()))
        return log_prob(given, y)
