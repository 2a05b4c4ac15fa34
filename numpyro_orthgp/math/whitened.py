r"""Products with a whitener, :math:`A = W C`, and what follows from them, by few products forward and backward.

W is the inverse of a Cholesky factor, and a ``carrier`` of zeros has the derivative :math:`E = dW \, W^{-1}`
(:func:`~numpyro_orthgp.math.cholesky.relative_carrier`): A changes by E A + W dC, so E's gradient is the lower triangle of
:math:`G A^\top`, where W's own would be :math:`G C^\top`, to be multiplied by :math:`W^\top` next.

The two sums of squares of :func:`full_variances` are, with weights alike, one quadratic form,

.. math:: |T^\top a|^2 - |a|^2 = c^\top f, \qquad F = W^\top (T T^\top - I) A,

a, c and f columns of A, C and F. With weights g of the columns its derivatives are

.. math:: 2 F \, \mathrm{diag}(g), \qquad 2 P T, \qquad 2 (T T^\top - I) P, \qquad P = A \, \mathrm{diag}(g) A^\top

for C, T and E: with A itself three products over the columns for value and derivatives, where chaining the derivatives of products
takes six. One factor W is folded into F, not both, so that F is no less precise than A.

Products with other projections, :math:`A_Z^\top A`, change by

.. math:: (dA_Z + E^\top A_Z)^\top A + A_Z^\top W dC,

so there too E has no product over the columns of its own.

The carrier travels beside the whitener in ``Block``, whose own derivative stays right for other uses.

**Where the rule is used** (:mod:`numpyro_orthgp.functions.projection`). A last set of full covariance with half as many variables
as there are inputs, or fewer, has one rule for its whole part of the moments. For a set before others the limit is a quarter:
what it explains of their covariances with the inputs is part of the rule, and there E meets the projections of the few later
points instead of those of the inputs. Value and gradient take three products over the inputs, A, F and P;
``tests/test_moments.py`` counts them in the compiled program. The explained and the residual variance by themselves have
derivatives of their own, with two more products. Where the residual is scaled the rule is not used.

**Precision.** With a gradient the explained variance is ``c' F + |a|^2``, of rounding error ``eps |W| k`` like a and ``|a|^2``
themselves: only one factor W is folded into F. With both, ``W' (S - I) W``, errors would grow with the inverse of the jitter
and not with its root. A test compares float32 with float64 at condition numbers up to the jitter's. Predictions, which have no
gradient, take ``|T' a|^2``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_orthgp.math.blocks import keep
from numpyro_orthgp.math.linalg import clip_rounding
from numpyro_orthgp.math.products import (
    combine,
    linear_in_left,
    linear_in_right,
    linear_transposed,
    lower_matmul,
    lower_matmul_transposed,
    matmul,
    matmul_transposed,
    plain_matmul,
    transpose,
)
from numpyro_orthgp.types import Array

__all__ = ["Squares", "carried_matmul", "full_variances", "pays", "squares"]

# Columns for each row of A from which on P is formed, without other projections and with. With fewer what is saved over the
# columns is no more than the products of M x M matrices that it costs (measured on two cores).
_RATIO = 2
_RATIO_WITH_OTHERS = 4


class Squares(NamedTuple):
    """Sums over the rows of A, shapes (..., B).

    :param mean: ``m' A``.
    :param explained: ``|T' a|^2``.
    :param change: ``-|a|^2``.
    :param net: explained + change. Its derivative takes fewer products than theirs.
    """

    mean: Array
    explained: Array
    change: Array
    net: Array


def squares(A: Array, loc: Array, explained: Array | None) -> Squares:
    """The sums as they are written.

    :param A: shape (..., M, B).
    :param loc: m, shape (..., M).
    :param explained: the diagonal of A' S A, shape (..., B); ``None`` if S is zero.
    """
    prior = jnp.sum(A**2, axis=-2)
    explained = jnp.zeros_like(prior) if explained is None else explained
    return Squares(combine(loc, A), explained, -prior, explained - prior)


def pays(M: int, B: int, with_others: bool) -> bool:
    """Whether :func:`full_variances` is faster than the derivatives of its products, for B columns of M rows.

    Not where B is a symbol (``jax.export``), as for predictions, which have no derivative.
    """
    return isinstance(B, int) and (_RATIO_WITH_OTHERS if with_others else _RATIO) * M <= B


@jax.custom_jvp
def carried_matmul(W: Array, carrier: Array, C: Array) -> Array:
    """``W @ C`` whose derivative with respect to W goes to ``carrier`` alone."""
    return lower_matmul(W, C)


@carried_matmul.defjvp
def _carried_matmul_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    W = primals[0]
    _, E, dC = tangents
    A = keep(carried_matmul(*primals), large=True)
    return A, linear_in_left(E, A) + linear_in_right(W, dC)


@jax.custom_jvp
def full_variances(
    W: Array, carrier: Array, C: Array, loc: Array, T: Array, others: list[Array]
) -> tuple[Squares, list[Array]]:
    r"""The sums for :math:`A = W C`, and :math:`A_Z^\top A` for each of ``others``.

    :param W: lower triangular, shape (..., M, M), its derivative in ``carrier`` alone.
    :param C: shape (..., M, B).
    :param loc: m, shape (..., M).
    :param T: lower triangular, shape (..., M, M).
    :param others: projections A_Z, shapes (..., M, n).
    """
    A = lower_matmul(W, C)
    return squares(A, loc, jnp.sum(lower_matmul_transposed(T, A) ** 2, axis=-2)), [
        matmul_transposed(AZ, A) for AZ in others
    ]


@full_variances.defjvp
def _full_variances_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    W, _, C, loc, T, others = primals
    _, E, dC, dloc, dT, dothers = tangents
    A = lower_matmul(W, C)
    F = matmul(matmul(lower_matmul_transposed(W, T), transpose(T)) - transpose(W), A)
    prior = jnp.sum(A**2, axis=-2)
    explained = clip_rounding(jnp.sum(C * F, axis=-2) + prior)
    squares = Squares(combine(loc, A), explained, -prior, explained - prior)
    dmean = combine(dloc, A) + combine(combine(loc, W), dC) + combine(combine(loc, E), A)
    # a^T T (T^T E + dT^T) a: written like this, the backward pass takes one product P T for both.
    form = linear_in_right(T, linear_transposed(T, E) + transpose(dT))
    dnet = 2 * jnp.sum(F * dC, axis=-2) + _quadratic(2 * (_folded(form) - E), A)
    # In no program unless one of the two variances is used by itself.
    dchange = -2 * jnp.sum(A * linear_in_right(W, dC), axis=-2) - _quadratic(2 * E, A)
    # E is on the side of the few other points: the gradient of their projections is all that its own needs.
    explains = [matmul_transposed(AZ, A) for AZ in others]
    dexplains = [
        plain_matmul(transpose(dAZ) + plain_matmul(transpose(AZ), E), A) + plain_matmul(matmul_transposed(AZ, W), dC)
        for AZ, dAZ in zip(others, dothers, strict=True)
    ]
    return (squares, explains), (Squares(dmean, dnet - dchange, dchange, dnet), dexplains)


def _folded(form: Array) -> Array:
    """The lower-triangular matrix of the same quadratic form."""
    return jnp.tril(form) + transpose(jnp.triu(form, 1))


def _quadratic(L: Array, A: Array) -> Array:
    """The form of a lower-triangular tangent L at each column of A, shape (..., B). Backward: the lower triangle of P."""
    return jnp.sum(A * linear_in_left(L, A), axis=-2)
