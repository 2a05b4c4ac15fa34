r"""The covariance over Gaussian inputs of a kernel with fixed points: the second psi statistic less the product of the first.

.. math:: C_{bmn} = \mathrm{Cov}[k(z_m, x_b), k(x_b, z_n)] = \psi^2_{bmn} - \psi^1_{mb} \psi^1_{nb}, \qquad
    x_b \sim N(\mu_b, \mathrm{diag}(\sigma_b^2)).

Whitening from both sides multiplies rounding errors by the inverse of the jitter. Those of :math:`\psi^2` are as large for an input
that is almost known as for any other, while those of C, computed without the difference, are as small as C: they fall with
:math:`\sigma^2`. The product of the first statistics is whitened as a product, and loses the root only.

With :math:`\delta = \mu - z`, Gaussian factors of precisions p and p' have the covariance :math:`e^{g + g'} (e^\ell - 1)`, where
:math:`e^g` and :math:`e^{g'}` are their expectations and, summed over columns,

.. math:: \ell = \tfrac12 \log(1 + \sigma^4 p p' \varrho) + \sigma^2 \varrho\, p p' \delta \delta'
    - \tfrac12 \sigma^4 \varrho\, p p' (p\, r \delta^2 + p' r' \delta'^2), \qquad
    \varrho = \frac{1}{1 + \sigma^2 (p + p')}, \quad r = \frac{1}{1 + \sigma^2 p}.

A linear factor :math:`a x` has the mean :math:`\alpha` under the distribution tilted by its own Gaussian factor, and the other
factor moves it by :math:`\varepsilon = -a \sigma^2 \varrho\, p' (\delta' - \sigma^2 r p\, \delta)`. So two linear factors add
:math:`\alpha \varepsilon' + \varepsilon \alpha' + \varepsilon \varepsilon' + \sigma^2 \varrho\, a a'` to the product
:math:`\alpha \alpha'`, again without differences.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_orthgp.kernels.expectations import (
    by_quadrature,
    contract,
    covariances,
    equal_columns,
    gram_of_nodes,
    prepare,
)
from numpyro_orthgp.kernels.terms import Term, add
from numpyro_orthgp.math.distances import middle_of
from numpyro_orthgp.math.products import matmul
from numpyro_orthgp.types import Array, ArrayLike, KernelLike, NumPoints

__all__ = ["psi2_centred"]

# Taylor's series of (exp(x) - 1) / x, highest power first, exact to rounding below; XLA's expm1 takes ten times as long as its exp.
_NEAR = 1 / 16
_EXPM1 = [1 / math.factorial(n) for n in range(9, 0, -1)]


def psi2_centred(
    kernel: KernelLike, Z: ArrayLike, loc: ArrayLike, scale: ArrayLike, first: Array, *, num_points: NumPoints = None
) -> Array:
    """Covariances of the kernel with fixed points over each input; positive semidefinite, zero where the input is known.

    :param kernel: as for :func:`~numpyro_orthgp.kernels.expectations.psi2`, like the other parameters and the errors raised.
    :param first: :func:`~numpyro_orthgp.kernels.expectations.psi1`, shape (M, B).
    :return: shape (B, M, M).
    """
    Z, loc, scale, expansion = prepare(kernel, Z, loc, scale)
    if expansion is None:

        def centred(w: Array, X: Array) -> Array:
            return gram_of_nodes(w, covariances(kernel, Z, X) - first[:, None])

        return by_quadrature(centred, loc, scale, num_points, len(Z))
    origin = middle_of(Z)  # so that rounding is relative to the spread of the points
    factors = [_factor(term, Z, origin, loc, scale) for term in expansion]
    given = Z - origin, loc - origin, jnp.square(scale)
    total = jnp.zeros((len(loc), len(Z), len(Z)), jnp.result_type(Z, loc, scale))
    for i, s in enumerate(factors):
        total = total + _covariance(s, s, *given)
        for t in factors[:i]:
            cross = _covariance(s, t, *given)
            total = total + cross + (jnp.swapaxes(cross, -1, -2) if cross.ndim else 0)
    return total


class _Factor(NamedTuple):
    """A term at all points, under each input's distribution as its Gaussian factor tilts it.

    :param weight: the term's weight, zero where columns differ that must be equal, shape () or (B, M).
    :param precision: p, shape (D,), or ``None``.
    :param shrunk: r, shape (B, D).
    :param log_mean: the logarithm g of the Gaussian factor's expectation, shape (B, M).
    :param linear: of the linear factor a, shape (M, D), and its mean, shape (B, M); ``None`` without one.
    """

    weight: Array
    precision: Array | None
    shrunk: Array
    log_mean: Array
    linear: tuple[Array, Array] | None


def _factor(term: Term, Z: Array, origin: Array, loc: Array, scale: Array) -> _Factor:
    variance, p = jnp.square(scale), term.precision
    r = jnp.ones_like(loc) if p is None else 1 / (1 + variance * p)
    log_mean, linear = jnp.zeros((len(loc), len(Z)), loc.dtype), None
    if p is not None:
        log_mean = (jnp.log(r).sum(-1)[:, None] - _squares(r * p, Z - origin, loc - origin)) / 2
    if term.slopes:
        slopes = term.slopes[0] * Z
        mean = matmul(r * loc, slopes.T)
        linear = slopes, mean if p is None else mean + matmul(variance * r, (slopes * p * Z).T)
    weight = term.weight * equal_columns(term, Z, loc, scale) if term.equal else term.weight
    return _Factor(weight, p, r, log_mean, linear)


def _squares(A: Array, Z: Array, loc: Array) -> Array:
    """Sum over d of A_bd (loc_bd - Z_md)^2, shape (B, M)."""
    return (A * loc**2).sum(-1)[:, None] - 2 * matmul(A * loc, Z.T) + matmul(A, jnp.square(Z).T)


def _covariance(s: _Factor, t: _Factor, Z: Array, loc: Array, variance: Array) -> Array:
    """The covariance of two terms, shape (B, M, M) or (), from points and inputs relative to the origin."""
    both = add(s.precision, t.precision)
    tau = variance if both is None else variance / (1 + variance * both)
    added = _added(s, t, tau, Z, loc, variance)
    if s.precision is None or t.precision is None:
        if added is None:
            return jnp.zeros((), loc.dtype)
        value = jnp.exp(s.log_mean)[:, :, None] * jnp.exp(t.log_mean)[:, None, :] * added
    else:
        value, together = _excess_and_product(s.log_mean, t.log_mean, _log_ratio(s, t, tau, Z, loc, variance))
        if s.linear is not None:
            value = value * _column(s.linear[1])
        if t.linear is not None:
            value = value * _row(t.linear[1])
        if added is not None:
            value = value + together * added
    return _column(s.weight) * _row(t.weight) * value


@jax.custom_jvp
def _excess_and_product(left: Array, right: Array, log_ratio: Array) -> tuple[Array, Array]:
    """exp(g + g') (exp(l) - 1) and exp(g + g' + l), shape (B, M, M), from g, g' (B, M) and l (B, M, M)."""
    apart = jnp.exp(left)[:, :, None] * jnp.exp(right)[:, None, :]
    together = jnp.exp(left[:, :, None] + right[:, None, :] + log_ratio)
    near = jnp.abs(log_ratio) < _NEAR
    x = jnp.where(near, log_ratio, 0)
    series = jnp.zeros_like(x)
    for a in _EXPM1:  # XLA does not fuse the loop of `polyval`
        series = series * x + a
    return jnp.where(near, apart * x * series, together - apart), together


@_excess_and_product.defjvp
def _jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Any, Any]:
    excess, product = _excess_and_product(*primals)
    moved = tangents[0][:, :, None] + tangents[1][:, None, :]
    return (excess, product), (excess * moved + product * tangents[2], product * (moved + tangents[2]))


def _log_ratio(s: _Factor, t: _Factor, tau: Array, Z: Array, loc: Array, variance: Array) -> Array:
    """The logarithm l of the expected product of two Gaussian factors over the product of their expectations, (B, M, M)."""
    p, q = jnp.asarray(s.precision), jnp.asarray(t.precision)
    A = tau * p * q
    half, along = jnp.sum(A * loc**2, -1)[:, None] / 2, matmul(A * loc, Z.T)
    left, right = (
        half - along - _squares(variance * A * own * r, Z, loc) / 2 for own, r in ((p, s.shrunk), (q, t.shrunk))
    )
    start = jnp.sum(jnp.log1p(variance * A), -1)[:, None, None] / 2
    return start + left[:, :, None] + right[:, None, :] + contract(A, Z, Z)


def _added(s: _Factor, t: _Factor, tau: Array, Z: Array, loc: Array, variance: Array) -> Array | None:
    """What the expected product of linear factors is more than the product of their own expectations, shape (B, M, M)."""
    given = tau, Z, loc, variance
    by_t = by_s = None
    if s.linear is not None and t.precision is not None:
        by_t = _column(_moved(s, t.precision, *given)) + contract(tau * t.precision, s.linear[0], Z)
    if t.linear is not None and s.precision is not None:
        by_s = _row(_moved(t, s.precision, *given)) + contract(tau * s.precision, Z, t.linear[0])
    if s.linear is None or t.linear is None:
        return by_t if by_s is None else by_s
    left, total = _column(s.linear[1]), contract(tau, s.linear[0], t.linear[0])
    if by_t is not None:
        left, total = left + by_t, total + by_t * _row(t.linear[1])
    return total if by_s is None else total + left * by_s


def _moved(s: _Factor, p: Array, tau: Array, Z: Array, loc: Array, variance: Array) -> Array:
    """By how much a Gaussian factor of precision p, with its point at the origin, moves the mean of a linear one, shape (B, M)."""
    assert s.linear is not None
    slopes, along = s.linear[0], tau * p
    moved = -matmul(along * loc, slopes.T)
    if s.precision is None:
        return moved
    back = along * variance * s.shrunk * s.precision
    return moved + matmul(back * loc, slopes.T) - matmul(back, (slopes * Z).T)


def _column(x: Array) -> Array:
    """Of the first term: () stays, (B, M) becomes (B, M, 1)."""
    return x if x.ndim == 0 else x[:, :, None]


def _row(x: Array) -> Array:
    """Of the second term: () stays, (B, M) becomes (B, 1, M)."""
    return x if x.ndim == 0 else x[:, None, :]
