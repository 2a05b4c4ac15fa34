r"""The orthogonal decomposition of a Gaussian process along sets of inducing variables. This is the main idea of the package.

Let the sets be :math:`Z_1, \dots, Z_K`, let :math:`C_i` be the prior covariance of set :math:`i` given all earlier sets, and
:math:`L_i L_i^\top = C_i`. The :math:`L_i` are the diagonal blocks of the block Cholesky factor of the joint covariance of all
sets. For inputs :math:`X`

.. math::
    A_i(X) &= L_i^{-1} \Big( K(Z_i, X) - \sum_{j<i} A_j(Z_i)^\top A_j(X) \Big) \\
    f(x) &= \sum_i A_i(x)^\top e_i + \text{residual}(x), \qquad e_i \sim N(0, I) \text{ independent} \\
    r(x) &= k(x, x) - \sum_i |A_i(x)|^2

and the residual process, with variance :math:`r(x)`, is independent of every :math:`e_i`. One set gives the whitened SVGP
of Hensman et al. 2015. Two sets give SOLVE-GP, with :math:`C_2 = C_{vv}` and :math:`A_2(X) = L_2^{-1} C_{vf}` of Eqs. 17-18 of
Shi et al. 2020. More sets work in the same way.

Under :math:`q(e_i) = N(m_i, S_i)` each set adds

.. math:: a_i^\top m_i, \qquad a_i^\top S_i a_i, \qquad -|a_i|^2, \qquad a_i = A_i(x)

to the mean, the explained and the residual variance at an input. It subtracts :math:`A_i(Z_j)^\top A_i(X)` from the covariance of
each later set with the inputs. Unless the residual is scaled, bounds need only the sum of both variances. For full covariances the
derivative of the sum takes fewer products (:mod:`numpyro_orthgp.math.whitened`), hence ``Marginals.total``. For other families, a
scaled residual, or a set with many variables for the number of inputs, each product has its own derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp

from numpyro_orthgp.gaussians.family import Full, Whitened
from numpyro_orthgp.math.blocks import MAX_ENTRIES, map_blocks
from numpyro_orthgp.math.cholesky import inverse_cholesky, relative_carrier
from numpyro_orthgp.math.grouped import Grouping, gram_of_groups
from numpyro_orthgp.math.linalg import clip_rounding, jitter_scale, join
from numpyro_orthgp.math.products import (
    diagonal,
    gram_transposed,
    lower_matmul,
    matmul,
    matmul_transposed,
)
from numpyro_orthgp.math.whitened import Squares, carried_matmul, full_variances, pays, squares
from numpyro_orthgp.types import Array

__all__ = [
    "Block", "added_moments", "all_moments", "conditional_covariance", "decompose", "extend", "joint_whitener",
    "moments_of_whitened", "project", "residual_covariance", "residual_variance", "turn", "whiten",
]  # fmt: skip

# Most values of T' A of many functions held at once (P = 10 at M = 256 and 1024 rows); beyond that, blocks are faster.
MOST_AT_ONCE = 4 * MAX_ENTRIES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """The part of one set in the decomposition.

    :param whitener: the inverse :math:`L_i^{-1}` of the Cholesky factor of its covariance given the earlier sets, shape
        (..., M_i, M_i).
    :param before: the projections :math:`A_j(Z_i)` of its points on each earlier set, shapes (..., M_j, M_i).
    :param jitter: variance of the independent noise on its inducing variables, shape (..., 1), or (..., M_i) if it differs between
        variables, as in sets joined by ``online.condition``. Extra jitter after a failed factorization is not included. The
        whitened variables contain this noise, so code that computes their law from another function (``online.remember``,
        posterior paths) needs it.
    :param carrier: zeros that carry the whitener's derivative to its products, shape (..., M_i, M_i), see
        :func:`~numpyro_orthgp.math.cholesky.relative_carrier`; or ``None`` if the whitener does so itself.
    :param triangular: whether the whitener is lower triangular, as from :func:`decompose`; :func:`turn` does not keep this.
    """

    whitener: Array
    before: tuple[Array, ...]
    jitter: Array
    carrier: Array | None = None
    triangular: bool = field(default=True, metadata={"static": True})


def decompose(covariances: Sequence[Sequence[Array]], jitter: float) -> tuple[Block, ...]:
    """Decompose the joint covariance of the sets.

    :param covariances: ``covariances[i][j]`` is K(Z_j, Z_i) for j <= i, shape (..., M_j, M_i).
    :param jitter: addition to the diagonal of each :math:`C_i`, relative to the mean of the diagonal of K(Z_i, Z_i). It
        stands for independent noise with this variance on the inducing variables, so every bound remains a bound.
    :return: one block per set.
    """
    blocks: tuple[Block, ...] = ()
    for row in covariances:
        blocks = extend(blocks, row, jitter)
    return blocks


def extend(blocks: Sequence[Block], row: Sequence[Array], jitter: float) -> tuple[Block, ...]:
    """The decomposition with one more set.

    :param row: K(Z_j, Z) of the new set with each earlier set, and with itself.
    """
    before, K = project(blocks, row[:-1]), row[-1]
    # Relative to the prior's scale, not to C's: C vanishes if a set repeats points of an earlier one.
    scale = jitter_scale(diagonal(K))
    noise = jnp.asarray(jitter * scale, K.dtype)[..., None]
    C = conditional_covariance(K, before, noise)
    W = inverse_cholesky(C, scale)
    return (*blocks, Block(W, before, noise, relative_carrier(C, W)))


def conditional_covariance(K: Array, before: Sequence[Array], noise: Array) -> Array:
    """The covariance C_i of a set given the earlier sets, with noise, shape (..., M_i, M_i).

    :param K: its prior covariance.
    :param before: the projections of its points on each earlier set, shapes (..., M_j, M_i).
    :param noise: variance of the noise, shape (..., 1) or (..., M_i).
    """
    K = K - sum((gram_transposed(A) for A in before), start=jnp.zeros((), K.dtype))
    return K + noise[..., None] * jnp.eye(K.shape[-1], dtype=K.dtype)


def joint_whitener(blocks: Sequence[Block]) -> Array:
    """W with A(x) = W K(Z, x), the concatenated projections on all sets, shape (..., M, M) with M the sum of all M_i."""
    sizes = [block.whitener.shape[-1] for block in blocks]
    starts = [0, *accumulate(sizes)]
    # The projections are linear in the covariances: apply them to unit vectors.
    eye = jnp.eye(starts[-1], dtype=blocks[0].whitener.dtype)
    return join(project(blocks, [eye[a:b] for a, b in pairwise(starts)]), -2, event_dim=2)


def project(blocks: Sequence[Block], covariances: Sequence[Array]) -> tuple[Array, ...]:
    """The projections :math:`A_i(X)` of inputs on every set.

    :param covariances: K(Z_i, X) for each set, shapes (..., M_i, B).
    :return: one array per set, shapes (..., M_i, B).
    """
    A: list[Array] = []
    for block, K in zip(blocks, covariances, strict=True):
        A.append(whiten(block, residual_covariance(K, block.before, A)))
    return tuple(A)


def whiten(block: Block, C: Array) -> Array:
    """The projection on one set, from the covariance with it given the earlier sets, shape (..., M_i, B)."""
    if block.carrier is not None:
        return carried_matmul(block.whitener, block.carrier, C)
    return (lower_matmul if block.triangular else matmul)(block.whitener, C)


def turn(blocks: Sequence[Block], rotations: Sequence[Array | None]) -> tuple[Block, ...]:
    r"""The decomposition with each set's whitened variables in other coordinates, :math:`V_i^\top e_i` for orthogonal :math:`V_i`.

    ``f(X)`` needs two products per set, one for A and one for the variance that q explains. If q's covariance is diagonal in the
    new coordinates (``GPFunction.diagonalized``), one product remains. This takes a singular value decomposition, so it is done
    only on request. :class:`Block` notes that its whitener is no longer triangular. Other libraries cache L^-T (I - S) L^-1,
    whose entries grow with the inverse of the jitter and not with its root.

    :param rotations: for each set V, shape (..., M_i, M_i), or ``None`` to leave it as it is.
    """

    def turned(V: Array | None, A: Array) -> Array:
        return A if V is None else matmul_transposed(V, A)

    return tuple(
        Block(
            turned(V, block.whitener),
            tuple(turned(U, A) for U, A in zip(rotations[: len(block.before)], block.before, strict=True)),
            block.jitter,
            block.carrier if V is None else None,
            block.triangular and V is None,
        )
        for V, block in zip(rotations, blocks, strict=True)
    )


def residual_covariance(K: Array, A1: Sequence[Array], A2: Sequence[Array]) -> Array:
    r"""Prior covariance given the sets: :math:`K(X_1, X_2) - \sum_i A_i(X_1)^\top A_i(X_2)`, shape (..., n, m)."""
    for left, right in zip(A1, A2, strict=True):
        K = K - matmul_transposed(left, right)
    return K


def residual_variance(variance: Array, A: Sequence[Array]) -> Array:
    r"""The variance :math:`r(x) = k(x, x) - \sum_i |A_i(x)|^2` that no set explains, never below zero.

    :param variance: k(x, x), shape (..., B).
    """
    for Ai in A:
        variance = variance - jnp.sum(Ai**2, axis=-2)
    return clip_rounding(variance)


# ---------------------------------------------------------------- moments under q


def all_moments(
    beliefs: Sequence[Whitened],
    blocks: Sequence[Block],
    covariances: Sequence[Array],
    *,
    equal_weights: bool,
    grouping: Grouping | None = None,
) -> tuple[Squares, Array | None]:
    r"""The contributions of all sets to the moments, summed.

    :param covariances: K(Z_i, X) for each set, shapes (..., M_i, B).
    :param equal_weights: as for :func:`added_moments`.
    :param grouping: to return also :math:`\sum_i A_i^\top A_i` within groups of G consecutive inputs, shape (..., n, G, G).
    """
    grams = None
    if grouping is not None:
        start = grouping.start(covariances[0].shape[-1])
        A = project(blocks, [C[..., start:] for C in covariances])
        grams = gram_of_groups(A, grouping.size)
        if not start:  # else most rows are in no group, and have a faster rule
            return _summed([moments_of_whitened(q, Ai) for q, Ai in zip(beliefs, A, strict=True)]), grams
    parts = []
    for i, (q, block) in enumerate(zip(beliefs, blocks, strict=True)):
        C, *covariances = covariances
        later = [b.before[i] for b in blocks[i + 1 :]]
        part, explains = added_moments(q, block, C, later, equal_weights=equal_weights)
        # As in `project`, but by sets: the derivative rule of a set covers what it explains of later ones.
        covariances = [K - e for K, e in zip(covariances, explains, strict=True)]
        parts.append(part)
    return _summed(parts), grams


def _summed(parts: Sequence[Squares]) -> Squares:
    return Squares(*(sum(part[1:], start=part[0]) for part in zip(*parts, strict=True)))


def added_moments(
    q: Whitened, block: Block, C: Array, later: Sequence[Array] = (), *, equal_weights: bool = True
) -> tuple[Squares, list[Array]]:
    r"""The contribution of one set to the moments, and to the covariances of later sets with the inputs.

    :param C: covariance of the set with the inputs given the earlier sets, shape (..., M, B).
    :param later: projections :math:`A(Z_j)` of the points of later sets on this set, shapes (..., M, M_j).
    :param equal_weights: whether a bound weighs both variances equally, so that it needs only their sum.
    :return: the moments, and :math:`A(Z_j)^\top A` for each later set, shapes (..., M_j, B).
    """
    M, B = C.shape[-2:]
    # Not for subclasses, which may spread differently; nor for many functions with one A, which would take M x M products for each.
    fast = equal_weights and q.loc.ndim < C.ndim and pays(M, B, with_others=bool(later))
    if fast and type(q) is Full and block.carrier is not None:
        return full_variances(block.whitener, block.carrier, C, q.loc, q.scale_tril, list(later))
    A = whiten(block, C)
    return moments_of_whitened(q, A), [matmul_transposed(AZ, A) for AZ in later]


def moments_of_whitened(q: Whitened, A: Array) -> Squares:
    """The contribution of inducing variables with known projections to the moments.

    :param A: projections on the set, shape (..., M, B).
    """
    return squares(A, q.loc, _explained(q, A))


def _explained(q: Whitened, A: Array) -> Array | None:
    """The variance that q explains, shape (..., B); ``None`` for a known value. Many functions with one A are done in blocks."""
    if q.is_value:
        return None

    def variance(q: Whitened) -> Array:
        W = q.spread(A)
        assert W is not None
        return jnp.sum(W**2, axis=-2)

    many = q.loc.ndim > A.ndim - 1 and isinstance(A.shape[-1], int)  # under jax.export it is a symbol
    if not many or q.loc.shape[0] * A.size <= MOST_AT_ONCE or jax.eval_shape(variance, q).ndim == A.ndim - 1:
        return variance(q)
    return map_blocks(variance, q, max(1, MAX_ENTRIES // A.size))
