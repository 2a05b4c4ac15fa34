"""The models' hyperparameters: their kernel, inducing points for it, and their form as parameters of a guide."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_orthgp.init.variance import pivots
from numpyro_orthgp.kernels import Kernel
from numpyro_orthgp.math.compiled import quick_jit
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.tabular.models import covariance

__all__ = ["Values", "as_params", "as_values", "kernel_of", "points_for"]

MOST_CANDIDATES = 20_000  # rows among which points are picked

Values = dict[str, np.ndarray]  # values of the hyperparameters, by site


@in_turn()
def kernel_of(values: Values) -> Kernel:
    """The models' kernel at these hyperparameters."""
    with numpyro.handlers.block(), numpyro.handlers.substitute(data=values):
        return covariance(len(values["lengthscale"]))


def as_params(values: Values) -> dict[str, Any]:
    """Parameters of ``AutoDelta``."""
    return {f"{name}_auto_loc": jnp.asarray(value) for name, value in values.items()}


def as_values(params: dict[str, Any]) -> Values:
    return {name.removesuffix("_auto_loc"): np.asarray(value) for name, value in params.items()}


def points_for(values: Values, X: np.ndarray, num_points: int, among: np.ndarray | None = None) -> np.ndarray:
    """Inducing points among the rows, picked where the conditional variance is largest (Burt et al. 2020).

    :param X: rows in random order; if there are many, only the first ones are candidates.
    :param among: True for the rows that may be points, shape (N,), by default all. One program serves any choice.
    """
    X = X[:MOST_CANDIDATES]
    among = None if among is None else among[:MOST_CANDIDATES]
    num = min(num_points, len(X) if among is None else int(among.sum()))
    of_kernel = {name: jnp.asarray(values[name]) for name in ("lengthscale", "scale", "slope")}
    return X[np.asarray(_picked(of_kernel, jnp.asarray(X), among, num))]


def _pivots(values: Any, X: Any, among: Any, num: int) -> Any:
    return pivots(kernel_of(values), X, free=among, num=num)


_picked = quick_jit(_pivots, 0, static_argnums=3)
