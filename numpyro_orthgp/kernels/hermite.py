r"""Psi statistics as sums of squares, so that they keep their digits in float32.

Let W be the inverse Cholesky factor of the points' covariance. In :math:`W \psi^2 W^\top` the rounding errors of :math:`\psi^2`
are multiplied by the inverse of the jitter. If :math:`\psi^2 = \sum_\alpha c_\alpha c_\alpha^\top` is a sum of outer products, each
factor is whitened separately, and its errors are multiplied by the root of the inverse only. With orthonormal Hermite
polynomials :math:`h_\alpha` and :math:`x = \mu + \sigma \xi`, such factors are

.. math:: c_\alpha = E[h_\alpha(\xi)\, k(Z, x)], \qquad c_0 = \psi^1.

For :math:`\exp(-\frac12 p (x - z)^2)` in one column they are :math:`c_j = c_0 q_j` with :math:`q_0 = 1` and

.. math:: q_{j + 1} = -\frac{r p \sigma (\mu - z) q_j + r p \sigma^2 \sqrt{j}\, q_{j - 1}}{\sqrt{j + 1}},
    \qquad r = 1 / (1 + \sigma^2 p),

and a linear factor x takes :math:`q_j` to :math:`\mu q_j + \sigma (\sqrt{j + 1}\, q_{j + 1} + \sqrt{j}\, q_{j - 1})`. The sum
is cut off at a total degree. Its tail falls like :math:`(r p \sigma^2)^j`, which is fast if inputs are known to less than a
lengthscale. Kernels without a closed form are whitened at their quadrature nodes.

**Jitter under uncertain inputs** is larger by default: 1e-6 in float64 and 1e-4 in float32. In float64 the covariance of k over
each input (:mod:`numpyro_orthgp.kernels.centred`) is whitened as a whole. Its rounding errors grow with the inverse of the jitter,
times N and the signal-to-noise ratio; with known inputs, errors of projections grow with the root of the inverse. In float32,
whitening as a whole left no digits if points were close. So float32 uses the factors above, or quadrature nodes without a closed
form. The remainder of the cut-off counts only in directions above rounding. Such steps take longer, and sums of 50,000 nats are
accurate to one or two nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import comb

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.kernels.expectations import (
    by_quadrature,
    covariances,
    equal_columns,
    gram_of_nodes,
    prepare,
)
from numpyro_orthgp.kernels.terms import Term
from numpyro_orthgp.math.products import PRECISION
from numpyro_orthgp.types import Array, ArrayLike, KernelLike, NumPoints

__all__ = ["hermite_factors", "whitened_spread"]

# Number of factors for each input, and their highest degree.
_MOST_FACTORS = 32
_MOST_DEGREE = 16


def hermite_factors(kernel: KernelLike, Z: ArrayLike, loc: ArrayLike, scale: ArrayLike) -> Array | None:
    """The factors c of :math:`E[k(Z, x) k(x, Z)]`. The first factor is the expectation of k(Z, x).

    :param kernel: as for :func:`~numpyro_orthgp.kernels.expectations.psi2`, like the other parameters and the errors raised.
    :return: shape (S, B, M), with at most 32 factors, or 1 + D if that is more; ``None`` without a closed form.
    """
    Z, loc, scale, expansion = prepare(kernel, Z, loc, scale)
    if expansion is None:
        return None
    degrees = _degrees(loc.shape[-1])
    total = jnp.zeros((len(degrees), len(loc), len(Z)), jnp.result_type(Z, loc, scale))
    for term in expansion:
        total = total + _of_term(term, degrees, Z, loc, scale)
    return total


def whitened_spread(
    kernel: KernelLike, W: Array, Z: Array, loc: Array, scale: Array, first: Array, *, num_points: NumPoints = None
) -> Array:
    """The covariance of W k(Z, x) by quadrature, shape (B, M, M). Each node is whitened separately.

    :param W: shape (M, M).
    :param first: E[k(Z, x)], shape (M, B).
    """

    def centred(w: Array, X: Array) -> Array:
        K = covariances(kernel, Z, X) - first[:, None]
        return gram_of_nodes(w, jnp.einsum("nm,msb->nsb", W, K, precision=PRECISION))

    return by_quadrature(centred, loc, scale, num_points, len(Z))


def _degrees(num_dims: int) -> np.ndarray:
    """The degree of each factor in each column, lowest first, integers of shape (S, D)."""
    degree = 1
    while degree < _MOST_DEGREE and comb(num_dims + degree + 1, num_dims) <= _MOST_FACTORS:
        degree += 1
    found = [np.zeros(num_dims, int)]
    last = {tuple(found[0])}
    for _ in range(degree):
        last = {tuple(np.add(a, e)) for a, e in product(sorted(last), np.eye(num_dims, dtype=int))}
        found.extend(np.array(a) for a in sorted(last, reverse=True))
    return np.stack(found)


def _of_term(term: Term, degrees: np.ndarray, Z: Array, loc: Array, scale: Array) -> Array:
    first, q = _polynomials(term, int(degrees.max()) + 2, Z, loc, scale)
    # Written out, so that gradients need no scatter. Columns without precision and slope have factors of degree zero only.
    if not term.slopes:
        value = jnp.stack([_product(first, [q[n][d] for d, n in enumerate(degree) if n]) for degree in degrees])
    else:
        slopes, shifted = term.slopes[0], _times_input(q, loc, scale)
        linear = [slopes[d] * Z[:, d] for d in range(Z.shape[-1])]
        value = jnp.stack(
            [
                sum(
                    (
                        _product(linear[d] * shifted[n][d], [q[o][e] for e, o in enumerate(degree) if o and e != d])
                        for d, n in enumerate(degree)
                    ),
                    start=jnp.zeros_like(first),
                )
                for degree in degrees
            ]
        )
        value = first * value
    value = term.weight * value
    return value * equal_columns(term, Z, loc, scale) if term.equal else value


def _product(value: Array, factors: Sequence[Array]) -> Array:
    for factor in factors:
        value = value * factor
    return value


def _polynomials(term: Term, num: int, Z: Array, loc: Array, scale: Array) -> tuple[Array, list[Array]]:
    """The expectation of a term's Gaussian factor, shape (B, M), and q for each degree, shape (D, B, M)."""
    away = loc.T[:, :, None] - Z.T[:, None, :]  # (D, B, M)
    scale = scale.T[:, :, None]
    if term.precision is None:
        return jnp.ones_like(away[0]), [jnp.ones_like(away)] + [jnp.zeros_like(away)] * (num - 1)
    p = term.precision[:, None, None]
    r = 1 / (1 + scale**2 * p)
    first = jnp.exp((jnp.log(r) - r * p * away**2).sum(0) / 2)
    slope, shrunk = -r * p * scale * away, -r * p * scale**2
    q = [jnp.ones_like(away), slope]
    for j in range(1, num - 1):
        q.append((slope * q[j] + j**0.5 * shrunk * q[j - 1]) / (j + 1) ** 0.5)
    return first, q


def _times_input(q: Sequence[Array], loc: Array, scale: Array) -> list[Array]:
    """Given the ``q`` of a function, the q of x times this function, up to one degree less."""
    loc, scale = loc.T[:, :, None], scale.T[:, :, None]
    shifted = [loc * q[0] + scale * q[1]]
    for j in range(1, len(q) - 1):
        shifted.append(loc * q[j] + scale * ((j + 1) ** 0.5 * q[j + 1] + j**0.5 * q[j - 1]))
    return shifted
