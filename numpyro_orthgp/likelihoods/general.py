"""Any NumPyro distribution as a likelihood.

Its nodes are those of each row by itself, and the same numbers in all rows. So a distribution of y that depends on f at several
rows (a running sum, the distance from a mean) would get a wrong expectation. The density of a row must be a sum of functions of f
at one row each. That is looked at where the numbers of ``fn`` are known, as when a guide first sees its model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_orthgp.closures import as_pytree
from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.likelihoods.base import ExpectedLikelihood, Integrator
from numpyro_orthgp.math.interactions import bits, not_additive
from numpyro_orthgp.types import Array

__all__ = ["Likelihood"]

_MOST_ROWS = 64  # of which each is compared with each


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
        one or two latent functions, and 128 quasi-Monte Carlo points for more.
    :raises TypeError: if ``fn`` does not return a distribution.
    :raises ValueError: for another batch shape; if the distribution of one row depends on f at several rows.
    """

    pytree_data_fields: tuple[str, ...] = ("fn",)

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
        if not self.lead and self._sees_several_rows():
            raise ValueError(
                "`fn` of Likelihood(f(X), fn) makes the distribution of one row depend on f at several rows, such as their sum or "
                "mean. f(X) has the distribution of f at each row alone, so the expectation would be wrong. Draw f, and give y a "
                "distribution of NumPyro: dist.Normal(jnp.cumsum(f(X).sample()), s). Where it is linear in f, "
                "f(Average(nodes, weights)) needs no draw."
            )

    def _sees_several_rows(self) -> bool:
        """Whether the density of a row is no sum of functions of one row each; False where its numbers are not known."""
        own, random = self.marginals.own_shape, np.random.default_rng(0)
        step = random.choice([-1, 1], own) * random.uniform(0.5, 1.5, own)
        rows = np.arange(own[0]).reshape(-1, *(1,) * (len(own) - 1))

        def density(moved: np.ndarray) -> Any:
            given = self.conditional(jnp.asarray(step * moved, self.marginals.mean.dtype))
            return given.log_prob(given.support.feasible_like(jnp.zeros(given.shape())))

        def is_sum(one: np.ndarray) -> bool:
            start, a, b, both = (np.asarray(density(part)) for part in (0 * rows, one, 1 - one, rows >= 0))
            return not not_additive(start, a, b, both, float(jnp.finfo(start.dtype).eps)).any()

        if not all(map(is_concrete, jax.tree.leaves(self.fn))):
            return False
        try:
            with jax.ensure_compile_time_eval():
                return not all(is_sum(rows >> bit & 1) for bit in bits(min(own[0], _MOST_ROWS)))
        except Exception:  # a distribution without a density or a support, or a function that needs its site
            return False

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
        density: Array = given.log_prob(y)
        return density
