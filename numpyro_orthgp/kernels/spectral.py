"""Random frequencies of stationary kernels: draws from their spectral densities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.kernels.hyperparameters import per_dimension, per_latent
from numpyro_orthgp.kernels.stationary import RBF, Matern12, Matern32, Matern52, Periodic, RationalQuadratic
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["FREQUENCIES", "Draw"]


class Draw(NamedTuple):
    """Arguments for drawing the features of one elementary kernel.

    :param rng_key: for this kernel alone.
    :param batch: shape of the independent draws.
    :param num_features: L.
    :param num_inner_features: number of summands, if a feature is a sum of others.
    :param columns: the columns that the kernel sees, out of ``num_dims``, integers of shape (n,).
    """

    rng_key: PRNGKey
    batch: tuple[int, ...]
    num_features: int
    num_inner_features: int
    columns: Any
    num_dims: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """``(*batch, L)``."""
        return (*self.batch, self.num_features)

    def normals(self, *sizes: int) -> list[Array]:
        """Independent standard normals, one array of shape ``(*batch, L, size)`` for each size."""
        together = jax.random.normal(self.rng_key, (*self.shape, sum(sizes)), self.dtype)  # one call compiles faster
        return jnp.split(together, np.cumsum(sizes)[:-1], axis=-1)

    def embed(self, weights: Array) -> Array:
        """Weights of the columns seen, (..., L, n), filled up with zeros for other columns, (..., L, D)."""
        if np.array_equal(self.columns, np.arange(self.num_dims)):
            return weights
        return matmul(weights, jnp.asarray(np.eye(self.num_dims)[self.columns], weights.dtype))


def _rbf(kernel: RBF, draw: Draw) -> Array:
    (z,) = draw.normals(len(draw.columns))
    return z / per_dimension("lengthscale", kernel.lengthscale, z)


def _matern(degrees_of_freedom: int) -> Callable[[Any, Draw], Array]:
    def frequencies(kernel: Any, draw: Draw) -> Array:
        z, g = draw.normals(len(draw.columns), degrees_of_freedom)
        # Zero would give an infinite frequency. Beyond 1 / eps a cosine is noise anyway.
        mean_square = jnp.maximum(jnp.square(g).mean(-1, keepdims=True), float(jnp.finfo(draw.dtype).eps) ** 2)
        return z / (per_dimension("lengthscale", kernel.lengthscale, z) * jnp.sqrt(mean_square))

    return frequencies


def _rational_quadratic(kernel: RationalQuadratic, draw: Draw) -> Array:
    # (1 + r^2 / (2 alpha))^-alpha is the mean of exp(-t r^2 / 2) over t ~ Gamma(alpha, rate alpha).
    normal_key, gamma_key = jax.random.split(draw.rng_key)
    alpha = per_latent("alpha", kernel.alpha, jnp.zeros((), draw.dtype), axes=1)
    t = jax.random.gamma(gamma_key, alpha, draw.shape, jnp.result_type(alpha, draw.dtype)) / alpha
    return _rbf(RBF(kernel.lengthscale), draw._replace(rng_key=normal_key)) * safe_sqrt(t)[..., None]


def _periodic(kernel: Periodic, draw: Draw) -> Array:
    shape = (*draw.shape, len(draw.columns))
    like = jnp.zeros(shape, draw.dtype)
    rate = jnp.broadcast_to(0.5 / jnp.square(per_dimension("lengthscale", kernel.lengthscale, like)), shape)
    up, down = (jax.random.poisson(key, rate, shape) for key in jax.random.split(draw.rng_key))
    return (2 * math.pi) * (up - down).astype(draw.dtype) / per_dimension("period", kernel.period, like)


# (kernel, draw) -> frequencies of shape (*batch, L, n) for the n columns seen.
FREQUENCIES: dict[type, Callable[[Any, Draw], Array]] = {
    RBF: _rbf,
    Matern12: _matern(1),
    Matern32: _matern(3),
    Matern52: _matern(5),
    RationalQuadratic: _rational_quadratic,
    Periodic: _periodic,
}
