r"""Collapsed bounds of Gaussian-process regression: with q(u) integrated out they are sums over data points.

With the projections :math:`A` of the inputs (:mod:`numpyro_orthgp.functions.projection`), :math:`Q_{ff} = A^\top A`, noise
variances :math:`\sigma_i^2` in :math:`S`, and the residual variance :math:`r_i = k_{ii} - q_{ii}`,

.. math:: \log p(y) \ge \log N(y \mid 0, Q_{ff} + S) - \tfrac12 \sum_i c(r_i / \sigma_i^2).

Bounds differ in the cost c of the residual:

=============  ==================================================================  ==========================================
``bound``      :math:`\sum_i c(\rho_i)`, with :math:`\rho_i = r_i / \sigma_i^2`      source
=============  ==================================================================  ==========================================
titsias2009    :math:`\sum_i \rho_i`                                               Titsias 2009; Titsias 2025, Eq. 8
artemev2021    :math:`N \log(1 + \tfrac1N \sum_i \rho_i)`                           Artemev et al. 2021; Titsias 2025, Eq. 36
titsias2025    :math:`\sum_i \log(1 + \rho_i)`                                     Titsias 2025, Eq. 16
=============  ==================================================================  ==========================================

"titsias2025" also has a cost for groups of rows. With the residual covariance :math:`R_b` of group b and the noise :math:`S_b`, it
is :math:`\sum_b \log |I + S_b^{-1/2} R_b S_b^{-1/2}|` (:mod:`numpyro_orthgp.functions.groups`).

Other approximations are no bounds, and serve for comparison. "dtc" has no cost. "fitc" adds :math:`r_i` to the noise. "pep"
(power expectation propagation, Bui, Yan and Turner 2017) adds :math:`\alpha r_i` and has the cost
:math:`\tfrac{1 - \alpha}{\alpha} \log(1 + \alpha \rho_i)` (Titsias 2025, Eq. 25): titsias2009 as alpha goes to 0, fitc at 1.
In groups they add :math:`\alpha R_b` to the noise, which is then no longer diagonal, and the cost has the logarithm of
:math:`|I + \alpha S_b^{-1/2} R_b S_b^{-1/2}|`. fitc becomes the objective of the partially independent conditional (Snelson and
Ghahramani 2007), pep that of power expectation propagation with blocks (Bui and Titsias 2025).

All of these need :math:`\Lambda = I + A S^{-1} A^\top` and a few sums (:class:`Statistics`), which add up over data blocks. With
several orthogonal sets and mean-field over sets, the best Gaussians have the diagonal blocks :math:`\Lambda_{ii}` as precisions and
the exact joint mean :math:`\Lambda^{-1} A S^{-1} y`. Then :math:`\sum_i \log |\Lambda_{ii}|` replaces :math:`\log |\Lambda|`, which
for two sets is Eq. 21 of Shi et al. 2020 at its best q(v).

**The default is "titsias2025"**, the tightest bound that costs O(N M^2).

**Several sets.** With sets independent under q, the collapsed SOLVE-GP at its best q(v) is this one formula for any number of
sets. It costs the joint Cholesky factor of all sets, as much as one set of all points, which gives the better bound. So it serves
for comparison. The cheaper form of Shi et al. 2020, Eq. 21, takes q(v) as given (:func:`~numpyro_orthgp.orthogonal`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import jax.numpy as jnp

from numpyro_orthgp.math.cholesky import inverse_cholesky, root_of_inverse
from numpyro_orthgp.math.grouped import added_identity, cut_groups, group_whitener, join_groups, log_det, scale_groups
from numpyro_orthgp.math.linalg import add_jitter
from numpyro_orthgp.math.products import PRECISION, diagonal, gram, lower_matmul, lower_matmul_transposed, matmul
from numpyro_orthgp.types import Array

__all__ = [
    "BOUNDS",
    "GROUPED",
    "Bound",
    "Moments",
    "Statistics",
    "best_mean",
    "conditional_gain",
    "log_evidence",
    "log_upper_bound",
    "optimum",
    "statistics",
]

BOUNDS = ("titsias2009", "titsias2025", "artemev2021", "conditional", "fitc", "dtc", "pep")
GROUPED = ("titsias2025", "fitc", "pep")


class Bound(NamedTuple):
    """A bound and its options.

    :param name: one of ``BOUNDS``.
    :param alpha: the power of "pep".
    :param group_size: number of rows in a group, or ``None``.
    """

    name: str
    alpha: float = 1.0
    group_size: int | None = None


class Statistics(NamedTuple):
    r"""Sums over points for C outputs that share covariances; with leading axes (...) if outputs have their own.

    :param gram: :math:`A S^{-1} A^\top`, shape (..., M, M).
    :param product: :math:`A S^{-1} y`, shape (..., M, C).
    :param square: :math:`\sum y^2 / \sigma^2` over points and outputs, shape (...).
    :param log_noise: :math:`\sum_i \log \sigma_i^2`, for each output, shape (...).
    :param charge: the sum of residual costs, for each output, shape (...).
    :param num: number of points with an observation, shape (...).
    :param offset: :math:`m_0`, shape (..., M, C): if given, ``product`` and ``square`` are those of :math:`y - A^\top m_0`.
    """

    gram: Array
    product: Array
    square: Array
    log_noise: Array
    charge: Array
    num: Array
    offset: Array | None = None


class Moments(NamedTuple):
    r"""Contributions of the points of one block, without noise.

    :param first: :math:`A`, or its expectation if inputs are uncertain, shape (..., M, B).
    :param residual: (expected) residual variances, shape (..., B).
    :param centred: for uncertain inputs, the covariance of :math:`k_i` of each point, with :math:`A_i = W k_i`, shape (B, M, M).
    :param second: or :math:`E[k_i k_i^\top]`.
    :param whitener: the matrix :math:`W`, shape (M, M).
    :param factors: F, shape (S, B, M): if given, the second moment also contains F F' - R F F' R'.
    :param kept: the matrix R, shape (M, M).
    :param spread: the covariance of :math:`A_i`, shape (B, M, M), if there are neither.
    :param groups: the residual's covariance within groups of points, shape (..., n, G, G).
    """

    first: Array
    residual: Array
    centred: Array | None = None
    second: Array | None = None
    whitener: Array | None = None
    factors: Array | None = None
    kept: Array | None = None
    spread: Array | None = None
    groups: Array | None = None


def statistics(
    moments: Moments, Y: Array, precision: Array, explained: Array, bound: Bound, offset: Array | None = None
) -> Statistics:
    r"""The sums over one block of points.

    :param Y: outputs, shape (..., B, C); any finite values where missing.
    :param precision: :math:`1 / \sigma_i^2`, zero where missing, shape (..., B).
    :param explained: variance of each point under a given q of orthogonal sets, which is not optimized here, summed over
        outputs, shape (..., B).
    :param offset: :math:`m_0`, shape (..., M, C), to subtract :math:`A^\top m_0` from outputs.
    """
    if offset is not None:
        Y = Y - matmul(jnp.swapaxes(moments.first, -1, -2), offset)
    precision = precision.astype(jnp.result_type(moments.residual, precision))
    present = precision > 0
    log_noise = jnp.where(present, -jnp.log(jnp.where(present, precision, 1)), 0)
    num = present.astype(precision.dtype)
    if moments.groups is None:
        ratio = moments.residual * precision
        charge = _charge(ratio, bound, jnp.log1p)
        if bound.name in ("fitc", "pep"):
            log_noise, precision = log_noise + jnp.log1p(bound.alpha * ratio), precision / (1 + bound.alpha * ratio)
    else:
        ratio = scale_groups(moments.groups, jnp.sqrt(precision))
        charge = _charge(ratio, bound, lambda R: log_det(added_identity(R)))
        if bound.name in ("fitc", "pep"):
            moments, Y, precision, added = _whitened_by_groups(
                moments, Y, precision, added_identity(bound.alpha * ratio)
            )
            log_noise = log_noise + added
    weighted = precision[..., None] * Y
    outer = _outer(moments, precision)
    square = jnp.sum(weighted * Y, (-2, -1)) + jnp.sum(precision * explained, -1)
    totals = (jnp.broadcast_to(jnp.sum(x, -1), square.shape) for x in (log_noise, charge, num))
    return Statistics(outer, matmul(moments.first, weighted), square, *totals)


def _whitened_by_groups(moments: Moments, Y: Array, precision: Array, C: Array) -> tuple[Moments, Array, Array, Array]:
    """Points, outputs and precisions whitened from non-diagonal to unit noise, and the addition to the noise's log determinant.

    :param C: the noise covariance of each group, scaled by ``precision``.
    """
    W, size = group_whitener(C), C.shape[-1]
    root = jnp.sqrt(precision)[..., None, :]

    def whiten(rows: Array) -> Array:  # (..., k, B)
        cut = cut_groups(root * rows, size)
        return join_groups(jnp.einsum("...ngh,...knh->...kng", W, cut, precision=PRECISION), rows.shape[-1])

    whitened = moments._replace(first=whiten(moments.first))
    Y = jnp.swapaxes(whiten(jnp.swapaxes(Y, -1, -2)), -1, -2)
    return whitened, Y, jnp.ones_like(precision), -2 * join_groups(jnp.log(diagonal(W)), precision.shape[-1])


def _outer(moments: Moments, precision: Array) -> Array:
    """Sum over points of E[A A'] times their precision, shape (..., M, M)."""
    if moments.spread is not None:
        spread = jnp.einsum("...b,bmn->...mn", precision, moments.spread, precision=PRECISION)
        return gram(moments.first, precision) + spread
    uncertain = moments.second if moments.centred is None else moments.centred
    if uncertain is None or moments.whitener is None:
        return gram(moments.first, precision)
    outer = jnp.einsum("...b,bmn->...mn", precision, uncertain, precision=PRECISION)
    outer = matmul(matmul(moments.whitener, outer), moments.whitener.T)
    if moments.factors is None or moments.kept is None:
        return outer + gram(moments.first, precision)
    S, _, M = moments.factors.shape
    seen = gram(moments.factors.reshape(-1, M).T, jnp.tile(precision, S))
    return outer + seen - matmul(matmul(moments.kept, seen), moments.kept.T)


def _charge(ratio: Array, bound: Bound, log_one_plus: Callable[[Array], Array]) -> Array:
    """
    :param ratio: ratio of the residual to the noise, shape (..., B), or (..., n, G, G) for groups.
    :param log_one_plus: log(1 + ratio), shape (..., B) or (..., n).
    """
    if bound.name in ("titsias2009", "artemev2021", "conditional"):
        return ratio
    if bound.name in ("fitc", "dtc"):
        return jnp.zeros_like(log_one_plus(ratio))
    if bound.name == "titsias2025":
        return log_one_plus(ratio)
    return (1 - bound.alpha) / bound.alpha * log_one_plus(bound.alpha * ratio)


def log_evidence(sums: Statistics, sizes: Sequence[int], bound: str) -> Array:
    """The collapsed bound in nats, summed over outputs and leading axes, shape ().

    :param sizes: number of inducing variables of each set.
    """
    W, logdet = _factors(sums.gram, sizes)
    num_columns = sums.product.shape[-1]
    fit = _least_square(sums, W)
    charge = sums.charge
    if bound == "artemev2021":
        charge = sums.num * jnp.log1p(charge / jnp.maximum(sums.num, 1))
    per_column = sums.num * jnp.log(2 * jnp.pi) + sums.log_noise + logdet + charge
    return -jnp.sum(num_columns * per_column + fit) / 2


def optimum(sums: Statistics, sizes: Sequence[int]) -> list[tuple[Array, Array]]:
    r"""The best q of each set's whitened variables: :math:`N(\Lambda^{-1} A S^{-1} y, \Lambda_{ii}^{-1})`.

    For one set these are Titsias 2025, Eqs. 29-30, whitened.

    :return: for each set the means, shape (..., M_i, C), and the lower-triangular factor of the covariance, (..., M_i, M_i).
    """
    precision, mean = added_identity(sums.gram), best_mean(sums)
    blocks = [(part, precision[..., part, part]) for part in _parts(sizes)]
    return [(mean[..., part, :], root_of_inverse(P, _scale(P))) for part, P in blocks]


def best_mean(sums: Statistics) -> Array:
    r""":math:`\Lambda^{-1} A S^{-1} y`, the best mean of the whitened variables of all sets, shape (..., M, C)."""
    W = _inverse_cholesky(added_identity(sums.gram))
    mean = lower_matmul_transposed(W, lower_matmul(W, _less_offset(sums.product, sums)))
    return mean if sums.offset is None else sums.offset + mean


def log_upper_bound(sums: Statistics) -> Array:
    r"""An upper bound on log p(y) (Titsias 2014, "Variational inference for Gaussian and determinantal point processes").

    .. math:: \log p(y) \le -\tfrac12 \log |2 \pi (Q_{ff} + S)| - \tfrac12 \tilde y^\top (\tilde Q_{ff} + (1 + t) I)^{-1} \tilde y

    with data scaled by their noise, :math:`\tilde y = S^{-1/2} y`, and :math:`t = \sum_i r_i / \sigma_i^2`, which is at least the
    largest eigenvalue of the scaled residual covariance. The sums must be those of "titsias2009".
    """
    num_columns = sums.product.shape[-1]
    _, logdet = _factors(sums.gram, (sums.gram.shape[-1],))
    noise = 1 + sums.charge
    W = _inverse_cholesky(add_jitter(sums.gram, noise))
    fit = _least_square(sums, W, noise) / noise
    return -jnp.sum(num_columns * (sums.num * jnp.log(2 * jnp.pi) + sums.log_noise + logdet) + fit) / 2


def conditional_gain(sums: Statistics, A: Array, residual: Array, precision: Array) -> Array:
    r"""The gain of the bound of Shi et al. 2020, App. B (Eqs. 11-12), over titsias2009 for each output, at cost O(N^2 M).

    .. math:: \tfrac12 \mathrm{tr}(S^{-1} R) - \tfrac12 \mathrm{tr}\big((Q_{ff} + S)^{-1} R\big)
        = \tfrac12 \mathrm{tr}\big(\Lambda^{-1} A S^{-1} R S^{-1} A^\top\big)

    :param A: projections on the first set, shape (..., M, N).
    :param residual: R, the residual's covariance, shape (..., N, N).
    :param precision: shape (..., N).
    """
    W, _ = _factors(sums.gram, (sums.gram.shape[-1],))
    B = lower_matmul(W, A * precision[..., None, :])
    return jnp.sum(matmul(B, residual) * B, (-2, -1)) / 2


def _least_square(sums: Statistics, W: Array, noise: Array | None = None) -> Array:
    r""":math:`\min_m \sum_i (y_i - a_i^\top m)^2 / \sigma_i^2 + c |m|^2`, shape (...).

    Without an offset this is a small difference of two large numbers, if the signal is far above the noise. With
    :math:`m = m_0 + \delta` the minimum over :math:`\delta` is the same. If :math:`m_0` is near the best m, both numbers are small.

    :param W: inverse Cholesky factor of :math:`A S^{-1} A^\top + c I`.
    :param noise: c, shape (...); by default 1.
    """
    square = sums.square - jnp.sum(lower_matmul(W, _less_offset(sums.product, sums, noise)) ** 2, (-2, -1))
    if sums.offset is None:
        return square
    length = jnp.sum(sums.offset**2, (-2, -1))
    return square + (length if noise is None else noise * length)


def _less_offset(product: Array, sums: Statistics, noise: Array | None = None) -> Array:
    if sums.offset is None:
        return product
    return product - (sums.offset if noise is None else noise[..., None, None] * sums.offset)


def _factors(outer: Array, sizes: Sequence[int]) -> tuple[Array, Array]:
    r"""The inverse Cholesky factor of :math:`\Lambda` and :math:`\sum_i \log |\Lambda_{ii}|`."""
    precision = added_identity(outer)
    W = _inverse_cholesky(precision)
    # The first block of the factor is the factor of the first block.
    diagonals = [diagonal(W)[..., : sizes[0]]]
    for part in _parts(sizes)[1:]:
        diagonals.append(diagonal(_inverse_cholesky(precision[..., part, part])))
    return W, -2 * jnp.sum(jnp.log(jnp.concatenate(diagonals, -1)), -1)


def _parts(sizes: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise([0, *accumulate(sizes)])]


def _inverse_cholesky(precision: Array) -> Array:
    # In exact arithmetic it is at least the identity, but rounding in sums over millions of points may break this.
    return inverse_cholesky(precision, _scale(precision))


def _scale(precision: Array) -> Array:
    return diagonal(precision).mean(-1)
