"""The models: ordinary NumPyro models of standardized columns, to read, to call, and to copy and change.

Their priors are on the scale of standardized data, and weak: of a log-normal the mode is given, since the mode is what is fitted.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_orthgp import kernels
from numpyro_orthgp.collapsed import CollapsedGP
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.types import Array

__all__ = ["covariance", "regression_model"]


def log_normal(mode: Any, spread: float) -> dist.Distribution:
    """A log-normal distribution by its mode and the standard deviation of the logarithm."""
    return dist.LogNormal(jnp.log(mode) + spread**2, spread)


def covariance(num_columns: int) -> Kernel:
    r"""The kernel, with its hyperparameters sampled: Matern 5/2 with a lengthscale for each column, and a plane.

    .. math:: k(x, x') = s^2 \, k_{5/2}(x, x'; \ell_1, \dots, \ell_D) + \frac{b^2}{D} x^\top x'

    A priori lengthscales are about sqrt(D), at which typical standardized rows are a lengthscale or two apart whatever D.

    :param num_columns: D.
    """
    lengthscale = log_normal(num_columns**0.5, 1.5).expand([num_columns]).to_event(1)
    scale = numpyro.sample("scale", log_normal(1.0, 1.0))
    slope = numpyro.sample("slope", log_normal(0.3, 1.0))
    smooth = kernels.Matern52(numpyro.sample("lengthscale", lengthscale))
    return scale**2 * smooth + kernels.Linear(slope**2 / num_columns)


def regression_model(X: Array, y: Array | None = None, *, Z: Array) -> None:
    """Gaussian-process regression with the inducing variables integrated out.

    :param X: standardized columns, shape (N, D).
    :param y: standardized outputs, shape (N,).
    :param Z: inducing points, shape (M, D). ``numpyro.param("Z", Z)`` in a copy of this model would learn them.
    """
    kernel = covariance(X.shape[1])
    noise = numpyro.sample("noise", log_normal(0.2, 1.5))
    numpyro.sample("y", CollapsedGP(kernel, X, Z, noise), obs=y)
