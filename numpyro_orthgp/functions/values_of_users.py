"""Whether kernels and features that users wrote, functions or classes, are covariances, and variances those of the matrix.

It looks at values at inducing variables, if they are concrete. A kernel that is none would give NaN, or wrong numbers in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.closures import Closure
from numpyro_orthgp.errors import inspect
from numpyro_orthgp.inducing import Feature, InducingPoints
from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.math.products import diagonal
from numpyro_orthgp.types import Array, KernelLike

__all__ = ["check_values_of_users"]

_HERE = __name__.partition(".")[0] + "."
_FEW = 8  # inducing points at which variances of a kernel are compared with its matrix
_MANY = 32  # at which this matrix is looked at
_SMALL = 0.99  # the part of it that variances must have
_WRONG = 0.01  # asymmetry, or negative eigenvalues, beside the largest variance; rounding of distances is less


def check_values_of_users(kernel: KernelLike, features: Sequence[Feature], covariances: Sequence[Array]) -> None:
    """Refuse kernels and features of users that are no covariances, if their values are concrete.

    :param covariances: of each set with itself, shapes (..., M, M).
    :raises ValueError: if a kernel's variances are smaller than its diagonal; if a covariance is not symmetric, or has negative
        eigenvalues.
    """
    first = features[0]
    if isinstance(first, InducingPoints) and first.points.ndim == 2 and _is_foreign(kernel):
        inspect(_refuse_small, kernel(first.points[:_FEW]), diagonal(covariances[0])[..., :_FEW])
        inspect(partial(_refuse_no_covariance, "`kernel(Z, Z)`"), covariances[0][..., :_MANY, :_MANY])
    for feature, K in zip(features, covariances, strict=True):
        if not type(feature).__module__.startswith(_HERE):
            inspect(partial(_refuse_no_covariance, f"`covariance` of {type(feature).__name__}"), K[..., :_MANY, :_MANY])


def _is_foreign(kernel: KernelLike) -> bool:
    """Whether a kernel, or a part of it, was written elsewhere: a function, or a subclass."""

    def is_theirs(part: Any) -> bool:
        return isinstance(part, Closure) or (isinstance(part, Kernel) and not type(part).__module__.startswith(_HERE))

    return any(map(is_theirs, jax.tree.leaves(kernel, is_leaf=is_theirs)))


def _refuse_small(variances: Array, of_matrix: Array) -> None:
    """They may be larger, since white noise is in variances only."""
    wrong = np.ravel(variances < _SMALL * of_matrix)
    if wrong.any():
        i = int(np.argmax(wrong))
        pair = [float(np.ravel(jnp.broadcast_to(v, jnp.shape(of_matrix)))[i]) for v in (variances, of_matrix)]
        raise ValueError(
            "`kernel(X)` must be the diagonal of `kernel(X, X)`, or larger by a variance of white noise; got {:.3g} for {:.3g}. "
            "Does a factor stand in one of the two only?".format(*pair)
        )


def _refuse_no_covariance(what: str, values: Array) -> None:
    K = np.asarray(values, float)
    if not np.isfinite(K).all():
        return
    size = np.diagonal(K, axis1=-2, axis2=-1).max()
    *latent, i, j = np.unravel_index(np.argmax(np.abs(K - np.swapaxes(K, -1, -2))), K.shape)
    there, back = K[(*latent, i, j)], K[(*latent, j, i)]
    if abs(there - back) > _WRONG * size:
        raise ValueError(
            f"{what} must be symmetric; got {there:.3g} for the inducing variables {i} and {j}, and {back:.3g} for {j} and "
            f"{i}. Does a hyperparameter with one entry per function lack its axes (kernels.per_latent)?"
        )
    least = np.linalg.eigvalsh(K).min()
    if least < -_WRONG * size:
        raise ValueError(
            f"{what} must be a covariance, without negative eigenvalues; got {least:.3g} beside variances of {size:.3g}. "
            "No Gaussian process has this kernel. Steps of a distance are none, nor need exp(-d^2) be one where d is not "
            "Euclidean, as for graphs and strings. Of a graph's Laplacian, expm(-L) is one."
        )
