r"""What each set of inducing variables adds to the moments of a function at inputs.

With :math:`A = W C`, C the covariance of the set with the inputs given the sets before it and W its whitener, q of mean m and
covariance S adds

.. math:: A^\top m, \qquad a^\top S a, \qquad -|a|^2

to the mean, the explained and the residual variance at each input, a its column of A; and it explains
:math:`A(Z_j)^\top A` of the covariance of each later set with the inputs.

Bounds need the two variances' sum alone unless the residual is scaled; the derivative of the sum takes fewer products
(:mod:`numpyro_orthgp.math.whitened`).

Hence ``Marginals.total``, the sum with that derivative. The rule is for full covariances. Of another family, where the residual
is scaled, or where a set has many variables for the number of inputs, each product has its own derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from numpyro_orthgp.functions.projection import Block, whiten
from numpyro_orthgp.gaussians.family import Full, Whitened
from numpyro_orthgp.math.products import combine, matmul_transposed
from numpyro_orthgp.math.whitened import Squares, full_variances, pays
from numpyro_orthgp.types import Array

__all__ = ["added_moments", "all_moments", "moments_of_whitened"]


def all_moments(
    beliefs: Sequence[Whitened], blocks: Sequence[Block], covariances: Sequence[Array], *, equal_weights: bool
) -> Squares:
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
    return Squares(*(sum(part[1:], start=part[0]) for part in zip(*parts, strict=True)))


def added_moments(
    q: Whitened, block: Block, C: Array, later: Sequence[Array] = (), *, equal_weights: bool = True
) -> tuple[Squares, list[Array]]:
    r"""What one set adds to the moments; and what it explains of the covariances of later sets with the inputs.

    :param C: covariance of the set with the inputs given the sets before it, shape (..., M, B).
    :param later: projections :math:`A(Z_j)` of the points of later sets on this set, shapes (..., M, M_j).
    :param equal_weights: whether a bound will have the same weights for both variances, hence need their sum alone.
    :return: the moments, and :math:`A(Z_j)^\top A` for each later set, shapes (..., M_j, B).
    """
    M, B = C.shape[-2:]
    if equal_weights and isinstance(q, Full) and block.carrier is not None and pays(M, B, with_others=bool(later)):
        return full_variances(block.whitener, block.carrier, C, q.loc, q.scale_tril, list(later))
    A = whiten(block, C)
    return moments_of_whitened(q, A), [matmul_transposed(AZ, A) for AZ in later]


def moments_of_whitened(q: Whitened, A: Array) -> Squares:
    """What inducing variables of known projections add.

    :param A: projections on the set, shape (..., M, B).
    """
    W = q.spread(A)
    prior = jnp.sum(A**2, axis=-2)
    explained = jnp.zeros_like(prior) if W is None else jnp.sum(W**2, axis=-2)
    return Squares(combine(q.loc, A), explained, -prior, explained - prior)
