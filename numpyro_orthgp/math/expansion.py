r"""Weighted sums of a function of distance, :math:`\sum_j k(|a_i - b_j|^2) w_j`, with derivatives by thin products.

Such sums are the mean of a decoupled Gaussian process at many points. As they are linear in the weights, the slopes
:math:`k'` enter derivatives through products with the few columns of the factors of :math:`|a_i - b_j|^2` alone; chaining the
derivatives of the matrix :math:`k` and of the sum takes several more passes over arrays of its size.

A kernel's ``weighted_sum`` is that product. A factor in front of a kernel stays in front of the sum. A kernel that does not say
otherwise sums over its matrix. Covariances with mean-only points are needed only times their weights; docs/results.md has what
this saves beside peers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.math.blocks import keep
from numpyro_orthgp.math.linalg import clip_rounding
from numpyro_orthgp.math.products import combine, matmul, plain_matmul, transpose
from numpyro_orthgp.types import Array

__all__ = ["weighted_profile"]


def weighted_profile(profile: Partial, left: Array, right: Array, weights: Array) -> Array:
    r"""Weighted sums over j of the profile of :math:`q_{ij}`, q the product of ``left`` transposed with ``right``.

    :param profile: an elementwise function; derivatives for its arrays are taken too.
    :param left: shape (..., R, n), a factor of squared distances; see :func:`~numpyro_orthgp.math.distances.distance_factors`.
    :param right: shape (..., R, m), the other.
    :param weights: shape (..., m).
    :return: shape (..., n).
    """
    return keep(_weighted_profile(profile, left, right, weights))


@jax.custom_jvp
def _weighted_profile(profile: Partial, left: Array, right: Array, weights: Array) -> Array:
    return combine(weights, profile(_squared_distance(right, left)))


@_weighted_profile.defjvp
def _weighted_profile_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    profile, left, right, weights = primals
    dprofile, dleft, dright, dweights = tangents
    q = _squared_distance(right, left)  # (..., m, n)
    values, slopes = jax.jvp(profile, (q,), (jnp.ones_like(q),))
    _, dvalues = jax.jvp(lambda k: k(q), (profile,), (dprofile,))
    weighted, dweighted = (weights[..., None, :] * factor for factor in (right, dright))
    change = jnp.sum(dleft * matmul(weighted, slopes) + left * plain_matmul(dweighted, slopes), axis=-2)
    change += combine(dweights, values) + jnp.sum(dvalues * weights[..., None], axis=-2)
    return _weighted_profile(*primals), change


def _squared_distance(left: Array, right: Array) -> Array:
    return clip_rounding(plain_matmul(transpose(left), right))
