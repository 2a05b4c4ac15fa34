"""Inducing variables that are values of the function at points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from numpyro_orthgp.errors import check_inputs
from numpyro_orthgp.inducing.feature import Feature
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.math.products import combine_columns
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["InducingPoints", "MeanOnly", "covariance_of_points", "weighted_covariance"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InducingPoints:
    """Inducing variables that are values of the function: u = f(Z).

    :param points: inputs Z, shape (M, D), same units as the data's inputs; or (P, M, D), other points for each of P latent
        functions.
    """

    points: Array

    @property
    def num(self) -> int:
        return self.points.shape[-2]

    @property
    def dtype(self) -> Any:
        return self.points.dtype

    def covariance(self, kernel: KernelLike, other: Feature) -> Array:
        if other is self:
            return covariance_of_points(kernel, self.points, self.points)
        # Points are inputs, so every other feature has this covariance.
        return other.covariance_with_inputs(kernel, self.points).swapaxes(-1, -2)

    def covariance_with_inputs(self, kernel: KernelLike, X: Array) -> Array:
        return covariance_of_points(kernel, self.points, X)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanOnly:
    r"""Points that shape only the posterior mean (ODVGP, Salimbeni et al. 2018), in the orthogonal complement of all sets.

    Their posterior covariance is the prior's. So they need no Cholesky factor, and the cost is linear in their number H. With
    weights :math:`a` the mean gains :math:`(k(x, \Gamma) - \sum_i A_i(x)^\top A_i(\Gamma)) a`, and the bound loses
    :math:`a^\top C a / 2`.

    >>> import jax.numpy as jnp, numpyro
    >>> from numpyro_orthgp import MeanOnly, gp, kernels
    >>> X = jnp.linspace(0.0, 1.0, 100)[:, None]
    >>> with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as sites:
    ...     f = gp("f", kernels.RBF(0.3), [X[::20], MeanOnly(X[::2])])
    >>> {name: site["value"].shape for name, site in sites.items() if name != "f.u1_kl"}
    {'f.u0': (5,), 'f.u1_weights': (50,)}

    :param points: inputs Gamma, shape (H, D) or (P, H, D), same units as the data's inputs.
    :param subsample_size: number of columns of the H x H matrix C in the penalty at each step, picked at random (unbiased) if the
        model has a random key. ``None`` takes all columns.
    :raises ValueError: if ``subsample_size`` is not between 1 and H.
    """

    points: Array
    subsample_size: int | None = field(default=None, metadata={"static": True})

    @property
    def num(self) -> int:
        return self.points.shape[-2]

    def checked(self, name: str) -> MeanOnly:
        """Self, with its points checked under the name that the user knows."""
        points = check_inputs(name, self.points, latents=True)
        size = self.subsample_size
        if size is not None and not 1 <= size <= self.num:
            raise ValueError(
                f"`subsample_size` must be between 1 and H = {self.num}, the number of mean-only points; got {size}."
            )
        return MeanOnly(points, size)


def covariance_of_points(kernel: KernelLike, X1: Array, X2: Array) -> Array:
    """The covariance matrix of two sets of points. Either set may differ between latent functions.

    :param X1: shape (n, D) or (P, n, D).
    :param X2: shape (m, D) or (P, m, D).
    :return: shape (n, m), or (P, n, m) if points or hyperparameters have a leading axis of P.
    :raises ValueError: if the kernel returns another shape, or has hyperparameters for another number of latent functions.
    """
    expected = (X1.shape[-2], X2.shape[-2])
    if X1.ndim == X2.ndim == 2:
        return _check_matrix(kernel(X1, X2), expected)
    P = max(X1.shape, X2.shape, key=len)[0]
    one = [jax.ShapeDtypeStruct(X.shape[-2:], X.dtype) for X in (X1, X2)]
    shape = _check_matrix(jax.eval_shape(kernel, *one), expected).shape
    if shape[:-2] not in ((), (P,)):
        raise ValueError(
            f"The inducing points have a leading axis of {P}, one set of points for each latent function, but the kernel's "
            f"hyperparameters one of {shape[0]}."
        )
    if shape[:-2] == (P,):
        return _check_matrix(kernel(X1, X2), (P, *expected))
    # A kernel without a latent axis may be any function of two matrices.
    if X2 is X1:
        return jax.vmap(lambda X: kernel(X, X))(X1)
    return jax.vmap(kernel, in_axes=tuple(0 if X.ndim == 3 else None for X in (X1, X2)))(X1, X2)


def weighted_covariance(kernel: KernelLike, feature: Feature, X: Array, weights: Array) -> Array:
    """K(Z, X) weights for a feature, shape (..., M).

    :param X: shape (B, D), or (P, B, D) for another set's points.
    :param weights: shape (..., B).
    """
    if isinstance(feature, InducingPoints) and isinstance(kernel, Kernel) and feature.points.ndim == X.ndim == 2:
        return kernel.weighted_sum(feature.points, X, weights)
    return combine_columns(feature.covariance_with_inputs(kernel, X), weights)


def _check_matrix(K: Any, expected: tuple[int, ...]) -> Any:
    if K.shape[-len(expected) :] != expected:
        raise ValueError(
            f"`kernel(X1, X2)` must have shape {expected} for {expected[-2]} and {expected[-1]} inputs, or (P, n, m); "
            f"got {K.shape}. A kernel takes two matrices of inputs, not two points."
        )
    return K
