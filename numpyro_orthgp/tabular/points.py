"""The kernel at given hyperparameters, and inducing points for it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_orthgp.init import greedy_variance
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.tabular.models import covariance

__all__ = ["Values", "kernel_of", "points_for"]

Values = dict[str, np.ndarray]  # of the hyperparameters, by site


def kernel_of(values: Values) -> Kernel:
    """The models' kernel at these hyperparameters."""
    with numpyro.handlers.block(), numpyro.handlers.substitute(data=values):
        return covariance(len(values["lengthscale"]))


def points_for(values: Values, X: np.ndarray, num_points: int) -> np.ndarray:
    """Inducing points among the rows, where the kernel is least certain (Burt et al. 2020)."""
    return np.asarray(greedy_variance(kernel_of(values), jnp.asarray(X), min(num_points, len(X))))
