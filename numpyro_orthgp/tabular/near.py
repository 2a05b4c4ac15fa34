r"""Hyperparameters for predictions from the rows nearest to each input.

A few inducing points follow the slow part of a function of many rows. The rest counts as noise. So the hyperparameters that suit
the points have too much noise and too long lengthscales for predictions that also use nearby rows. Here hyperparameters are
learned from such predictions. Each row i is predicted from the H other rows b that are nearest to it,

.. math::
    p(y_i \mid y_b) = N\big(y_i \mid k_{ib} C^{-1} y_b, \; k_{ii} - k_{ib} C^{-1} k_{bi} + \sigma^2\big),
    \qquad C = K_{bb} + \sigma^2 I .

The sum of their logarithms is the log density of rows that are left out one at a time (Rasmussen and Williams 2006, Eq. 5.11), of
which only near rows are kept, as Vecchia 1988 does. Each step of Adam takes a few hundred random rows, and costs O(H^3) for each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoDelta

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.neighbors import NeighborFunction, given_rows, nearest_rows, with_neighbors
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.models import covariance, log_normal
from numpyro_orthgp.tabular.points import Values, as_params, as_values
from numpyro_orthgp.training import fit
from numpyro_orthgp.types import Array

__all__ = ["NEIGHBORS", "Near", "learn_near", "neighbors_model"]

NEIGHBORS = 128  # H of predictions by hyperparameters of their own
LEARN_FROM, SIZE, STEPS, RATE = 32, 256, 150, 0.1  # H, rows and number of steps, and Adam's rate
CALL = 10  # steps in one call to the device, between which the clock is read
LEAST_NOISE = 1e-4  # below, covariances of standardized outputs have too few digits


class Near(NamedTuple):
    """How predictions use the rows nearest to each input.

    :param values: hyperparameters: those of the model but for the noise, or learned here.
    :param Z: inducing points for all rows.
    :param num_neighbors: H.
    :param own: whether hyperparameters were learned here.
    """

    values: Values
    Z: np.ndarray
    num_neighbors: int
    own: bool

    @property
    def noise(self) -> float:
        return float(self.values["noise"])

    def given(self, f: GPFunction, X: np.ndarray, y: np.ndarray) -> NeighborFunction:
        """Predictions by a function of these hyperparameters and the rows near each input."""
        rows = (jnp.asarray(X), jnp.asarray(y), jnp.asarray(self.noise))
        return with_neighbors(f, *rows, num_neighbors=self.num_neighbors)


def neighbors_model(rows: Array, *, X: Array, y: Array, num_neighbors: int, least_noise: float = 0.0) -> None:
    """Outputs of random rows, each given those of the other rows that are nearest. Kernel and priors are those of
    ``regression_model``.

    :param rows: indices of the random rows.
    :param X: standardized columns of all rows, shape (N, D).
    :param y: standardized outputs, shape (N,).
    :param num_neighbors: H.
    :param least_noise: is added to the noise, as variances are.
    """
    kernel = covariance(X.shape[1])
    noise = jnp.hypot(numpyro.sample("noise", log_normal(0.2, 1.5)), least_noise)
    with numpyro.plate("rows", len(y), subsample_size=len(rows)):
        near = nearest_rows(kernel, X[rows], X, num_neighbors, but=rows)
        mean, variance = given_rows(kernel, noise, X[rows], X[near], y[near])
        numpyro.sample("y", dist.Normal(mean, jnp.sqrt(variance + noise**2)), obs=y[rows])


def learn_near(values: Values, X: np.ndarray, y: np.ndarray, least_noise: float, budget: Budget) -> Values:
    """Hyperparameters by which rows predict each other.

    :param values: those to start from.
    :param X, y: standardized rows, shapes (N, D) and (N,).
    :param least_noise: standard deviation of rounding.
    :param budget: when it is spent, the last step's hyperparameters are taken.
    """
    least_noise = max(least_noise, LEAST_NOISE)
    num_steps = min(STEPS, budget.num_steps)
    adam = optax.adam(optax.cosine_decay_schedule(RATE, num_steps))
    svi = SVI(neighbors_model, AutoDelta(neighbors_model, init_loc_fn=init_to_feasible()), adam, Trace_ELBO())
    result = fit(
        svi,
        jax.random.PRNGKey(0),
        {"rows": np.arange(len(y))},
        batch_size=min(SIZE, len(y)),
        num_steps=num_steps,
        init_params=as_params(values),
        steps_per_call=CALL,
        progress_bar=False,
        callback=budget.watch,
        X=jnp.asarray(X),
        y=jnp.asarray(y),
        num_neighbors=min(LEARN_FROM, len(y) - 1),
        least_noise=least_noise,
    )
    if result.status == "interrupted" and budget.allows(0.0):  # by the user, not by the clock
        raise KeyboardInterrupt
    found = as_values(result.params)
    return found | {"noise": np.hypot(found["noise"], least_noise)}
