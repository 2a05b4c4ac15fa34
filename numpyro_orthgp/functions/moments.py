r"""What one set of inducing variables adds to the moments of a function, and its derivatives by few products of matrices.

With :math:`A = W C`, C the covariance of the set with the inputs given the sets before it, q of mean m and root T adds

.. math:: A^\top m, \qquad |T^\top a|^2, \qquad -|a|^2

to the mean, the explained and the residual variance at each input, a its column of A. Bounds need the two variances' sum alone
unless the residual is scaled, and that is one quadratic form,

.. math:: |T^\top a|^2 - |a|^2 = c^\top f, \qquad F = W^\top (T T^\top - I) A,

c and f columns of C and F. With weights g of the inputs its derivatives are

.. math:: 2 F \, \mathrm{diag}(g), \qquad 2 P T, \qquad 2 (T T^\top - I) P, \qquad P = A \, \mathrm{diag}(g) A^\top

for C, T and :math:`E = dW \, W^{-1}`: with A itself three products over the inputs for value and derivatives, where chaining
the derivatives of products takes six. One factor W is folded into F, not both, so that F is no less precise than A.

What the set explains of the covariances of a later set with the inputs, :math:`A(Z)^\top A` for that set's points Z, changes by

.. math:: (dA(Z) + E^\top A(Z))^\top A + A(Z)^\top W dC,

so there too E has no product over the inputs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_orthgp.functions.projection import Block, whiten
from numpyro_orthgp.gaussians.family import Full, Whitened
from numpyro_orthgp.math.linalg import clip_rounding, combine, matmul, matmul_transposed, plain_matmul, transpose
from numpyro_orthgp.math.triangular import (
    linear_in_left,
    linear_in_right,
    linear_transposed,
    lower_matmul,
    lower_matmul_transposed,
)
from numpyro_orthgp.types import Array

__all__ = ["Added", "added_moments", "all_moments", "moments_of_whitened"]


class Added(NamedTuple):
    """What is added to the moments at B inputs, shapes (..., B).

    :param mean: the mean.
    :param explained: the explained variance.
    :param change: of the residual variance, not positive.
    :param net: explained + change. Its derivative takes fewer products than theirs.
    """

    mean: Array
    explained: Array
    change: Array
    net: Array


# Inputs for each inducing variable from which on P is formed, for the last set and for those before. With fewer what is saved
# over the inputs is no more than the products of M x M matrices that it costs (measured on two cores).
_GRAM_RATIO = 2
_GRAM_RATIO_BEFORE = 4


def moments_of_whitened(q: Whitened, A: Array) -> Added:
    """What inducing variables of known projections add.

    :param A: projections on the set, shape (..., M, B).
    """
    W = q.spread(A)
    prior = jnp.sum(A**2, axis=-2)
    explained = jnp.zeros_like(prior) if W is None else jnp.sum(W**2, axis=-2)
    return Added(combine(q.loc, A), explained, -prior, explained - prior)


def all_moments(
    beliefs: Sequence[Whitened], blocks: Sequence[Block], covariances: Sequence[Array], *, equal_weights: bool
) -> Added:
    """The sums over sets of what each adds to the moments.

    :param covariances: K(Z_i, X) for each set, shapes (..., M_i, B).
    :param equal_weights: as for :func:`added_moments`.
    """
    parts = []
    for i, (q, block) in enumerate(zip(beliefs, blocks, strict=True)):
        C, *covariances = covariances
        later = [b.before[i] for b in blocks[i + 1 :]]
        part, explains = added_moments(q, block, C, later, equal_weights=equal_weights)
        # As `project` does it, but from the set's side: its derivative rule covers what it explains of the others.
        covariances = [K - e for K, e in zip(covariances, explains, strict=True)]
        parts.append(part)
    return Added(*(sum(part[1:], start=part[0]) for part in zip(*parts, strict=True)))


def added_moments(
    q: Whitened, block: Block, C: Array, later: Sequence[Array] = (), *, equal_weights: bool = True
) -> tuple[Added, list[Array]]:
    r"""As :func:`moments_of_whitened`; and what the set explains of the covariances of later sets with the inputs.

    :param C: covariance of the set with the inputs given the sets before it, shape (..., M, B).
    :param later: projections :math:`A(Z_j)` of the points of later sets on this set, shapes (..., M, M_j).
    :param equal_weights: whether a bound will have the same weights for both variances, hence need their sum alone.
    :return: the moments, and :math:`A(Z_j)^\top A` for each later set, shapes (..., M_j, B).
    """
    M, B = C.shape[-2:]
    ratio = _GRAM_RATIO_BEFORE if later else _GRAM_RATIO
    if equal_weights and isinstance(q, Full) and block.carrier is not None and ratio * M <= B:
        return _full_moments(block.whitener, block.carrier, C, q.loc, q.scale_tril, list(later))
    A = whiten(block, C)
    return moments_of_whitened(q, A), [matmul_transposed(AZ, A) for AZ in later]


@jax.custom_jvp
def _full_moments(
    W: Array, carrier: Array, C: Array, loc: Array, T: Array, later: list[Array]
) -> tuple[Added, list[Array]]:
    A = lower_matmul(W, C)
    return moments_of_whitened(Full(loc, T), A), [matmul_transposed(AZ, A) for AZ in later]


@_full_moments.defjvp
def _full_moments_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    W, _, C, loc, T, later = primals
    _, E, dC, dloc, dT, dlater = tangents
    A = lower_matmul(W, C)
    F = matmul(matmul(lower_matmul_transposed(W, T), transpose(T)) - transpose(W), A)
    prior = jnp.sum(A**2, axis=-2)
    explained = clip_rounding(jnp.sum(C * F, axis=-2) + prior)
    moments = Added(combine(loc, A), explained, -prior, explained - prior)
    dmean = combine(dloc, A) + combine(combine(loc, W), dC) + combine(combine(loc, E), A)
    # a^T T (T^T E + dT^T) a: written like this, the backward pass takes one product P T for both.
    form = linear_in_right(T, linear_transposed(T, E) + transpose(dT))
    dnet = 2 * jnp.sum(F * dC, axis=-2) + _quadratic(2 * (_folded(form) - E), A)
    # In no program unless one of the two variances is used by itself.
    dchange = -2 * jnp.sum(A * linear_in_right(W, dC), axis=-2) - _quadratic(2 * E, A)
    # E is on the side of the few later points: the gradient of their projections is all that its own needs.
    explains = [matmul_transposed(AZ, A) for AZ in later]
    dexplains = [
        plain_matmul(transpose(dAZ) + plain_matmul(transpose(AZ), E), A) + plain_matmul(matmul_transposed(AZ, W), dC)
        for AZ, dAZ in zip(later, dlater, strict=True)
    ]
    return (moments, explains), (Added(dmean, dnet - dchange, dchange, dnet), dexplains)


def _folded(form: Array) -> Array:
    """The lower-triangular matrix of the same quadratic form."""
    return jnp.tril(form) + transpose(jnp.triu(form, 1))


def _quadratic(L: Array, A: Array) -> Array:
    """The form of a lower-triangular tangent L at each column of A, shape (..., B). Backward: the lower triangle of P."""
    return jnp.sum(A * linear_in_left(L, A), axis=-2)
