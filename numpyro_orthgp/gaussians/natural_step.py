r"""Natural-gradient steps of Gaussians over whitened inducing variables.

For q = N(m, S) with natural parameters :math:`(S^{-1} m, -S^{-1} / 2)` the natural gradient is the gradient with respect to
the expectation parameters :math:`(m, S + m m^\top)`. A step of length :math:`\gamma` against the gradient of a loss is

.. math:: S'^{-1} = S^{-1} + 2 \gamma \nabla_S, \qquad m' = m - \gamma S' \nabla_m

(Hensman, Fusi, Lawrence 2013, Sec. 3.2; Salimbeni, Eleftheriadis, Hensman 2018, Sec. 2; the mean written with the new
covariance). With :math:`S = T T^\top` the update of the precision is multiplicative,

.. math:: S' = T Q^{-1} T^\top, \qquad Q = I + 2 \gamma\, T^\top \nabla_S T,

and :math:`2\, T^\top \nabla_S T` is the symmetric matrix with the lower triangle of :math:`T^\top \nabla_T`. So no possibly
ill-conditioned matrix is inverted. The new covariance is positive definite exactly if Q is; otherwise the step is shortened to half
the way to the edge.

In terms of T the step is T' = T F with F F' = (I + rate G)^-1, and G the symmetric matrix with that lower triangle. I + rate G
shows whether the step stays inside the positive-definite cone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.math.cholesky import root_of_inverse
from numpyro_orthgp.math.products import lower_matmul, matmul, transpose
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["diagonal_step", "full_step", "precondition"]


def full_step(loc: Array, scale_tril: Array, d_loc: Array, d_scale_tril: Array, rate: ArrayLike) -> tuple[Array, Array]:
    """One step of length ``rate`` for a full covariance, shortened if it would leave the positive-definite cone.

    :param loc: m, shape (..., M).
    :param scale_tril: the lower-triangular T, shape (..., M, M).
    :param d_loc: derivatives of a loss with respect to m.
    :param d_scale_tril: derivatives with respect to T.
    :return: the next m and T.
    """
    F, rate = _inside_full(_symmetric(matmul(transpose(scale_tril), jnp.tril(d_scale_tril))), rate)
    scale = jnp.tril(lower_matmul(scale_tril, F))
    ahead = matmul(scale, matmul(transpose(scale), d_loc[..., None]))[..., 0]
    return loc - rate * ahead, scale


def diagonal_step(loc: Array, scale: Array, d_loc: Array, d_scale: Array, rate: ArrayLike) -> tuple[Array, Array]:
    """One step, as :func:`full_step`, for independent variables.

    :param loc: means, shape (..., M).
    :param scale: standard deviations, shape (..., M).
    """
    Q, rate = _inside_diagonal(scale * d_scale, rate)
    scale = scale / jnp.sqrt(Q)
    return loc - rate * scale**2 * d_loc, scale


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def precondition(weights: Array, root: Array, diagonal: bool) -> Array:
    r"""``weights`` unchanged, but their gradient g arrives as :math:`C^{-1} g`.

    This is for the weights a of mean-only points, whose Fisher matrix is their prior covariance C given the sets (Salimbeni, Cheng,
    Boots, Deisenroth 2018, Eq. 16a; with only the diagonal of C, Eq. 17).

    :param weights: shape (..., H).
    :param root: W with :math:`W^\top W = C^{-1}`, shape (..., H, H); (..., H) if ``diagonal``. It has no gradient.
    :param diagonal: whether C is diagonal.
    """
    return weights


def _precondition_fwd(weights: Array, root: Array, diagonal: bool) -> tuple[Array, Array]:
    return weights, root


def _precondition_bwd(diagonal: bool, root: Array, g: Array) -> tuple[Array, Array]:
    if diagonal:
        return root**2 * g, jnp.zeros_like(root)
    return matmul(transpose(root), matmul(root, g[..., None]))[..., 0], jnp.zeros_like(root)


precondition.defvjp(_precondition_fwd, _precondition_bwd)


def _inside_full(G: Array, rate: ArrayLike) -> tuple[Array, Array]:
    """The lower-triangular F with F F' = (I + rate G)^-1, and the ``rate``, shortened if needed; shapes (..., M, M), (..., 1)."""
    eye = jnp.eye(G.shape[-1], dtype=G.dtype)
    # A pivot below rounding error counts as zero; F has the inverses of pivots on its diagonal.
    floor = jnp.sqrt(jnp.finfo(G.dtype).eps * G.shape[-1])

    def root(rate: Array) -> Array:
        return root_of_inverse(eye + rate[..., None] * G)

    full = jnp.broadcast_to(jnp.asarray(rate, G.dtype), (*G.shape[:-2], 1))
    F = root(full)
    outside = ~(jnp.diagonal(F, axis1=-2, axis2=-1) < 1 / floor).all(-1, keepdims=True)

    def shorten() -> tuple[Array, Array]:
        # At half the way to the edge I + rate G >= I / 2, so a shortened step at most doubles a variance.
        kept = jnp.where(outside, _half_way(jnp.linalg.eigvalsh(G)[..., :1], full), full)
        return root(kept), kept

    # Rarely needed, and an eigenvalue costs as much as many factors.
    return lax.cond(outside.any(), shorten, lambda: (F, full))


def _inside_diagonal(g: Array, rate: ArrayLike) -> tuple[Array, Array]:
    """1 + rate g, and the ``rate``, shortened if needed; shapes (..., M), (..., 1)."""
    least = jnp.min(g, axis=-1, keepdims=True)
    kept = jnp.where(1 + rate * least > jnp.finfo(g.dtype).eps, rate, _half_way(least, rate))
    return 1 + kept * g, kept


def _half_way(least: Array, rate: ArrayLike) -> Array:
    """Half the rate at which ``1 + rate least`` is zero, if ``least`` is negative enough to matter."""
    return jnp.minimum(0.5 / jnp.maximum(-least, jnp.finfo(least.dtype).tiny), rate)


def _symmetric(X: Array) -> Array:
    """The symmetric matrix with the lower triangle of ``X``."""
    return jnp.tril(X) + transpose(jnp.tril(X, -1))
