r"""Hyperparameters for predictions from the rows nearest to each input.

A few inducing points follow the slow part of a function of many rows. The rest counts as noise. So the hyperparameters that suit
the points have too much noise and too long lengthscales for predictions that also use nearby rows. Here hyperparameters are
learned from such predictions. Each row i is predicted from the H other rows b that are nearest to it,

.. math::
    p(y_i \mid y_b) = N\big(y_i \mid k_{ib} C^{-1} y_b, \; k_{ii} - k_{ib} C^{-1} k_{bi} + \sigma^2\big),
    \qquad C = K_{bb} + \sigma^2 I .

The sum of their logarithms is the log density of rows that are left out one at a time (Rasmussen and Williams 2006, Sec. 5.4.2), of
which only near rows are kept, as Vecchia 1988 does. Each step of Adam takes a few hundred random rows, and costs O(H^3)
for each of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from numpyro_orthgp.math.compiled import quick_jit
from numpyro_orthgp.tabular.blocks import in_blocks
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.models import covariance, log_normal
from numpyro_orthgp.tabular.points import Values, as_params, as_values, kernel_of
from numpyro_orthgp.training import fit
from numpyro_orthgp.types import Array

__all__ = ["NEIGHBORS", "Near", "learn_near", "neighbors_model"]

NEIGHBORS = 128  # H of predictions by hyperparameters of their own
LEARN_FROM, ROUNDS, POOL = 32, 3, 4096  # H, and rounds of so many random rows, whose neighbours are found
SIZE, STEPS = 256, 100  # rows of a step, steps of a round
RATE, LAST = 0.1, 0.1  # Adam's rate, and the part of it that is left at the end of a round
CALL = 10  # steps in one call to the device, between which the clock is read
LEAST_NOISE = 2e-4  # below, covariances of standardized outputs have too few digits


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


def neighbors_model(
    X: Array, y: Array, X_near: Array, y_near: Array, *, num_rows: int, least_noise: float = 0.0
) -> None:
    """Outputs of random rows, each given those of the other rows that are nearest. Kernel and priors are those of
    ``regression_model``.

    :param X: standardized columns of the random rows, shape (B, D).
    :param y: their standardized outputs, shape (B,).
    :param X_near, y_near: the rows nearest to each of them, shapes (B, H, D) and (B, H).
    :param num_rows: number of all rows, for which the B stand.
    :param least_noise: is added to the noise, as variances are.
    """
    kernel = covariance(X.shape[1])
    noise = jnp.hypot(numpyro.sample("noise", log_normal(0.2, 1.5)), least_noise)
    with numpyro.plate("rows", num_rows, subsample_size=len(y)):
        mean, variance = given_rows(kernel, noise, X, X_near, y_near)
        numpyro.sample("y", dist.Normal(mean, jnp.sqrt(variance + noise**2)), obs=y)


def learn_near(values: Values, X: np.ndarray, y: np.ndarray, least_noise: float, budget: Budget) -> Values:
    """Hyperparameters by which rows predict each other. Which rows are near depends on them, so it is found anew in each round.

    :param values: those to start from.
    :param X, y: standardized rows, shapes (N, D) and (N,).
    :param least_noise: standard deviation of rounding.
    :param budget: when it is spent, the last step's hyperparameters are taken.
    """
    num, least_noise = len(y), max(least_noise, LEAST_NOISE)
    num_steps = min(STEPS, budget.num_steps)
    adam = optax.adam(optax.cosine_decay_schedule(RATE, num_steps, LAST))
    svi = SVI(neighbors_model, AutoDelta(neighbors_model, init_loc_fn=init_to_feasible()), adam, Trace_ELBO())
    options: dict[str, Any] = {"batch_size": min(SIZE, num), "num_steps": num_steps, "steps_per_call": CALL}
    options |= {"progress_bar": False, "callback": budget.watch, "stands_for": num}
    options |= {"num_rows": num, "least_noise": least_noise}
    for r in range(ROUNDS):
        if not budget.allows(0.0):
            break
        rows = np.random.default_rng(r).permutation(num)[:POOL]
        (near,) = in_blocks(_nearest, (jax.tree.map(jnp.asarray, values), jnp.asarray(X)), X[rows], rows)
        data = X[rows], y[rows], X[near], y[near]
        result = fit(svi, jax.random.key(r), data, init_params=as_params(values), **options)
        budget.note(result)
        values = as_values(result.params)
    return values | {"noise": np.hypot(values["noise"], least_noise)}


def _nearest_of(given: Any, X: Array, rows: Array) -> tuple[Array]:
    # Columns are standardized, and the order of near ties does not matter.
    values, data, X = jax.tree.map(lambda a: a.astype(jnp.float32), (*given, X))
    return (nearest_rows(kernel_of(values), X, data, min(LEARN_FROM, len(data) - 1), but=rows),)


_nearest = quick_jit(_nearest_of, 1)
