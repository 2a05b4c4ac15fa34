"""Matrices within groups of consecutive rows: blocks on the diagonal of a large matrix, of which nothing else is formed.

Rows 0 to G - 1 are the first group, G to 2 G - 1 the second. A last group that is shorter is filled up with zeros, in
matrices that are added to the identity: they change neither determinants nor the other rows. If there are fewer groups than
rows to fill them, the groups are those at the end, and the rows before them are in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_orthgp.math.cholesky import change_of_inverse, inverse_factor
from numpyro_orthgp.math.products import PRECISION, diagonal
from numpyro_orthgp.types import Array

__all__ = [
    "Grouping", "added_identity", "cut_groups", "gram_of_groups", "group_inverse", "group_whitener", "in_groups", "join_groups",
    "log_det", "log_pivots", "scale_groups", "solve_groups",
]  # fmt: skip


class Grouping(NamedTuple):
    """Which rows of a batch are in groups.

    :param size: G, the number of rows in a group.
    :param num: the number of groups, at the end of the batch; ``None`` if all rows are in groups.
    """

    size: int
    num: int | None = None

    def start(self, num_rows: int) -> int:
        """Position of the first row that is in a group."""
        return 0 if self.num is None else max(num_rows - self.num * self.size, 0)


def cut_groups(x: Array, size: int, fill: str = "constant") -> Array:
    """Entries of rows by groups: (..., B) to (..., n, G), the last group filled up with zeros, or with the last row ("edge")."""
    missing = -x.shape[-1] % size
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode=fill) if missing else x
    return filled.reshape(*x.shape[:-1], -1, size)


def join_groups(x: Array, num: int) -> Array:
    """What :func:`cut_groups` cut: (..., n, G) to (..., B) for B = ``num``."""
    return x.reshape(*x.shape[:-2], -1)[..., :num]


def gram_of_groups(matrices: Sequence[Array], size: int, num: int | None = None) -> Array:
    """The sum of ``A' A`` within groups of columns, (..., n, G, G), over matrices A of shapes (..., M, B).

    :param num: n, if only the last columns are in groups; by default all are.
    """
    cut = [cut_groups(A if num is None else A[..., -num * size :], size) for A in matrices]
    grams = [jnp.einsum("...mng,...mnh->...ngh", A, A, precision=PRECISION) for A in cut]
    return sum(grams[1:], start=grams[0])


def in_groups(x: Array, C: Array) -> Array:
    """Of entries of all rows, (..., B), those of the rows in the groups of C, shape (..., n, G, G): the last ones."""
    return x[..., -C.shape[-3] * C.shape[-1] :]


def scale_groups(C: Array, factor: Array) -> Array:
    """``diag(a) C diag(a)`` of every group, C of shape (..., n, G, G) and the factors a of all rows, (..., B)."""
    a = cut_groups(in_groups(factor, C), C.shape[-1])
    return a[..., :, None] * C * a[..., None, :]


def added_identity(C: Array) -> Array:
    """``I + C``."""
    return C + jnp.broadcast_to(jnp.eye(C.shape[-1], dtype=C.dtype), C.shape)


def log_det(C: Array) -> Array:
    """``log |C|`` of symmetric matrices that are the identity plus a covariance, (..., G, G) to (...)."""
    return jnp.sum(log_pivots(C), -1)


@jax.custom_jvp
def log_pivots(C: Array) -> Array:
    """The logarithm of each row's variance given the rows before it, (..., G, G) to (..., G). Their sum is ``log |C|``."""
    return -2 * jnp.log(diagonal(group_whitener(C)))


@log_pivots.defjvp
def _log_pivots_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # No derivative of a factor. Backward, equal weights of all rows make it the inverse.
    (C,), (dC,) = primals, tangents
    W, dC = _factored(C, dC)
    return -2 * jnp.log(diagonal(W)), jnp.sum(jnp.einsum("...gi,...ij->...gj", W, dC, precision=PRECISION) * W, -1)


def group_inverse(C: Array) -> Array:
    """The inverse of such matrices."""
    W = group_whitener(C)
    return jnp.einsum("...kg,...kh->...gh", W, W, precision=PRECISION)


def solve_groups(C: Array, x: Array) -> Array:
    """``C^-1 x`` of such matrices, (..., G, G) and (..., G) to (..., G), refined once: in float32 they may have few digits."""
    W = group_whitener(C)

    def approximately(x: Array) -> Array:
        whitened = jnp.einsum("...kg,...g->...k", W, x, precision=PRECISION)
        return jnp.einsum("...kg,...k->...g", W, whitened, precision=PRECISION)

    solution = approximately(x)
    return solution + approximately(x - jnp.einsum("...gh,...h->...g", C, solution, precision=PRECISION))


@jax.custom_jvp
def group_whitener(C: Array) -> Array:
    """The inverse of the Cholesky factor of such matrices.

    No eigenvalue is below one, but for rounding. Where rounding leaves no factor, as in float32 with little noise, the group is cut
    into single rows: a bound stays one. Each group is on its own, so groups on several devices need not wait for each other.
    """
    return _factored(C, C)[0]


@group_whitener.defjvp
def _group_whitener_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    W, dC = _factored(*primals, *tangents)
    return W, change_of_inverse(W, dC)


def _factored(C: Array, dC: Array) -> tuple[Array, Array]:
    """The inverse factor of ``C``, and what of ``dC`` it depends on."""
    W = inverse_factor(C, of_rows=True)
    whole = jnp.isfinite(W).all((-2, -1), keepdims=True)
    single = jnp.broadcast_to(jnp.eye(C.shape[-1], dtype=bool), C.shape)
    alone = jnp.where(single, jax.lax.rsqrt(jnp.maximum(diagonal(C), 1))[..., None], 0)
    return jnp.where(whole, W, alone), jnp.where(whole | single, dC, 0)
