r"""The covariance of f within groups of rows that enter one y, such as the nodes of an area.

Under q it is :math:`\sum_i A_i^\top S_i A_i + v\,(K - \sum_i A_i^\top A_i)` for the rows of a group. With Q rows per group it costs
Q times as much as variances. A draw of f at all rows would need the covariance of all rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_orthgp.functions.arithmetic import draw_scaled, draw_shifted
from numpyro_orthgp.functions.draws import draw_process
from numpyro_orthgp.functions.runs import DrawInRun
from numpyro_orthgp.inducing.functional import Concatenated
from numpyro_orthgp.inducing.rows import Rows, covariance_of_rows
from numpyro_orthgp.math.cholesky import safe_cholesky
from numpyro_orthgp.math.linalg import add_jitter, default_jitter, jitter_scale
from numpyro_orthgp.math.products import PRECISION, diagonal
from numpyro_orthgp.types import Array

__all__ = ["root_within"]


def root_within(joint: Any, size: int) -> Array | None:
    """Factors L with L L' the covariance of each group of consecutive rows, shape (B / size, size, size).

    :param joint: ``joint`` of marginals of shape (B,).
    :return: the factors; ``None`` unless there is one function, shifted and scaled, thus for mixed functions, tasks and layers.
    """
    C = _covariance(joint, size)
    if C is None:
        return None
    scale = jitter_scale(diagonal(C))
    return safe_cholesky(add_jitter(C, default_jitter(C.dtype) * scale), scale)


def _covariance(joint: Any, size: int) -> Array | None:
    if not isinstance(joint, Partial | DrawInRun) or joint.func is None:
        return None
    if joint.func is draw_process:
        f, X = joint.args
        return _of_function(f, X, size)
    if joint.func is draw_shifted:
        return _covariance(joint.args[0], size)
    if joint.func is draw_scaled:
        beneath, factor = joint.args
        C = _covariance(beneath, size)
        if C is None or factor.ndim > 1:
            return None
        factor = jnp.broadcast_to(factor, (len(C) * size,)).reshape(-1, size, 1)
        return C * factor * jnp.swapaxes(factor, 1, 2)
    return None


def _of_function(f: Any, X: Rows, size: int) -> Array | None:
    if f.num_latents is not None or isinstance(X, Concatenated):
        return None
    groups = jax.tree.map(lambda a: a.reshape(-1, size, *a.shape[1:]), X)
    A = f.project(X)
    residual = jax.vmap(lambda rows: covariance_of_rows(f.kernel, rows))(groups) - sum(_gram(a, size) for a in A)
    C = residual if f.residual_scale is None else f.residual_scale * residual
    for q, Ai in zip(f.beliefs, A, strict=True):
        W = q.spread(Ai)
        C = C if W is None else C + _gram(W, size)
    return C


def _gram(A: Array, size: int) -> Array:
    """A' A of each group of columns, (M, B) to (B / size, size, size)."""
    A = A.reshape(len(A), -1, size)
    return jnp.einsum("mgq,mgr->gqr", A, A, precision=PRECISION)
