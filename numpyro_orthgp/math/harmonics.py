r"""Spherical harmonics in any dimension, and the spectra of arc-cosine kernels.

On the unit sphere of :math:`R^d` with its uniform probability measure. :math:`P_l` is the Gegenbauer polynomial of index
:math:`(d - 2) / 2` and degree l, scaled to :math:`P_l(1) = 1`, and :math:`N_l` the number of harmonics of degree l; orthonormal
ones obey the addition theorem :math:`\sum_k \phi_{lk}(x) \phi_{lk}(y) = N_l P_l(x \cdot y)`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array

__all__ = ["arc_cosine_eigenvalue", "gegenbauer", "harmonics", "num_harmonics", "zonal_basis"]


def num_harmonics(degree: int, dim: int) -> int:
    """The number N_l of independent harmonics of a degree on the unit sphere of R^dim, ``dim`` >= 2."""
    return math.comb(degree + dim - 1, dim - 1) - (math.comb(degree + dim - 3, dim - 1) if degree > 1 else 0)


def gegenbauer(degree: int, dim: int, t: Any) -> Any:
    """The polynomial P_l at ``t``, elementwise, by its three-term recurrence."""
    previous, current = 1 + 0 * t, t
    if degree == 0:
        return previous
    for l in range(1, degree):
        previous, current = current, ((2 * l + dim - 2) * t * current - l * previous) / (l + dim - 2)
    return current


@functools.lru_cache(maxsize=256)
def zonal_basis(degree: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Directions :math:`\eta_j` and a matrix W with which :math:`W P_l(\eta x)` are orthonormal harmonics.

    The zonal functions :math:`N_l P_l(\eta_j \cdot x)` have the inner products :math:`N_l P_l(\eta_i \cdot \eta_j)` (Dutordoir
    et al. 2020). A Cholesky factor with pivots picks N_l directions that make these well conditioned out of many random
    ones, always the same.

    :return: directions, shape (N_l, dim), and W, shape (N_l, N_l), lower triangular; float64.
    """
    num = num_harmonics(degree, dim)
    candidates = np.random.default_rng(0).normal(size=(max(10 * num, 200), dim))
    candidates /= np.linalg.norm(candidates, axis=-1, keepdims=True)
    rows, chosen, residual = np.zeros((num, len(candidates))), [], np.ones(len(candidates))
    for i in range(num):
        pivot = int(residual.argmax())
        column = gegenbauer(degree, dim, candidates @ candidates[pivot])
        rows[i] = (column - rows[:i, pivot] @ rows[:i]) / np.sqrt(residual[pivot])
        residual -= rows[i] ** 2
        chosen.append(pivot)
    points = candidates[chosen]
    root = np.linalg.cholesky(gegenbauer(degree, dim, points @ points.T))
    return points, np.sqrt(num) * np.tril(np.linalg.inv(root))


def harmonics(degree: int, directions: Array) -> Array:
    """Orthonormal harmonics of a degree.

    :param directions: unit vectors, shape (..., B, d).
    :return: shape (..., N_l, B).
    """
    points, weights = (jnp.asarray(a, directions.dtype) for a in zonal_basis(degree, directions.shape[-1]))
    cosines = matmul(points, directions.swapaxes(-1, -2))
    return matmul(weights, gegenbauer(degree, directions.shape[-1], cosines))


def arc_cosine_eigenvalue(degree: int, dim: int, order: int) -> float:
    r"""The eigenvalue :math:`\lambda_l` of the arc-cosine kernel of an order, on the sphere.

    In :math:`k(x, y) = \sum_l \lambda_l \sum_k \phi_{lk}(x) \phi_{lk}(y)`. The kernel is :math:`2 E_w[\sigma(w \cdot x)
    \sigma(w \cdot y)]`, :math:`\sigma(a) = \max(0, a)^n`, w standard normal, so :math:`\lambda_l = 2 E|w|^{2n} \sigma_l^2` with
    the coefficients :math:`\sigma_l` of :math:`\sigma` (Funk-Hecke), in closed form by Rodrigues' formula (Bach 2017, App.
    D). Zero, exactly, for degrees above n of the same parity.

    :param order: n, 0, 1 or 2.
    """
    norm = {0: 1, 1: dim, 2: dim * (dim + 2)}[order]  # E|w|^2n
    if degree <= order:
        # P_l in powers of t, and integrals of those over half of the sphere.
        powers = {0: {0: 1.0}, 1: {1: 1.0}, 2: {2: dim / (dim - 1), 0: -1 / (dim - 1)}}[degree]
        return 2 * norm * sum(c * _half_moment(order + a, dim) for a, c in powers.items()) ** 2
    j, remainder = divmod(degree - order - 1, 2)
    if remainder:
        return 0.0
    log = math.lgamma(dim / 2) + math.lgamma(2 * j + 1) - math.lgamma(j + 1) - math.lgamma(degree - j + (dim - 1) / 2)
    return 2 * norm * (math.factorial(order) / math.sqrt(math.pi) * math.exp(log - degree * math.log(2))) ** 2


def _half_moment(power: int, dim: int) -> float:
    """The integral of max(0, t)^power, t one coordinate on the sphere."""
    return math.gamma(dim / 2) * math.gamma((power + 1) / 2) / (2 * math.sqrt(math.pi) * math.gamma((power + dim) / 2))
