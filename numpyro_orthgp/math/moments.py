r"""What one set of inducing variables adds to the moments of a function, and its derivatives by few products of matrices.

With :math:`A = W C`, C the covariance of the set with the inputs given the sets before it, q of mean m and root T adds

.. math:: A^\top m, \qquad |T^\top a|^2, \qquad -|a|^2

to the mean, the explained and the residual variance at each input, a its column of A. The variances are quadratic forms, so
with weights g of the inputs their derivatives for T and W need A through

.. math:: P = A \, \mathrm{diag}(g) A^\top, \qquad 2 P T \quad\text{and}\quad 2 (T T^\top - I) P

alone (the second for :math:`E = dW \, W^{-1}`): one product over the inputs where chaining the derivatives of two products takes
two. It is the same P for both variances where both have the same weights, as in every bound in which they are added.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_orthgp.math.gaussian import Whitened, spread
from numpyro_orthgp.math.linalg import combine
from numpyro_orthgp.math.projection import Block, whiten
from numpyro_orthgp.math.triangular import (
    linear_in_left,
    linear_in_right,
    linear_transposed,
    lower_matmul,
    lower_matmul_transposed,
)
from numpyro_orthgp.types import Array

__all__ = ["added_moments", "moments_of_whitened"]

Moments = tuple[Array, Array, Array]

# Inputs for each inducing variable from which on P is formed. With fewer what is saved over the inputs is no more than the products
# of M x M matrices that it costs (measured on two cores).
_GRAM_RATIO = 4


def moments_of_whitened(q: Whitened, A: Array) -> Moments:
    """Mean, explained variance and change of the residual variance, shapes (..., B).

    :param A: projections on the set, shape (..., M, B).
    """
    W = spread(q, A)
    prior = jnp.sum(A**2, axis=-2)
    explained = jnp.zeros_like(prior) if W is None else jnp.sum(W**2, axis=-2)
    return combine(q.loc, A), explained, -prior


def added_moments(q: Whitened, block: Block, C: Array, *, equal_weights: bool = True) -> Moments:
    """As :func:`moments_of_whitened`, from the covariance with the set given the sets before it, shape (..., M, B).

    :param equal_weights: whether a bound will have the same weights for both variances; else nothing is gained by their sharing P.
    """
    M, B = C.shape[-2:]
    if equal_weights and q.covariance == "full" and block.carrier is not None and _GRAM_RATIO * M <= B:
        return _full_moments(block.whitener, block.carrier, C, q.loc, q.scale)
    return moments_of_whitened(q, whiten(block, C))


@jax.custom_jvp
def _full_moments(W: Array, carrier: Array, C: Array, loc: Array, T: Array) -> Moments:
    return moments_of_whitened(Whitened(loc, T, "full"), lower_matmul(W, C))


@_full_moments.defjvp
def _full_moments_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Moments, Moments]:
    W, _, C, loc, T = primals
    _, E, dC, dloc, dT = tangents
    A = lower_matmul(W, C)
    TTA = lower_matmul(T, lower_matmul_transposed(T, A))
    dA = linear_in_right(W, dC)  # of fixed W: what E adds is in the other terms
    mean = combine(dloc, A) + combine(loc, dA) + combine(combine(loc, E), A)
    # a^T T (T^T E + dT^T) a: written like this, the backward pass takes one product P T for both.
    form = linear_in_right(T, linear_transposed(T, E) + jnp.swapaxes(dT, -1, -2))
    explained = 2 * jnp.sum(TTA * dA, axis=-2) + _quadratic(2 * _folded(form), A)
    change = -2 * jnp.sum(A * dA, axis=-2) + _quadratic(-2 * E, A)
    return _full_moments(*primals), (mean, explained, change)


def _folded(form: Array) -> Array:
    """The lower-triangular matrix of the same quadratic form."""
    return jnp.tril(form) + jnp.swapaxes(jnp.triu(form, 1), -1, -2)


def _quadratic(L: Array, A: Array) -> Array:
    """The form of a lower-triangular tangent L at each column of A, shape (..., B). Backward: the lower triangle of P."""
    return jnp.sum(A * linear_in_left(L, A), axis=-2)
