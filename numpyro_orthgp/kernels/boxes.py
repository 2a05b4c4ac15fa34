r"""Closed-form averages over boxes, for RBF and constant kernels and their sums and products.

Such a kernel is a sum of terms :math:`c \prod_d e^{-p_d (x_d - z_d)^2 / 2}`. Its average over a box is a product over dimensions.
With :math:`g(t) = e^{-p t^2 / 2}`, :math:`G_1' = g` and :math:`G_2' = G_1`,

.. math::
    \int_a^b g(x - z)\, dx = G_1(b - z) - G_1(a - z), \qquad G_1(t) = \sqrt{\tfrac{\pi}{2p}}\, \mathrm{erf}(t \sqrt{p / 2}), \\
    \int_a^b \int_c^d g(x - y)\, dy\, dx = G_2(b - c) - G_2(a - c) - G_2(b - d) + G_2(a - d), \\
    G_2(t) = t\, G_1(t) + g(t) / p .

If a box is narrow compared with the lengthscale, these differences lose all digits. A Gauss-Legendre rule loses none: eight
nodes are exact to 1e-12 up to one lengthscale. So boxes of up to one lengthscale use the rule, and wider boxes use the formula,
separately in each dimension.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

from numpyro_orthgp.kernels.terms import Term, terms
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["box_terms", "boxes_with_boxes", "boxes_with_points"]

NODES = 8


def box_terms(kernel: KernelLike, num_dims: int, dtype: Any) -> tuple[Term, ...] | None:
    """The kernel's terms. ``None`` if a term has no known average over boxes, or for several latent functions."""
    one = jax.ShapeDtypeStruct((1, num_dims), dtype)
    if jax.eval_shape(lambda X: kernel(X), one).ndim > 1:
        return None
    found = terms(kernel, num_dims, dtype)
    return None if found is None or any(term.slopes or term.equal for term in found) else found


def boxes_with_points(found: tuple[Term, ...], lower: Array, upper: Array, X: Array) -> Array:
    """Covariances between averages over boxes (B, D) and values at points (n, D), shape (B, n)."""

    def of_dim(p: Array, d: int) -> Array:
        return _average(p, lower[:, None, d], upper[:, None, d], X[None, :, d])

    return _sum(found, lower.shape[1], of_dim, (len(lower), len(X)), lower.dtype)


def boxes_with_boxes(found: tuple[Term, ...], lower: Array, upper: Array, lower2: Array, upper2: Array) -> Array:
    """Covariances between averages over two sets of boxes, shape (B, B2)."""

    def of_dim(p: Array, d: int) -> Array:
        a, b = lower[:, None, d], upper[:, None, d]
        return _double_average(p, a, b, lower2[None, :, d], upper2[None, :, d])

    return _sum(found, lower.shape[1], of_dim, (len(lower), len(lower2)), lower.dtype)


def _sum(found: tuple[Term, ...], D: int, of_dim: Any, shape: tuple[int, int], dtype: Any) -> Array:
    total = jnp.zeros(shape, dtype)
    for term in found:
        product = jnp.broadcast_to(term.weight, shape)
        if term.precision is not None:
            for d in range(D):
                product = product * of_dim(term.precision[d], d)
        total = total + product
    return total


def _rule(a: Array, b: Array, ndim: int) -> tuple[Array, Array]:
    """Nodes in an interval and their weights. The axis of nodes comes before ``ndim`` others."""
    x, w = np.polynomial.legendre.leggauss(NODES)
    shape = (NODES,) + (1,) * ndim
    return a + (b - a) * jnp.asarray((x + 1) / 2, a.dtype).reshape(shape), jnp.asarray(w / 2, a.dtype).reshape(shape)


def _wide(p: Array, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Whether an interval is wider than the lengthscale. Also the root of p and the width, with ones where it is not."""
    wide = (b - a) ** 2 * p > 1
    return wide, jnp.sqrt(jnp.where(wide, p, 1)), jnp.where(wide, b - a, 1)


def _average(p: Array, a: Array, b: Array, z: Array) -> Array:
    nodes, shares = _rule(a, b, max(a.ndim, z.ndim))
    by_rule = jnp.sum(shares * jnp.exp(-p * (nodes - z) ** 2 / 2), 0)
    wide, root, width = _wide(p, a, b)
    return jnp.where(wide, (_first(root * (b - z)) - _first(root * (a - z))) / (root * width), by_rule)


def _double_average(p: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    (first, root, width), (second, _, width2) = _wide(p, a, b), _wide(p, c, d)
    both = first & second
    root = jnp.where(both, root, 1)
    corners = _second(root * (b - c)) - _second(root * (a - c)) - _second(root * (b - d)) + _second(root * (a - d))
    closed = corners / (root**2 * width * width2)
    in_second, shares = _rule(c, d, c.ndim)
    over_second = jnp.sum(shares * _average(p, a, b, in_second), 0)
    in_first, shares = _rule(a, b, a.ndim)
    over_first = jnp.sum(shares * _average(p, c, d, in_first), 0)
    return jnp.where(both, closed, jnp.where(first, over_second, over_first))


def _first(t: Array) -> Array:
    return float(np.sqrt(np.pi / 2)) * erf(t * float(np.sqrt(0.5)))


def _second(t: Array) -> Array:
    return t * _first(t) + jnp.exp(-(t**2) / 2)
