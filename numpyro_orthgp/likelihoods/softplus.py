r"""Expectations of softplus(f) = log(1 + exp(f)) for Gaussian f, whatever its mean and its variance, in closed form.

Gauss-Hermite nodes lie so far apart where f has a standard deviation of ten or more that they pass over the bend at zero. But

.. math:: \log(1 + e^f) = \max(f, 0) + r(f), \qquad r(f) = \log(1 + e^{-|f|}) \approx \sum_{k=1}^n w_k e^{-k |f|},

since :math:`\log(1 + x)` is nearly a polynomial for x between 0 and 1. The expectation of each term is a scaled error function. All
are positive and all are relative to r, so that small values have as many digits as large ones. Derivatives of softplus are sums
of the same terms, and derivatives of expectations with respect to the moments of f are expectations of derivatives.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from numpyro_orthgp.likelihoods.special import branches
from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.math.quadrature import gauss_hermite
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.types import Array

__all__ = ["expected_sigmoid", "softplus_gap"]

# Numbers of terms, and degrees of the polynomial for the error function, by the bytes of the dtype.
_TERMS, _DEGREE = {4: 12, 8: 20}, {4: 12, 8: 21}
_MIDDLE = 3.75  # of the error function: the argument that the middle of the polynomial's range stands for
_NARROW, _NODES, _POWERS = 0.25, 14, 10  # of small variances: the largest, nodes, terms of cosh
_ROOT_TWO_PI = math.sqrt(2 * math.pi)


@broadcasting
def softplus_gap(mean: Array, variance: Array) -> Array:
    r"""E[softplus(f)] - softplus(E[f]) for :math:`f \sim N(m, v)`, with all digits also where it is small.

    Small variances have Gauss-Hermite nodes for

    .. math:: \tfrac12 E\big[\log\big(1 + 4 \sigma'(m) \sinh^2(t \sqrt v / 2)\big)\big], \qquad t \sim N(0, 1),

    half of the second difference of softplus, since the two expectations would cancel.
    """
    mean, variance = jnp.broadcast_arrays(mean, variance)
    x = jnp.where(mean < 0, mean, -mean)  # the gap is even; -abs would have a second derivative of zero at zero
    narrow, low, high = branches(variance, _NARROW)
    nodes, weights = gauss_hermite(_NODES)
    half = nodes[:, 0] > 0
    a2 = low * jnp.asarray(nodes[half, 0] ** 2, x.dtype).reshape(-1, *(1,) * x.ndim)
    # sinh(a / 2)^2 = (cosh(a) - 1) / 2 in powers of a^2, which has derivatives at zero
    series = jnp.asarray([0.5 / math.factorial(2 * j) for j in range(_POWERS, 0, -1)], x.dtype)
    slope = jnp.exp(x) / (1 + jnp.exp(x)) ** 2
    near = jnp.tensordot(jnp.asarray(weights[half], x.dtype), jnp.log1p(4 * slope * a2 * jnp.polyval(series, a2)), 1)
    return jnp.where(narrow, near, _expected(0, 0, x, high)[0] - jax.nn.softplus(x))


def expected_sigmoid(mean: Array, variance: Array) -> Array:
    r"""E[1 / (1 + exp(-f))] for :math:`f \sim N(m, v)`, with all digits also where it is small."""
    return _expected(1, 1, *jnp.broadcast_arrays(mean, variance))[0]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@broadcasting  # also where it is differentiated later
def _expected(first: int, last: int, mean: Array, variance: Array) -> tuple[Array, ...]:
    """Expectations of the derivatives of softplus from the order ``first`` to ``last``."""
    n = _TERMS[mean.dtype.itemsize]
    k = jnp.arange(n + 1, dtype=mean.dtype).reshape(-1, *(1,) * mean.ndim)
    scale, x = safe_sqrt(variance), jnp.abs(mean)
    z = jnp.minimum(x / jnp.maximum(scale, float(jnp.finfo(x.dtype).tiny) ** 0.25), 1e15)
    density, shift = jnp.exp(-(z**2) / 2), k * scale
    inside = shift < z
    # E[exp(-k f); f > 0] and E[exp(k f); f < 0] of f with mean |m|
    edge, left = density * _half_erfcx(jnp.stack([jnp.abs(shift - z), shift + z]))
    right = jnp.where(inside, jnp.exp(jnp.where(inside, k * (k * variance / 2 - x), 0)) - edge, edge)
    weights = jnp.asarray(_weights(n, first, last), x.dtype)
    even, odd = (jnp.tensordot(weights, terms[1:], 1) for terms in (right + left, right - left))
    below = left[0]  # P(f < 0)
    signs = jnp.where(mean < 0, -1, 1).astype(x.dtype)
    found = []
    for order in range(first, last + 1):
        value = signs * odd[order - first] if order % 2 else even[order - first]
        if order == 0:
            value += scale * density / _ROOT_TWO_PI - x * below + jnp.maximum(mean, 0)
        found.append(value + jnp.where(mean < 0, below, 1 - below) if order == 1 else value)
    return tuple(found)


@_expected.defjvp
def _expected_jvp(first: int, last: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    # The normal density obeys the heat equation: a derivative by the variance is half the second derivative by the mean.
    every = _expected(first, last + 2, *primals)
    by_mean, by_variance = tangents
    num = last - first + 1
    return every[:num], tuple(every[i + 1] * by_mean + every[i + 2] * (by_variance / 2) for i in range(num))


@functools.cache
def _weights(num: int, first: int, last: int) -> np.ndarray:
    """Weights of exp(-k |f|) in derivatives of softplus for f > 0, less that of max(f, 0), shape (orders, num)."""
    # Fitted to the third derivative, x (x - 1) / (1 + x)^3 with x = exp(-f): so it has all digits too, and vanishes at zero.
    k = np.arange(1.0, num + 1)
    third = np.convolve(_polynomial(lambda x: 1 / (1 + x) ** 3, num - 2, (0, 1)), [-1, 1])
    return np.stack([third * (-k) ** (order - 3) for order in range(first, last + 1)])


@functools.cache
def _erfcx_coefficients(degree: int) -> np.ndarray:
    def scaled(t: np.ndarray) -> np.ndarray:
        x = _MIDDLE * (1 + t) / (1 - t)
        return (1 + 2 * x) * scipy.special.erfcx(x)

    return _polynomial(scaled, degree, (-1, 1))[::-1]


def _half_erfcx(z: Array) -> Array:
    """Phi(-z) exp(z^2 / 2) for z >= 0: a polynomial in (x - 3.75) / (x + 3.75) over 1 + 2 x (Shepherd and Laframboise 1981)."""
    x = z * math.sqrt(0.5)
    t = 1 - 2 * _MIDDLE / (x + _MIDDLE)
    c = _erfcx_coefficients(_DEGREE[z.dtype.itemsize]) / 2
    value = jnp.full_like(t, c[0])
    for coefficient in c[1:]:
        value = value * t + float(coefficient)
    return value / (1 + 2 * x)


def _polynomial(function: Any, degree: int, domain: tuple[float, float]) -> np.ndarray:
    """Coefficients of the polynomial through a function at Chebyshev's points, the constant first."""
    found = np.polynomial.Chebyshev.interpolate(function, degree, domain)
    return found.convert(kind=np.polynomial.Polynomial, domain=(-1, 1), window=(-1, 1)).coef
