r"""A family for many inducing variables of which data determine few directions.

What data say adds to the precision of the whitened variables, :math:`S^{-1} = I + A \Sigma^{-1} A^\top` for Gaussian noise, and
where the kernel is smooth this sum has few large eigenvalues. So a low rank belongs into the precision,

.. math:: S^{-1} = D^{-2} + G G^\top, \qquad D = \mathrm{diag}(s), \quad G \text{ of shape } M \times K,

and not into the covariance, where K columns can raise the variance in K directions but lower none. With :math:`H = D G` and the
K x K factor :math:`L L^\top = I + H^\top H`

.. math:: S = R R^\top, \quad R = D (I - H X H^\top), \quad X = L^{-\top} (I + L)^{-1}, \qquad |S| = |D|^2 / |L|^2,

since :math:`(I - H X H^\top)^2 = (I + H H^\top)^{-1}`. A bound costs O(M K (B + K)) for each set where a full covariance costs
O(M^2 B), beside the projections of the inputs, which cost that in any case; a fit holds M (K + 2) parameters instead of M^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from numpyro.distributions import constraints

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.gaussians.family import Whitened
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.linalg import diagonal, matmul, matmul_transposed, solve_lower
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["LowRank"]

# The share of each variable's precision that G starts with: at zero its gradient would be zero too.
_START = 0.01


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank(Whitened):
    r"""A precision of low rank and a diagonal: "low_rank" has K = 16, :meth:`of_rank` any other.

    :param scale: s, shape (..., M).
    :param factor: G, shape (..., M, K).
    """

    scale: Array
    factor: Array

    name = "low_rank"
    constraints = {"scale": constraints.positive, "factor": constraints.real}

    @classmethod
    def of_rank(cls, rank: int) -> Callable[[tuple[int, ...], Array], LowRank]:
        """The family of another rank, ``AutoSparseGP(model, covariance=LowRank.of_rank(50))``.

        :param rank: K; no more than there are inducing variables is used.
        :raises ValueError: if it is no positive integer.
        """
        return partial(cls.start, rank=check_integer("rank", rank))

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: Array, rank: int = 16) -> LowRank:
        noise = jax.random.normal(jax.random.PRNGKey(0), (*shape, min(rank, shape[-1])), scale.dtype)
        # Directions at random, of the same length in each variable.
        G = noise * jnp.sqrt(_START / jnp.sum(noise**2, -1, keepdims=True)) / scale
        return cls(jnp.zeros(shape, scale.dtype), jnp.full(shape, scale / jnp.sqrt(1 - _START)), G)

    def spread(self, A: Array) -> Array:
        H, _, X = self._roots()
        scaled = self.scale[..., None] * A
        return scaled - matmul(H, matmul_transposed(X, matmul_transposed(H, scaled)))

    def excess_trace(self) -> Array:
        return jnp.sum(self.scale**2 - 1, -1) - jnp.sum(self._lowered(), -1)

    def half_log_det(self) -> Array:
        _, L, _ = self._roots()
        return jnp.sum(jnp.log(jnp.abs(self.scale)), -1) - jnp.sum(jnp.log(diagonal(L)), -1)

    def standardized(self, V: Array) -> Array:
        # R^-1 = (I + H (I + L')^-1 H') D^-1
        H, L, _ = self._roots()
        scaled = V / self.scale[..., None]
        return scaled + matmul(H, matmul_transposed(_inverse(_one_more(L)), matmul_transposed(H, scaled)))

    def variance(self) -> Array:
        return self.scale**2 - self._lowered()

    def sample(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        H, _, X = self._roots()
        noise = jax.random.normal(rng_key, sample_shape + self.loc.shape, self.loc.dtype)[..., None]
        return self.loc + self.scale * (noise - matmul(H, matmul(X, matmul_transposed(H, noise))))[..., 0]

    def _roots(self) -> tuple[Array, Array, Array]:
        """H, L and X."""
        H = self.scale[..., None] * self.factor
        L = safe_cholesky(_one_more(matmul_transposed(H, H)), jnp.ones(H.shape[:-2], H.dtype))
        return H, L, matmul_transposed(_inverse(L), _inverse(_one_more(L)))

    def _lowered(self) -> Array:
        """The diagonal of D^2 - S, shape (..., M)."""
        H, L, _ = self._roots()
        return self.scale**2 * jnp.sum(matmul(_inverse(L), jnp.swapaxes(H, -1, -2)) ** 2, -2)


def _one_more(A: Array) -> Array:
    return A + jnp.eye(A.shape[-1], dtype=A.dtype)


def _inverse(L: Array) -> Array:
    return solve_lower(L, jnp.eye(L.shape[-1], dtype=L.dtype))
