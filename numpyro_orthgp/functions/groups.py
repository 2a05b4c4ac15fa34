r"""The residual within groups of rows, which gives a tighter bound than single rows.

Given the inducing variables of all sets, let the residual at the rows of the data have covariance D, and the noise the
variances in S. With :math:`\tilde D = S^{-1/2} D S^{-1/2}` the variational distribution gives the residual the covariance

.. math:: S^{1/2} \tilde D^{1/2} V \tilde D^{1/2} S^{1/2}

instead of D. V has one block for each group b of rows. It enters the bound as

.. math:: -\tfrac12 \sum_b \big( \mathrm{tr}(V_b \tilde D_{bb}) + \mathrm{tr}\, V_b - \log |V_b| - |b| \big)
    = -\tfrac12 \sum_b \log |I + \tilde D_{bb}| \quad \text{at the best } V_b = (I + \tilde D_{bb})^{-1},

since the trace of :math:`\tilde D^{1/2} V \tilde D^{1/2}` equals that of :math:`V \tilde D`, which depends only on the blocks of D
(Bui and Titsias 2025). Groups of one row give Titsias 2025, Eq. 19. By Fischer's inequality, joining groups never hurts.

Gaussian noise needs only the trace. Another likelihood needs the variance of each row, the diagonal of
:math:`\tilde D^{1/2} V \tilde D^{1/2}`. This takes the root of all of D, unless V is a multiple of the identity
(``docs/theory/tightened.md``).

**Groups are consecutive rows** of the inputs of f. So a model does not mention them, and batches consist of whole groups. Any
groups give a bound; groups of nearby rows give a better one (:func:`numpyro_orthgp.init.groups`).

**Few groups in a batch.** Rows of a group have similar losses, so a batch of groups says less than one of rows from anywhere. But
what groups change is one term of a sum, and it does not depend on y. So a batch of B rows may have single rows from anywhere, and
n groups at its end that stand for all rows in that term alone. Let :math:`\ell_i` be what a single row adds to the bound, with
the charge :math:`c_i`, and :math:`c^b_i` the charge of a row in a group. Then a row counts as

.. math:: \frac{B}{B - n G}\, \ell_i \text{ before the groups}, \qquad \frac{B}{n G}\,\tfrac12 (c_i - c^b_i) \text{ in one}.

The mean over batches is that of batches of groups.

**Uncertain inputs.** Let inputs be Gaussian and independent of each other, and V not depend on them. The bound then depends on V
through the expected trace. :math:`E \tilde D_{bb}` replaces :math:`\tilde D_{bb}`, and the best :math:`V_b` is
:math:`(I + E \tilde D_{bb})^{-1}`. Off the diagonal :math:`E[A(x_i)^\top A(x_j)] = E[A(x_i)]^\top E[A(x_j)]`.

**Missing outputs** have unknown noise, so their rows are removed from :math:`\tilde D` (``likelihoods/masks.py``). The remaining
cost is not that of a sum over rows with some left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_orthgp.kernels.expectations import between_rows
from numpyro_orthgp.math.blocks import map_blocks
from numpyro_orthgp.math.grouped import (
    added_identity,
    cut_groups,
    group_inverse,
    in_groups,
    join_groups,
    log_pivots,
    scale_groups,
)
from numpyro_orthgp.math.linalg import safe_sqrt, with_derivative_of
from numpyro_orthgp.math.products import diagonal
from numpyro_orthgp.types import Array

__all__ = ["best_scales", "charges", "covariance_of_groups", "moments_of_groups", "shares"]


def covariance_of_groups(kernel: Any, X: Array, grams: Array, residual: Array, scale: Array | None = None) -> Array:
    r"""The residual's covariance within groups of consecutive inputs, shape (..., n, G, G).

    :param X: shape (B, D). If B is larger than n G, groups are the last rows.
    :param grams: :math:`\sum_i A_i^\top A_i` of the groups, shape (..., n, G, G).
    :param residual: its variances, shape (..., B); more precise than the diagonal of a difference of matrices.
    :param scale: standard deviations of uncertain inputs with means X, shape (B, D). Then ``grams`` are those of E[A], and the
        result is the expected covariance.
    :raises ValueError: for uncertain inputs, if expectations of the kernel are not known.
    """
    size = grams.shape[-1]

    def cut(rows: Array) -> Array:  # (n, G, D)
        return jnp.moveaxis(cut_groups(in_groups(rows.T, grams), size, "edge"), 0, -1)

    if scale is None:
        K = jax.vmap(lambda rows: kernel(rows, rows), out_axes=-3)(cut(X))
    else:
        K = jax.vmap(partial(between_rows, kernel))(cut(X), cut(scale))
    variances = cut_groups(in_groups(residual, grams), size)
    # No covariance is larger than that of equal rows. Those of rounding, of many points, may be by far.
    most = safe_sqrt(variances)
    most = most[..., :, None] * most[..., None, :]
    between = with_derivative_of(jnp.clip(K - grams, -most, most), K - grams)
    return jnp.where(jnp.eye(size, dtype=bool), variances[..., None], between)


def moments_of_groups(of: Callable[[Array], Any], X: Array, G: int, size: int) -> Any:
    """Moments of many inputs, block by block. Rows of a block are not consecutive, so blocks consist of whole groups. A shorter
    last group is computed separately.

    :param of: maps inputs to arrays with one row per input, the last of which is the residual's covariance within groups.
    :param X: shape (B, D).
    :param size: number of rows of a block.
    """
    whole = len(X) // G * G

    def of_block(groups: Array) -> tuple[Array, ...]:
        *moments, covariances = of(groups.reshape(-1, X.shape[-1]))
        return *(a.reshape(-1, G, *a.shape[1:]) for a in moments), jnp.moveaxis(covariances, -3, 0)

    if len(X) <= size or not whole:
        return of(X)
    *moments, covariances = map_blocks(of_block, X[:whole].reshape(-1, G, X.shape[-1]), max(size // G, 1))
    found = *(a.reshape(-1, *a.shape[2:]) for a in moments), jnp.moveaxis(covariances, 0, -3)
    if whole == len(X):
        return found
    *last, short = of(X[whole:])
    parts = (jnp.concatenate(pair) for pair in zip(found[:-1], last, strict=True))
    return *parts, jnp.concatenate([found[-1], short], -3)


def charges(groups: Array, residual: Array, scale: Array) -> Array:
    r"""The cost of the residual in the bound, :math:`\log |I + \tilde D_{bb}|`, divided among the rows of each group.

    Each row has the logarithm of its variance given the rows before it, so that the result stays a bound if a row stands for
    several, and its cost is multiplied by a weight above one. If there are few groups at the end, rows before them have the charge
    of single rows, and rows in them what groups change.

    :param groups: D, shape (..., n, G, G); zero for rows without an output.
    :param residual: its variances, shape (..., B).
    :param scale: standard deviations of the noise, shape (..., B).
    :return: shape (..., B).
    """
    last = in_groups(scale, groups).shape[-1]
    pivots = join_groups(log_pivots(added_identity(scale_groups(groups, 1 / scale))), last)
    if last == scale.shape[-1]:
        return pivots
    single = jnp.log1p(residual / scale**2)
    return jnp.concatenate([single[..., :-last], pivots - single[..., -last:]], -1)


def shares(groups: Array, num_rows: int) -> tuple[Array, Array] | None:
    """Weights of what a row adds by its output, and of its charge, both shape (B,); ``None`` if all rows are in groups."""
    rows = jnp.zeros(num_rows, groups.dtype)
    last = in_groups(rows, groups).size
    if last == num_rows:
        return None
    of_outputs = rows.at[:-last].set(num_rows / (num_rows - last))
    return of_outputs, of_outputs.at[-last:].set(num_rows / last)


def best_scales(groups: Array, residual: Array, scale: Array) -> Array:
    """The diagonal of the best V, shape (..., B); arguments as for :func:`charges`."""
    last = in_groups(scale, groups).shape[-1]
    V = join_groups(diagonal(group_inverse(added_identity(scale_groups(groups, 1 / scale)))), last)
    return jnp.concatenate([(1 / (1 + residual / scale**2))[..., :-last], V], -1)
