r"""Gaussians over whitened inducing variables, whose prior is :math:`N(0, I)`.

One small pytree, :class:`Whitened`, stands for every family that a guide may use and for a known value; the functions
beside it are all that the rest of the package asks of a family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp

from numpyro_orthgp.math.linalg import PRECISION, combine, diagonal, solve_lower
from numpyro_orthgp.math.triangular import lower_matmul_transposed
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["COVARIANCES", "Whitened", "kl_from_prior", "log_density", "principal_axes", "sample", "spread"]

COVARIANCES = ("full", "diagonal", "prior")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Whitened:
    r"""What is known of one set's whitened inducing variables :math:`e`, batch axes leading.

    :param loc: mean, or the value itself, shape (..., M).
    :param scale: for "full" the lower-triangular :math:`T` of :math:`S = T T^\top`, shape (..., M, M); for "diagonal" the
        standard deviations, shape (..., M); else ``None``.
    :param covariance: "full", "diagonal", "prior" (:math:`S = I`) or "value" (:math:`S = 0`).
    """

    loc: Array
    scale: Array | None
    covariance: Literal["full", "diagonal", "prior", "value"] = field(metadata={"static": True})


def spread(q: Whitened, A: Array) -> Array | None:
    r"""A matrix :math:`W` with :math:`W^\top W = A^\top S A`, the covariance that ``q`` explains at the inputs of ``A``.

    :param A: projections, shape (..., M, B).
    :return: shape (..., M, B), or ``None`` for a known value, which spreads nothing.
    """
    if q.covariance == "full":
        assert q.scale is not None
        return lower_matmul_transposed(q.scale, A)
    if q.covariance == "diagonal":
        assert q.scale is not None
        return q.scale[..., None] * A
    return A if q.covariance == "prior" else None


def principal_axes(q: Whitened) -> tuple[Array, Whitened]:
    r"""``q`` of full covariance in coordinates in which that is diagonal.

    :return: the orthogonal :math:`V` of :math:`S = V \, \mathrm{diag}(s^2) V^\top`, shape (..., M, M), and the law of
        :math:`V^\top e`.
    """
    assert q.scale is not None
    # Singular values of the root: eigenvalues of S itself would be lost below its largest one's rounding errors.
    V, scale, _ = jnp.linalg.svd(q.scale)
    loc = combine(q.loc, V)
    return V, Whitened(loc, jnp.broadcast_to(scale, loc.shape), "diagonal")


def kl_from_prior(q: Whitened) -> Array:
    r"""Divergence of ``q`` from the whitened prior, summed over batch axes.

    .. math:: KL[N(m, S) \,\|\, N(0, I)] = \tfrac12 \left( |m|^2 + \mathrm{tr}\, S - M - \log |S| \right)

    :return: in nats, shape ().
    """
    shift = jnp.sum(q.loc**2)
    if q.covariance == "prior":
        return shift / 2
    assert q.scale is not None
    # tr S - M entry by entry: exact zero at S = I, with no large terms to cancel.
    unit = jnp.eye(q.scale.shape[-1], dtype=q.scale.dtype) if q.covariance == "full" else 1
    trace = jnp.sum(q.scale**2 - unit)
    return (shift + _sharing(q) * trace) / 2 - _sharing(q) * jnp.sum(jnp.log(jnp.abs(_diagonal(q))))


def sample(q: Whitened, rng_key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
    """Draws from ``q``, shape ``sample_shape`` + (..., M)."""
    noise = jax.random.normal(rng_key, sample_shape + q.loc.shape, q.loc.dtype)
    if q.covariance == "full":
        return q.loc + jnp.einsum("...km,...m->...k", q.scale, noise, precision=PRECISION)
    if q.covariance == "value":
        return jnp.broadcast_to(q.loc, noise.shape)
    return q.loc + (noise if q.scale is None else q.scale * noise)


def log_density(q: Whitened, value: Array) -> Array:
    """Log density of ``q`` at ``value``, shape (sample_shape) + (..., M), the batch axes of ``q`` summed."""
    centred = value - q.loc
    logdet = jnp.zeros((), q.loc.dtype)
    if q.covariance == "full":
        assert q.scale is not None
        centred = solve_lower(q.scale, centred[..., None])[..., 0]
    elif q.scale is not None:
        centred = centred / q.scale
    if q.scale is not None:
        logdet = _sharing(q) * jnp.sum(jnp.log(jnp.abs(_diagonal(q))))
    event = tuple(range(-q.loc.ndim, 0))
    return -jnp.sum(centred**2, event) / 2 - logdet - q.loc.size * jnp.log(2 * jnp.pi) / 2


def _sharing(q: Whitened) -> int:
    """How many functions have each covariance: those of a ``CollapsedGP`` with several outputs may have one together."""
    return q.loc.size // _diagonal(q).size


def _diagonal(q: Whitened) -> Array:
    assert q.scale is not None
    return diagonal(q.scale) if q.covariance == "full" else q.scale
