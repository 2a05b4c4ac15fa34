"""White noise as a covariance function."""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_orthgp.kernels.base import Kernel
from numpyro_orthgp.kernels.hyperparameters import hyperparameter, per_latent
from numpyro_orthgp.types import Array, ArrayLike

__all__ = ["White"]


class White(Kernel):
    r"""An independent value at every input: :math:`k(x, y) = c` where :math:`x = y` exactly, 0 elsewhere.

    It is a true covariance function: it compares the values of two inputs, not their row numbers. Its
    derivative with respect to the inputs is zero.

    :param value: the variance :math:`c`, shape () or (P,).
    """

    value: ArrayLike = hyperparameter(zero=True)

    def matrix(self, X1: Array, X2: Array) -> Array:
        value = per_latent("value", self.value, X1)
        equal = (X1[..., :, None, :] == X2[..., None, :, :]).all(axis=-1)  # (..., n, m)
        return value * equal.astype(jnp.result_type(X1, X2))

    def diagonal(self, X: Array) -> Array:
        return per_latent("value", self.value, X, axes=1) * jnp.ones(X.shape[:-1], X.dtype)
