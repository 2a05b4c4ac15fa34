"""Nodes and weights for expectations under standard normal distributions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["gauss_hermite", "quasi_normal"]


@functools.lru_cache(maxsize=64)
def gauss_hermite(num_points: int, dim: int = 1) -> tuple[np.ndarray, np.ndarray]:
    r"""Tensor Gauss-Hermite rule for :math:`N(0, I)`: exact for polynomials of degree 2 ``num_points`` - 1 in each axis.

    :param num_points: nodes per axis.
    :param dim: number of axes; the rule has ``num_points ** dim`` nodes.
    :return: nodes, shape (num_points ** dim, dim), and weights that sum to one.
    """
    x, w = np.polynomial.hermite_e.hermegauss(num_points)
    nodes = np.stack(np.meshgrid(*[x] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    weights = np.stack(np.meshgrid(*[w / w.sum()] * dim, indexing="ij"), axis=-1).reshape(-1, dim).prod(-1)
    return nodes, weights


def quasi_normal(rng_key: PRNGKey, num_points: int, shape: tuple[int, ...], dim: int, dtype: jnp.dtype) -> Array:
    """Randomly shifted Sobol points, mapped to standard normals: unbiased, and far less noisy than plain draws.

    :param num_points: number of points; a power of two keeps the balance of the sequence.
    :param shape: batch shape; each of its entries gets a shift of its own.
    :param dim: number of axes.
    :return: shape (num_points,) + shape + (dim,).
    """
    base = jnp.asarray(_sobol(num_points, dim), dtype).reshape((num_points,) + (1,) * len(shape) + (dim,))
    u = base + jax.random.uniform(rng_key, (*shape, dim), dtype)
    # Keep clear of 0 and 1, where the normal quantile is infinite.
    tiny = jnp.finfo(dtype).eps
    return ndtri(jnp.clip(u - jnp.floor(u), tiny, 1 - tiny))


@functools.lru_cache(maxsize=64)
def _sobol(num_points: int, dim: int) -> np.ndarray:
    from scipy.stats import qmc

    log2 = int(np.ceil(np.log2(num_points)))
    return qmc.Sobol(dim, scramble=False).random_base2(log2)[:num_points]
