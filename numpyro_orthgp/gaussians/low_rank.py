r"""A family between "diagonal" and "full": a root of S that is the sum of a diagonal and a low-rank matrix.

.. math:: S = R R^\top, \qquad R = D + U V^\top, \qquad D = \mathrm{diag}(s), \quad U, V \text{ of shape } M \times K.

The root has this form, not S, because data shrink the covariance of whitened variables,
:math:`S = (I + A \Sigma^{-1} A^\top)^{-1}` for Gaussian noise. :math:`S = D^2 + U U^\top` can raise the variance in K directions
but lower none. In contrast, :math:`R = I - (1 - \epsilon) u u^\top` lowers it to :math:`\epsilon^2` in the direction u, with
entries of at most one, which optimizers with one step length for all parameters reach soon. The determinant is that of a K x K
matrix, :math:`|R| = |D|\, |I + V^\top D^{-1} U|`.

For each set a bound costs O(M K (B + K)) instead of O(M^2 B) for a full covariance. The projections of the inputs cost O(M^2 B) in
both cases. A fit holds M (2 K + 2) parameters instead of M^2.
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
from numpyro_orthgp.math.products import matmul, matmul_transposed
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["LowRank"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank(Whitened):
    r"""A diagonal plus a low-rank matrix as the root of S. The name "low_rank" has K = 16; :meth:`of_rank` gives other ranks.

    :param scale: s, shape (..., M).
    :param left: U, shape (..., M, K).
    :param right: V, shape (..., M, K).
    """

    scale: Array
    left: Array
    right: Array

    name = "low_rank"
    constraints = {"scale": constraints.positive}

    @classmethod
    def of_rank(cls, rank: int) -> Callable[[tuple[int, ...], Array], LowRank]:
        """The family with another rank, ``AutoSparseGP(model, covariance=LowRank.of_rank(50))``.

        :param rank: K; at most the number of inducing variables is used.
        :raises ValueError: if it is not a positive integer.
        """
        return partial(cls.start, rank=check_integer("rank", rank))

    @classmethod
    def start(cls, shape: tuple[int, ...], scale: Array, rank: int = 16) -> LowRank:
        M = shape[-1]
        # Columns of length about one: if U were zero too, V would have no gradient.
        U = jax.random.normal(jax.random.key(0), (*shape, min(rank, M)), scale.dtype) / M**0.5
        return cls(jnp.zeros(shape, scale.dtype), jnp.full(shape, scale), U, jnp.zeros_like(U))

    def spread(self, A: Array) -> Array:
        return self.scale[..., None] * A + matmul(self.right, matmul_transposed(self.left, A))

    def excess_trace(self) -> Array:
        mixed = jnp.sum(self.scale[..., None] * self.left * self.right, (-2, -1))
        square = jnp.sum(_gram(self.left) * _gram(self.right), (-2, -1))
        return jnp.sum(self.scale**2 - 1, -1) + 2 * mixed + square

    def half_log_det(self) -> Array:
        return jnp.sum(jnp.log(self.scale), -1) + jnp.linalg.slogdet(self._inner())[1]

    def standardized(self, V: Array) -> Array:
        scaled = V / self.scale[..., None]
        inner = jnp.linalg.solve(self._inner(), matmul_transposed(self.right, scaled))
        return scaled - matmul(self.left / self.scale[..., None], inner)

    def variance(self) -> Array:
        mixed = 2 * self.scale * jnp.sum(self.left * self.right, -1)
        return self.scale**2 + mixed + jnp.sum(matmul(self.left, _gram(self.right)) * self.left, -1)

    def sample(self, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        noise = jax.random.normal(rng_key, sample_shape + self.loc.shape, self.loc.dtype)[..., None]
        return (
            self.loc + (self.scale[..., None] * noise + matmul(self.left, matmul_transposed(self.right, noise)))[..., 0]
        )

    def _inner(self) -> Array:
        """I + V' D^-1 U, shape (..., K, K)."""
        inner = matmul_transposed(self.right, self.left / self.scale[..., None])
        return inner + jnp.eye(inner.shape[-1], dtype=inner.dtype)


def _gram(U: Array) -> Array:
    return matmul_transposed(U, U)
