"""Nodes and weights for expectations under standard normal distributions.

**Narrow integrands.** Expectations of log p(y | f) are smooth on the scale of the likelihood, where 20 Gauss-Hermite nodes do if q
is no wider than that. A q ten times as wide has all its nodes on either side of the bends of log p. Where bends are known, nodes
are dense about them (:func:`about_bends`). Where they are not, as with a user's kink, ``check`` measures what the nodes miss,
beside thousands of them. Densities are not smooth: p(y | f) of a large count, or the step of the robust-max where one function is
far better known than another, passes between such nodes. So predictive densities (``math/peaks.py``) and the robust-max have
trapezoidal rules in u for t = t0 + w sinh(u) about peaks or the step, with nodes that are constants for derivatives. An
``integrator`` that is given is taken as it is.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import lax
from jax.scipy.special import log_ndtr, ndtri

from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

__all__ = [
    "NUM_ABOUT_BENDS", "about_bends", "dense_about_zero", "gauss_hermite", "quasi_normal", "rising_edge", "sobol_normal",
    "trapezoidal",
]  # fmt: skip

# Of the rule about a rising edge: where a step begins to count, as a share of how far nodes go; the width of the dense nodes, in
# standard deviations of the step; numbers of Newton's steps and of nodes.
_BEGIN, _WIDTH, _NEWTON, _NODES = 0.8, 3.0, 8, 112


# Of the rule about bends: nodes, how far they go, how far off bends count, and from where on distances between nodes grow no
# more, in standard deviations: less far, by up to _LATER, for a q that is many times as wide as a bend. Bends that are so wide that
# Gauss and Hermite's nodes miss less.
NUM_ABOUT_BENDS = 24
_END, _FAR_OFF, _EVEN, _LATER, _FINEST, _WIDE = 6.0, 8.0, 2.5, 2.0, 3e-7, 1.6


@functools.lru_cache(maxsize=64)
def gauss_hermite(num_points: int, dim: int = 1) -> tuple[np.ndarray, np.ndarray]:
    r"""Tensor Gauss-Hermite rule for :math:`N(0, I)`: exact for polynomials of degree 2 ``num_points`` - 1 in each axis.

    :param num_points: nodes per axis.
    :param dim: number of axes; the rule has ``num_points ** dim`` nodes.
    :return: nodes, shape (num_points ** dim, dim), and weights that sum to one.
    """
    # NumPy's weights overflow where there are some hundreds.
    x, w = (
        np.polynomial.hermite_e.hermegauss(num_points)
        if num_points <= 150
        else scipy.special.roots_hermitenorm(num_points)
    )
    return _tensor(x, w / w.sum(), dim)


@functools.lru_cache(maxsize=64)
def dense_about_zero(num_points: int, reach: float, dim: int = 1) -> tuple[np.ndarray, np.ndarray]:
    r"""Tensor rule for :math:`N(0, I)`, trapezoidal in u for :math:`t = \sinh u`: for integrands that are not smooth, or vary
    within a small part of a standard deviation.

    Where the weight is, its nodes lie three times as dense as those of as many Gauss-Hermite nodes.

    :param reach: how far nodes go, in standard deviations.
    :return: nodes and weights, as of :func:`gauss_hermite`.
    """
    u = np.linspace(-np.arcsinh(reach), np.arcsinh(reach), num_points)
    x, w = np.sinh(u), np.cosh(u) * np.exp(-(np.sinh(u) ** 2) / 2)
    return _tensor(x, w / w.sum(), dim)


@functools.lru_cache(maxsize=64)
def trapezoidal(num_points: int, reach: float, dim: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tensor trapezoidal rule for N(0, I), with even distances.

    :param reach: how far nodes go, in standard deviations.
    :return: nodes and weights, as of :func:`gauss_hermite`.
    """
    x = np.linspace(-reach, reach, num_points)
    w = np.exp(-(x**2) / 2)
    return _tensor(x, w / w.sum(), dim)


def about_bends(mean: Array, scale: Array, first: ArrayLike, last: ArrayLike, width: ArrayLike) -> tuple[Array, Array]:
    r"""Nodes and weights for expectations of a function that bends at some places only, however wide the normal distribution is.

    The trapezoidal rule in u for :math:`t = p + \kappa \operatorname{asinh}\big(\tfrac{\omega}{\kappa} x(u)\big)`, where
    :math:`x = \tanh u \sqrt{\cosh^2 u + d^2}` is half the way between the inverses of :math:`\operatorname{asinh}(x \pm d)`. So
    distances are about :math:`\omega` where the function bends, grow with the distance from there, and are even where they are as
    wide as the normal density needs. Where bends are nearly as wide as it is, the nodes are those of Gauss and Hermite.

    :param mean: mean of the normal distribution.
    :param scale: its standard deviation.
    :param first: the first place at which the function bends; it broadcasts against ``mean``.
    :param last: the last such place.
    :param width: the scale on which it does.
    :return: standard-normal t, and weights that sum to one, with an axis of nodes in front. They are constants for derivatives.
    """
    one, dtype = first is last, mean.dtype
    mean, scale, first, last, width = (
        lax.stop_gradient(jnp.asarray(x, dtype)) for x in jnp.broadcast_arrays(mean, scale, first, last, width)
    )
    scale = jnp.maximum(scale, jnp.finfo(dtype).tiny)
    low, high = (jnp.clip((x - mean) / scale, -_FAR_OFF, _FAR_OFF) for x in (first, last))
    width = width / scale
    even = _EVEN + _LATER * jnp.minimum(width / _EVEN, 1)
    share = jnp.clip(width / even, _FINEST, 1)
    p, d = (low + high) / 2, jnp.sinh((high - low) / 2 / even) / share

    def place(t: float) -> Array:
        x = jnp.sinh((t - p) / even) / share
        return jnp.arcsinh(x) if one else (jnp.arcsinh(x + d) + jnp.arcsinh(x - d)) / 2

    start, end = place(-_END), place(_END)
    u = start + (end - start) * jnp.linspace(0, 1, NUM_ABOUT_BENDS, dtype=dtype).reshape(-1, *(1,) * mean.ndim)
    up = jnp.exp(u)
    down = 1 / up
    cosh = (up + down) / 2
    root = cosh if one else jnp.sqrt(cosh**2 + d**2)
    x = (up - down) / 2 if one else (up - down) / (up + down) * root
    slope = cosh if one else (cosh**2 + (d / cosh) ** 2) / root
    y = share * x
    length = jnp.sqrt(1 + y**2)
    t = p + even * jnp.sign(y) * jnp.log(jnp.abs(y) + length)
    weights = jnp.exp(-(t**2) / 2) * slope / length
    nodes, masses = (
        jnp.asarray(a.reshape(u.shape[0], *(1,) * mean.ndim), dtype) for a in gauss_hermite(NUM_ABOUT_BENDS)
    )
    narrow = width >= _WIDE
    return jnp.where(narrow, nodes, t), jnp.where(narrow, masses, weights / weights.sum(0))


def _tensor(x: np.ndarray, w: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    nodes = np.stack(np.meshgrid(*[x] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    weights = np.stack(np.meshgrid(*[w] * dim, indexing="ij"), axis=-1).reshape(-1, dim).prod(-1)
    return nodes, weights


def rising_edge(shift: Array, slope: Array) -> tuple[Array, Array, Array]:
    r"""Nodes t and weights for integrals over the line of :math:`\phi(t) \prod_j \Phi(a_j + b_j t)`, however steep the factors.

    The product climbs from nothing to one, in steps of widths :math:`1 / b_j`. A step far below that of another factor is cut off
    by it, and what is not cut off lies within a few of its own widths of the lowest step that counts. So the trapezoidal rule in u
    for :math:`t = t_0 + w \sinh u` sees all of them, with :math:`t_0` and w the place and the width of that lowest step: those of
    the parabola through :math:`\ell(t) = \log \Phi(t) + \sum_j \log \Phi(a_j + b_j t)` where it begins to count. That is where
    :math:`\ell` has a value far below zero; Newton's steps from the left go there without ever passing it, since it is concave.

    :param shift: a, the factors along the last axis.
    :param slope: b >= 0, of the same shape.
    :return: t_0, shape of the others; t - t_0, in which steep factors are exact where t is not, and weights, with an axis of nodes
        in front of it. All are constants for derivatives.
    """
    a, b = (lax.stop_gradient(x) for x in (shift, slope))
    # The normal density itself goes as one more factor: it too keeps the nodes from beginning too early.
    a = jnp.concatenate([a, jnp.zeros_like(a[..., :1])], -1)
    b = jnp.concatenate([b, jnp.ones_like(b[..., :1])], -1)
    finfo = jnp.finfo(a.dtype)
    end = math.sqrt(-2 * math.log(finfo.eps))  # where the density has fallen to rounding
    begin = _BEGIN * end
    lowest = log_ndtr(jnp.asarray(-begin, a.dtype))

    def derivatives(t: Array) -> tuple[Array, Array, Array]:
        z = jnp.maximum(a + b * t[..., None], -2 * end)
        value = log_ndtr(z)
        hazard = jnp.exp(-(z**2) / 2 - value - 0.5 * math.log(2 * math.pi))
        return value.sum(-1), (b * hazard).sum(-1), (b**2 * hazard * jnp.maximum(hazard + z, 0)).sum(-1)

    def newton(_: int, t: Array) -> Array:
        value, slope, _curvature = derivatives(t)
        return jnp.minimum(t + jnp.maximum(lowest - value, 0) / slope, end)

    start = ((-begin - a) / jnp.maximum(b, finfo.tiny)).max(-1)  # one factor alone is as low there
    first = lax.fori_loop(0, _NEWTON, newton, jnp.minimum(start, end))
    _, slope, curvature = derivatives(first)
    middle = jnp.minimum(first + slope / curvature, end)
    width = _WIDTH / jnp.sqrt(curvature)
    low = -jnp.arcsinh((middle - first) / (_BEGIN * width))
    high = jnp.arcsinh((end - middle) / width)
    u = low + (high - low) * jnp.linspace(0, 1, _NODES, dtype=a.dtype).reshape(-1, *(1,) * low.ndim)
    return middle, width * jnp.sinh(u), width * jnp.cosh(u) * (high - low) / (_NODES - 1)


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


def sobol_normal(num_points: int, dim: int, dtype: jnp.dtype) -> Array:
    """Sobol points, put into the middles of their cells and mapped to standard normals, the same each time.

    :return: shape (num_points, dim).
    """
    cells = 2 ** math.ceil(math.log2(num_points))
    return ndtri(jnp.asarray(_sobol(num_points, dim) + 0.5 / cells, dtype))


@functools.lru_cache(maxsize=64)
def _sobol(num_points: int, dim: int) -> np.ndarray:
    log2 = int(np.ceil(np.log2(num_points)))
    return scipy.stats.qmc.Sobol(dim, scramble=False).random_base2(log2)[:num_points]
