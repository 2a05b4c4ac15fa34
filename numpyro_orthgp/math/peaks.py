r"""The logarithm of E[p(t)], t ~ N(0, 1), of densities that may be far narrower than the normal one, or far from its middle.

Trapezoidal rules in u for :math:`t = t_k + w_k \sinh u` about peaks :math:`t_k` of :math:`p(t) \phi(t)`, with half-widths
:math:`w_k`. They are as fine as a peak there, and coarser with the distance from it, where Gauss-Hermite nodes would pass between a
narrow peak. A density has several peaks where the output does not tell f, as f^2 + noise does not, or heavy tails stand beside q.
So the integrand is divided: the part :math:`\rho_k^8 / \sum_l \rho_l^8` of it belongs to peak k, where
:math:`\rho_k = (w_k^2 + (t - t_k)^2)^{-1/2}` is how dense its nodes are. These parts are smooth, and sum to one.

On two axes it is such a rule for each of many parallel rows, so that those of a narrow ridge find it, and only where two
Gauss-Hermite rules differ. Rows must be across the ridge, or at an angle to it, so four directions are tried. The ridges of a
product, two branches of a hyperbola, run along both axes, and rows across the diagonal meet both of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.scipy.special import logsumexp

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.math.quadrature import gauss_hermite
from numpyro_orthgp.types import Array

__all__ = ["AGREES", "ORDERS", "log_normal_expectation", "log_plane_expectation", "some_differ"]

LogDensity = Callable[[Array], Array]

# Where peaks may be, or one alone, how far nodes go beyond, and how narrow they may be (the logarithm), in standard deviations.
_FARTHEST, _FARTHEST_ALONE, _REACH, _LOG_NARROWEST = 50.0, 1e4, 10.0, -18.0
# The number of nodes on either side of a peak; of points, sections and bisections that look for peaks and their widths.
_HALF, _GRID, _FEWER, _SECTIONS, _BISECTIONS = 64, 129, 65, 40, 12
_LOWEST = 45.0  # by how much a peak that counts is lower than the highest, at most
_GOLDEN = (math.sqrt(5) - 1) / 2
ORDERS, AGREES = (20, 31), 2.0**-16  # of two Gauss-Hermite rules, and where they are believed
_ROWS, _LAST_ROW = 65, 8.0  # of a plane, and how far they go
_TURNS, _PEAKS = 4, 2  # directions of rows, and peaks in a row


def log_normal_expectation(
    log_density: LogDensity, shape: tuple[int, ...], dtype: jnp.dtype, peaks: int = 1, *, log_concave: bool = False
) -> Array:
    """log E[p(t)], t ~ N(0, 1). Nodes are constants for derivatives.

    :param log_density: log p elementwise, from t of the given shape, or of several more axes in front.
    :param peaks: how many peaks count, of those that a grid shows.
    :param log_concave: whether log p is known to be concave. Then there is one peak, which fewer densities find, and further away.
    :return: the logarithm, of that shape.
    """
    found = _only_peak(log_density, shape, dtype) if log_concave else _peaks(log_density, shape, dtype, peaks)
    peak = lax.stop_gradient(found)
    top = log_density(peak)
    width = lax.stop_gradient(_half_width(log_density, peak, top))
    height = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    # What nodes of each must see. A peak alone falls as fast as phi, or faster.
    others = jnp.abs(jnp.stack([peak, peak - peak.max(0), peak - peak.min(0)])).max(0)
    limit = jnp.arcsinh((_REACH + (0 if log_concave else others)) / width)
    least = 2 * math.log(jnp.finfo(dtype).eps)

    def relative(t: Array) -> Array:
        # Differences first: beside a large log density half a square would be rounded away.
        return log_density(t) - height + (peak - t) * (peak + t) / 2

    def log_slope(u: Array, t: Array) -> Array:
        """log of the derivative of t by u, and of the part of the integrand that belongs to this peak."""
        own = width * jnp.cosh(u)
        if len(peak) == 1:
            return jnp.log(own)
        shares = (own[:, None] ** 2 / (width**2 + (t[:, None] - peak) ** 2)) ** 4
        return jnp.log(own) - jnp.log(shares.sum(1))

    def add(total: Array, share: Array) -> tuple[Array, None]:
        u = share * limit
        t = peak + width * jnp.sinh(u)
        slope = log_slope(u, t)
        # Far out derivatives may be infinite, and a weight that has vanished would make them NaN.
        counts = lax.stop_gradient(relative(t)) + slope - jnp.log(width) >= least
        value = relative(jnp.where(counts, t, peak)) + slope
        return jnp.logaddexp(total, jnp.where(counts, value, jnp.finfo(dtype).min)), None

    # One node after the other: an array of all would have many times the size of the result. The peak, a node itself, begins.
    shares = jnp.linspace(0, 1, _HALF + 1, dtype=dtype)[1:]
    start = top - height + log_slope(jnp.zeros_like(peak), peak)
    total, _ = lax.scan(add, start, jnp.concatenate([-shares, shares]))
    # An output that is impossible. Until here it was finite, as jax_debug_infs wants.
    total = jnp.where(total <= jnp.finfo(dtype).min, -jnp.inf, total)
    parts = total + height - peak**2 / 2 + jnp.log(limit / _HALF)
    return logsumexp(parts, axis=0) - 0.5 * math.log(2 * math.pi)


def log_plane_expectation(log_density: LogDensity, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """log E[p(t)], t ~ N(0, I) on two axes. Within ``vmap`` it is that of 31 Gauss-Hermite nodes on each, so draws cost little.

    :param log_density: log p, from t of the given shape and a last axis of two, or of several more axes in front.
    :return: the logarithm, of that shape.
    """
    first, second = (_by_gauss_hermite(log_density, shape, dtype, order) for order in ORDERS)
    rounding = 8 * jnp.finfo(dtype).eps * jnp.abs(second)
    agree = lax.stop_gradient(jnp.abs(first - second) <= AGREES + rounding)
    if is_concrete(agree) and np.all(agree):
        return second
    fine = lambda: jnp.where(agree, second, _by_rows(log_density, shape, dtype))  # noqa: E731
    return lax.cond(some_differ(agree), fine, lambda: second)


@custom_vmap
def some_differ(agree: Array) -> Array:
    """Whether one is false; within ``vmap`` no, so that ``cond`` leaves out what many draws would pay for."""
    return ~agree.all()


@some_differ.def_vmap
def _none_of_many(axis_size: int, in_batched: list[bool], agree: Array) -> tuple[Array, bool]:
    # `vmap` would compute both branches of `cond` for each of many draws.
    return jnp.zeros((), bool), False


def _by_rows(log_density: LogDensity, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Rows along several directions, by the trapezoidal rule; of the results that which half of the rows change least."""
    along, across = (jnp.asarray(a, dtype).reshape(-1, *(1,) * len(shape), 2) for a in _directions())

    def of_row(s: Array) -> Array:
        rows = (len(along), *shape)
        return log_normal_expectation(lambda t: log_density(t[..., None] * along + s * across), rows, dtype, _PEAKS)

    s, step = np.linspace(-_LAST_ROW, _LAST_ROW, _ROWS, retstep=True)
    weights = jnp.asarray(-(s**2) / 2 + math.log(step) - 0.5 * math.log(2 * math.pi), dtype).reshape(
        -1, *(1,) * (1 + len(shape))
    )
    values = lax.map(of_row, jnp.asarray(s, dtype)) + weights
    total, of_half = logsumexp(values, axis=0), logsumexp(values[::2], axis=0) + math.log(2)
    change = lax.stop_gradient(jnp.abs(total - of_half))
    return jnp.take_along_axis(total, change.argmin(0)[None], 0)[0]


def _directions() -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors along rows, and at right angles to them."""
    angles = np.pi * np.arange(_TURNS) / _TURNS
    return np.stack([np.cos(angles), np.sin(angles)], -1), np.stack([-np.sin(angles), np.cos(angles)], -1)


def _by_gauss_hermite(log_density: LogDensity, shape: tuple[int, ...], dtype: jnp.dtype, order: int) -> Array:
    nodes, masses = gauss_hermite(order, 2)
    rows = jnp.asarray(nodes.reshape(order, order, *(1,) * len(shape), 2), dtype)
    weights = jnp.asarray(np.log(masses).reshape(order, order, *(1,) * len(shape)), dtype)

    def of_row(row: tuple[Array, Array]) -> Array:
        return logsumexp(log_density(jnp.broadcast_to(row[0], (order, *shape, 2))) + row[1], axis=0)

    return logsumexp(lax.map(of_row, (rows, weights)), axis=0)


def _peaks(log_density: LogDensity, shape: tuple[int, ...], dtype: jnp.dtype, peaks: int) -> Array:
    """Where p(t) phi(t) is largest, with an axis of peaks in front: of the points of a grid, then by sections between neighbours.

    A narrow peak about the output may pass between the points, so the points beside the largest density are another place to look.
    """
    grid = _grid(_GRID, dtype, _FARTHEST)
    lowest = jnp.full(shape, jnp.finfo(dtype).min, dtype)
    places, heights = jnp.full((peaks, *shape), -1), jnp.broadcast_to(lowest, (peaks, *shape))

    def look(i: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        before, last, densest, density, places, heights = found
        log_p = log_density(jnp.broadcast_to(grid[i], shape))
        value = _joint(log_p, grid[i])
        # The point before is a peak if it is higher than both its neighbours. It replaces the lowest of those found.
        better = (last >= before) & (last > value) & (last > heights.min(0))
        replaces = better & (jnp.arange(peaks).reshape(-1, *(1,) * len(shape)) == heights.argmin(0))
        places, heights = jnp.where(replaces, i - 1, places), jnp.where(replaces, last, heights)
        return last, value, jnp.where(log_p > density, i, densest), jnp.fmax(log_p, density), places, heights

    start = (lowest, lowest, jnp.full(shape, _GRID // 2), lowest, places, heights)
    _, _, densest, _, places, heights = lax.fori_loop(0, _GRID, look, start)
    best = jnp.take_along_axis(places, heights.argmax(0)[None], 0)
    index = jnp.concatenate([jnp.where(places < 0, jnp.where(best < 0, densest, best), places), densest[None]])

    places = _between(log_density, grid, index)
    heights = _joint(log_density(places), places)
    best = jnp.take_along_axis(places, heights.argmax(0)[None], 0)
    return jnp.where(heights > heights.max(0) - _LOWEST, places, best)  # not the edge of the grid


def _only_peak(log_density: LogDensity, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """Where p(t) phi(t) is largest if it has one peak, which lies beside the best point of any grid; with an axis of size one."""
    grid = _grid(_FEWER, dtype, _FARTHEST_ALONE)

    def look(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        value = _joint(log_density(jnp.broadcast_to(grid[i], shape)), grid[i])
        return jnp.where(value > best[1], i, best[0]), jnp.maximum(value, best[1])

    start = jnp.full(shape, _FEWER // 2), jnp.full(shape, jnp.finfo(dtype).min, dtype)
    return _between(log_density, grid, lax.fori_loop(0, _FEWER, look, start)[0][None])


def _grid(size: int, dtype: jnp.dtype, farthest: float) -> Array:
    end = math.asinh(farthest / 2)
    return jnp.asarray(2 * np.sinh(np.linspace(-end, end, size)), dtype)


def _between(log_density: LogDensity, grid: Array, index: Array) -> Array:
    """Peaks between the neighbours of points of a grid, by golden sections: of two inner points one was the other's before."""
    low, high = grid[jnp.maximum(index - 1, 0)], grid[jnp.minimum(index + 1, len(grid) - 1)]
    joint = lambda t: _joint(log_density(t), t)  # noqa: E731

    def section(_: int, points: tuple[Array, ...]) -> tuple[Array, ...]:
        low, left, right, high, at_left, at_right = points
        is_left = at_left > at_right
        low, high = jnp.where(is_left, low, left), jnp.where(is_left, right, high)
        new = jnp.where(is_left, high - _GOLDEN * (high - low), low + _GOLDEN * (high - low))
        at_new = joint(new)
        left, right = jnp.where(is_left, new, right), jnp.where(is_left, left, new)
        at_left, at_right = jnp.where(is_left, at_new, at_right), jnp.where(is_left, at_left, at_new)
        return low, left, right, high, at_left, at_right

    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    low, *_, high, _, _ = lax.fori_loop(0, _SECTIONS, section, (low, left, right, high, joint(left), joint(right)))
    return 0.5 * (low + high)


def _half_width(log_density: LogDensity, peak: Array, top: Array) -> Array:
    """The distance from its peak, at most 1, at which p(t) phi(t) is lower by sqrt(e), by bisection of its logarithm."""
    lower = _joint(top, peak) - 0.5

    def bisect(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        near, far = ends
        middle = 0.5 * (near + far)
        distance = jnp.exp(middle)
        t = jnp.stack([peak - distance, peak + distance])
        is_far = _joint(log_density(t), t).min(0) < lower
        return jnp.where(is_far, near, middle), jnp.where(is_far, middle, far)

    ends = (jnp.full_like(peak, _LOG_NARROWEST), jnp.zeros_like(peak))
    return jnp.exp(lax.fori_loop(0, _BISECTIONS, bisect, ends)[1])


def _joint(log_p: Array, t: Array) -> Array:
    value = log_p - 0.5 * t**2
    return jnp.where(jnp.isnan(value), jnp.finfo(value.dtype).min, value)
