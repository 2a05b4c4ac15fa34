"""Logarithms of probabilities that are precise even where probabilities are not: in tails, in float32, and in derivatives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax import lax

from numpyro_orthgp.math.linalg import safe_sqrt
from numpyro_orthgp.types import Array, ArrayLike

__all__ = [
    "binomial_top", "branches", "expected_log1p_square", "expm1", "folded_mean", "gamma_exponent", "log1mexp", "log_binomial",
    "log_gamma_spread", "log_gammaincc", "log_half_laplace", "log_largest", "log_ndtr", "log_ndtr_difference", "log_ndtr_scaled",
    "log_rising", "log_tilted", "positive_part_mean", "standardize", "stirling",
]  # fmt: skip

LOG_TWO = math.log(2)
LOG_ROOT_TWO_PI = math.log(2 * math.pi) / 2
# (zeta(n) - 1) (-1)^n (2^n - 2) / n, highest n first, down to n = 2; zeta by its first terms and Euler-Maclaurin
_N = np.arange(46.0, 1, -1)
_ZETA = (np.arange(2.0, 1000) ** -_N[:, None]).sum(1) + 1000**-_N * (1000 / (_N - 1) + 1 / 2 + _N / 12_000)
_ZETA = _ZETA * (-1) ** _N * (2**_N - 2) / _N
# (2n - 1)!! (-1)^n, highest n first, of the asymptotic series of the normal distribution function
_SERIES = np.append(np.cumprod(-np.arange(1.0, 17, 2))[::-1], 0.0)


# Of the shifted line of integration: the shift at most, distance of nodes, how far they go.
_SHIFT, _STEP, _REACH = 2.0, 0.5, 7.0


def expected_log1p_square(loc: Array, scale: Array) -> Array:
    r"""E[log(1 + x^2)] for x ~ N(loc, scale^2), however large the scale is, where Gauss-Hermite nodes miss the peak at zero.

    It is :math:`2 \operatorname{Re} E[\log(1 + i x)]`, whose integrand has its only singularity at x = i. So with :math:`t - i c`
    in place of t in x = loc + scale t the integral is the same, and the singularity is further away: by c. The trapezoidal rule
    has an error like exp(-2 pi (c + 1 / scale) / step). For a small scale c falls with it, so that no large terms cancel.

    :return: the shape to which both broadcast.
    """
    loc, scale = jnp.broadcast_arrays(loc, scale)
    nodes = np.arange(-_REACH, _REACH + _STEP / 2, _STEP)
    weights = jnp.asarray(_STEP * np.exp(-(nodes**2) / 2) / math.sqrt(2 * math.pi), loc.dtype)
    t = jnp.asarray(nodes, loc.dtype).reshape(-1, *(1,) * loc.ndim)
    c = lax.stop_gradient(_SHIFT * scale / (1 + scale))
    real, imaginary = c * scale, loc + scale * t
    log_square = jnp.log1p(real * (2 + real) + imaginary**2)
    values = jnp.cos(c * t) * log_square - 2 * jnp.sin(c * t) * jnp.arctan2(imaginary, 1 + real)
    return jnp.exp(c**2 / 2) * jnp.tensordot(weights, values, 1)


def branches(x: Array, at: ArrayLike) -> tuple[Array, Array, Array]:
    """Whether x < ``at``, and x for the formulas below and above ``at``, each clipped to its own range.

    So NaN from the formula that is not used cannot reach a derivative. ``minimum`` and ``maximum`` would do the same, but halve
    the derivative at ``at`` itself.
    """
    below = x < at
    return below, jnp.where(below, x, at), jnp.where(below, at, x)


def expm1(x: Array) -> Array:
    """exp(x) - 1. JAX's derivative adds one to the value again, which leaves no digits of exp(x) far below zero."""
    below, low, near = branches(x, -1.0)
    return jnp.where(below, jnp.exp(low) - 1, jnp.expm1(near))


def _log_mills(x: Array) -> Array:
    """log(Phi(x) exp(x^2 / 2)) for x far below zero, by the asymptotic series."""
    return jnp.log1p(jnp.polyval(jnp.asarray(_SERIES, x.dtype), 1 / x**2)) - jnp.log(-x) - LOG_ROOT_TWO_PI


def _far(x: Array) -> float:
    # short of where JAX goes over to a series of three terms only
    return -18.0 if x.dtype == jnp.float64 else -9.0


def log_ndtr(x: Array) -> Array:
    """log Phi(x). In JAX's version the derivative far below zero is a difference of two numbers of size x^2, and the value for x
    from 1 to 5 the logarithm of a number rounded to nearly one."""
    below, far, near = branches(x, _far(x))
    middle, near, above = branches(near, 1.0)
    inner = jnp.where(middle, jsp.log_ndtr(near), jnp.log1p(-jsp.ndtr(-above)))
    return jnp.where(below, _log_mills(far) - far**2 / 2, inner)


def log_ndtr_scaled(x: Array) -> Array:
    """log(Phi(x) exp(x^2 / 2)): the rest of log Phi(x) below zero after removing its main part, -x^2 / 2."""
    below, far, near = branches(x, _far(x))
    return jnp.where(below, _log_mills(far), jsp.log_ndtr(near) + near**2 / 2)


def log1mexp(x: Array) -> Array:
    """log(1 - exp(-x)) for x > 0 (Maechler 2012)."""
    below, near, far = branches(x, LOG_TWO)
    return jnp.where(below, jnp.log(-jnp.expm1(-near)), jnp.log1p(-jnp.exp(-far)))


def log_ndtr_difference(high: Array, width: Array, open_ended: Array) -> Array:
    """log(Phi(high) - Phi(high - width)) for width > 0; log Phi(high) where ``open_ended``.

    A narrow interval is integrated with five Gauss-Legendre nodes. Other intervals are mirrored to the side with small
    distribution functions. Their ratio is computed from logarithms in which the large squares cancel analytically.
    """
    middle = high - width / 2
    narrow = ~open_ended & (width * (1 + jnp.abs(middle)) < 1)
    inside = _log_narrow(jnp.where(narrow, middle, 0), jnp.where(narrow, width, 1))
    width = jnp.where(open_ended | narrow, 1, width)
    mirrored = ~open_ended & (middle > 0)
    high = jnp.where(mirrored, width - high, high)
    log_ratio = log_ndtr_scaled(high) - log_ndtr_scaled(high - width) - width * (high - width / 2)
    log_share = jnp.where(open_ended, 0, log1mexp(jnp.where(open_ended | narrow, 1, log_ratio)))
    return jnp.where(narrow, inside, log_ndtr(high) + log_share)


def _log_narrow(middle: Array, width: Array) -> Array:
    """log of the integral of the normal density over ``middle`` +- ``width / 2``, relative to the density in the middle."""
    nodes, weights = (a / 2 for a in np.polynomial.legendre.leggauss(5))
    steps = [(float(w), width * float(t)) for t, w in zip(nodes, weights, strict=True)]
    share = sum(w * jnp.exp(-middle * step - step**2 / 2) for w, step in steps)
    return jnp.log(width * share) - middle**2 / 2 - LOG_ROOT_TWO_PI


def standardize(distance: Array, variance: Array) -> tuple[Array, Array]:
    """``distance`` in standard deviations, and the standard deviation, with finite derivatives at variance zero.

    The quotient is clipped, so that its square is finite in float32 too.
    """
    scale = safe_sqrt(variance)
    floor = float(jnp.finfo(scale.dtype).tiny) ** 0.25  # its square still has a finite inverse
    return jnp.clip(distance / jnp.maximum(scale, floor), -1e15, 1e15), scale


def folded_mean(mean: Array, variance: Array) -> Array:
    r"""E|x| for :math:`x \sim N(m, v)`: :math:`\sqrt{2 v / \pi}\, e^{-m^2 / 2v} + m\,\mathrm{erf}(m / \sqrt{2 v})`."""
    z, scale = standardize(mean, variance)
    return scale * math.sqrt(2 / math.pi) * jnp.exp(-(z**2) / 2) + mean * jsp.erf(z / math.sqrt(2))


def positive_part_mean(mean: Array, variance: Array) -> Array:
    r"""E[max(x, 0)] for :math:`x \sim N(m, v)`: :math:`m\, \Phi(m / \sqrt v) + \sqrt v\, \phi(m / \sqrt v)`."""
    z, scale = standardize(mean, variance)
    return mean * jsp.ndtr(z) + scale * jnp.exp(-(z**2) / 2 - LOG_ROOT_TWO_PI)


def log_half_laplace(mean: Array, variance: Array, rate: Array) -> Array:
    r"""log E[exp(-a x); x > 0] for :math:`x \sim N(m, v)`: of :math:`e^{a^2 v / 2 - a m}\, \Phi(m / \sqrt v - a \sqrt v)`."""
    z, scale = standardize(mean, variance)
    negative, low, high = branches(z - scale * rate, 0)
    # Below zero, log Phi is mostly minus half its squared argument. With the other terms this leaves -z^2 / 2.
    below = log_ndtr_scaled(low) - z**2 / 2
    above = log_ndtr(high) - mean * rate + variance * rate**2 / 2
    return jnp.where(negative, below, above)


def _stirling_series(z: Array) -> Array:
    return (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / (1188 * z**2)) / z**2) / z**2) / z**2) / z


def stirling(z: Array, log_z: Array) -> Array:
    r"""The remainder of Stirling's formula: :math:`\log \Gamma(z + 1) - (z + 1/2) \log z + z - \log(2 \pi) / 2`, about 1/12z.

    It avoids subtracting large counts that cancel. ``log_z`` is an argument because it may be finite even if z underflows to zero.
    """
    below, small, large = branches(z, 16.0)
    near = jsp.gammaln(small + 1) - (small + 0.5) * jnp.where(below, log_z, 0) + small - LOG_ROOT_TWO_PI
    return jnp.where(below, near, _stirling_series(large))


def log_tilted(y: Array, rest: Array, log_q: Array, log_not_q: Array, log_p: Array, log_not_p: Array) -> Array:
    r"""log of :math:`(p/q)^y\, ((1 - p)/(1 - q))^r`, where q is the share y / (y + r), given the logarithms.

    For p near q this is a small difference of large terms. There :math:`y \eta - (y + r) \log(1 - q + q e^\eta)` is used, with the
    difference :math:`\eta` of the log odds.
    """
    apart = y * (log_p - log_q) + rest * (log_not_p - log_not_q)
    shift = log_p - log_not_p - (log_q - log_not_q)
    close = jnp.abs(shift) < 1
    mirrored = rest < y  # use the smaller of the two shares
    low = jnp.where(mirrored, rest, y)
    shift = jnp.where(close, jnp.where(mirrored, -shift, shift), 0)
    return jnp.where(close, low * shift - (y + rest) * jnp.log1p(low / (y + rest) * jnp.expm1(shift)), apart)


def binomial_top(y: Array, rest: Array) -> tuple[Array, Array, Array]:
    r"""log q and log(1 - q) of the share q = y / (y + r), and the logarithm of the binomial density of y at p = q (Loader 2000).

    The last is :math:`-\log(2 \pi\, y\, r / (y + r)) / 2` plus remainders of Stirling's formula. If y or r is zero, all are zero.
    """
    inner = (y > 0) & (rest > 0)
    y, rest = jnp.where(inner, y, 1), jnp.where(inner, rest, 1)
    log_y, log_rest, log_n = jnp.log(y), jnp.log(rest), jnp.log(y + rest)
    mirrored = rest < y
    log_low = jnp.where(mirrored, log_rest, log_y) - log_n
    log_high = jnp.log1p(-jnp.where(mirrored, rest, y) / (y + rest))
    log_share, log_other = jnp.where(mirrored, log_high, log_low), jnp.where(mirrored, log_low, log_high)
    remainder = stirling(y + rest, log_n) - stirling(y, log_y) - stirling(rest, log_rest)
    top = remainder - (log_share + log_rest) / 2 - LOG_ROOT_TWO_PI
    return jnp.where(inner, log_share, 0), jnp.where(inner, log_other, 0), jnp.where(inner, top, 0)


def log_binomial(y: Array, rest: Array, log_p: Array, log_not_p: Array) -> Array:
    r"""log of :math:`\binom{y + r}{y} p^y (1 - p)^r` for real y and r; in float32 as accurate for millions as for a few.

    It is :func:`log_tilted` from the share of y to p, plus :func:`binomial_top`.
    """
    inner = (y > 0) & (rest > 0)
    log_share, log_other, top = binomial_top(y, rest)
    edge = jnp.where(y > 0, y * log_p, 0) + jnp.where(rest > 0, rest * log_not_p, 0)
    y, rest = jnp.where(inner, y, 1), jnp.where(inner, rest, 1)
    return jnp.where(inner, log_tilted(y, rest, log_share, log_other, log_p, log_not_p) + top, edge)


def log_rising(a: Array, n: Array) -> Array:
    """log(Gamma(a + n) / Gamma(a)) for n >= 0, also if a is so large that the two cancel (Stirling's series)."""
    below, small, large = branches(a, 30.0)
    remainder = _stirling_series(large + n) - _stirling_series(large)
    far = (large - 0.5) * jnp.log1p(n / large) - n + n * jnp.log(large + n) + remainder
    return jnp.where(below, jsp.gammaln(small + n) - jsp.gammaln(small), far)


def log_gamma_spread(x: Array) -> Array:
    r"""log(Gamma(1 + 2x) / Gamma(1 + x)^2) for x > 0, about :math:`\pi^2 x^2 / 6` for small x.

    Small x use :math:`\log \Gamma(1 + x) = -\log(1 + x) + (1 - \gamma) x + \sum_{n \ge 2} (\zeta(n) - 1) (-x)^n / n`.
    """
    below, near, far = branches(x, 0.5)
    series = near**2 * jnp.polyval(jnp.asarray(_ZETA, x.dtype), near) + jnp.log1p(near**2 / (1 + 2 * near))
    return jnp.where(below, series, jsp.gammaln(1 + 2 * far) - 2 * jsp.gammaln(1 + far))


@jax.custom_jvp
def gamma_exponent(k: Array, u: Array, extra: ArrayLike) -> Array:
    r"""k (1 + d - e^{d + c}) with :math:`d = u - \log k`: of a gamma density at :math:`\log y - f = u`, relative to its peak.

    The derivative by k is d alone, since :math:`k e^d = e^u`. Term by term it would be a difference of two exponentials, which for
    a wide q, or far out in the tail, are so large that d is lost beside them.
    """
    d = u - jnp.log(k)
    return k * (d - expm1(d + extra))


@gamma_exponent.defjvp
def _gamma_exponent_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    k, u, extra = primals
    d = u - jnp.log(k)
    moved = d * tangents[0] - k * expm1(d + extra) * tangents[1] - k * jnp.exp(d + extra) * tangents[2]
    return gamma_exponent(k, u, extra), moved


def log_largest(dtype: Any) -> float:
    """The logarithm of the largest argument that :func:`log_gammaincc` distinguishes from larger ones."""
    return math.log(jnp.finfo(dtype).max) - 10


def log_gammaincc(a: Array, log_x: Array) -> Array:
    r"""The logarithm of the upper incomplete gamma function :math:`\Gamma(a, x) / \Gamma(a)`, with log x given.

    In the tail, two standard deviations above the mean, it uses 32 steps of Legendre's continued fraction (DLMF 8.9.2), whose
    derivatives are correct even if the function itself underflows. Elsewhere the function is above 0.001.
    """
    tail = a + 2 * jnp.sqrt(a) + 1
    finfo = jnp.finfo(jnp.result_type(a, log_x))
    log_x = jnp.clip(log_x, math.log(finfo.tiny) + 2, log_largest(finfo.dtype))
    x = jnp.exp(log_x)
    below, near, far = branches(x, tail)

    def step(i: int, value: Array) -> Array:
        n = 32 - i
        return far + 2 * n - 1 - a + n * (a - n) / value

    fraction = lax.fori_loop(0, 32, step, far + 65 - a)
    # x^a e^-x / Gamma(a), relative to its value at x = a: for large a the terms themselves cancel
    log_a = jnp.log(a)
    log_x = jnp.where(below, jnp.log(tail), log_x)
    top = gamma_exponent(a, log_x, jnp.zeros_like(log_x))
    log_far = top + log_a / 2 - LOG_ROOT_TWO_PI - stirling(a, log_a) - jnp.log(fraction)
    return jnp.where(below, jnp.log(jsp.gammaincc(a, near)), log_far)
