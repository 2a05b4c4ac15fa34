"""Training by a quasi-Newton method, :func:`fit_lbfgs`.

The optimizer is SciPy's L-BFGS-B without bounds. On three data sets (``benchmarks/lbfgs.py``) it and ``optax.lbfgs`` end within
a few nats of each other, either way, after about as many evaluations. SciPy's takes half the time or less.

Three things make convergence reliable. The stopping rule is in nats, not relative to the loss, which contains an arbitrary
constant. After every stop, unless the steps are used up, the search restarts from the best point with an empty curvature memory; it
ends only when this gains nothing. And values that are not finite act as a wall, from which the line search turns back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import scipy

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.groups import check_groups
from numpyro_orthgp.training.loop import check_types, seed_of, start_of
from numpyro_orthgp.training.objective import Objective, objective_of
from numpyro_orthgp.training.result import FitResult, Fitted, Progress, Status
from numpyro_orthgp.training.start import one_thread

__all__ = ["fit_lbfgs"]

WINDOW = 10  # steps over which the loss must fall
MEMORY = 20  # pairs of steps and gradients in the curvature memory
MOST_EVALUATIONS = 20  # of one line search
FLAT = 1.0  # nats per unit of the parameters. With a shorter gradient a failed line search does not count as stalled


def fit_lbfgs(
    svi: Any,
    rng_key: jax.Array,
    data: tuple[Any, ...] | dict[str, Any],
    *,
    num_steps: int = 1000,
    tolerance: float = 0.01,
    restarts: int = 5,
    stands_for: int | None = None,
    init_params: dict[str, Any] | None = None,
    init_state: Any = None,
    callback: Callable[[Progress], Any] | None = None,
    **kwargs: Any,
) -> FitResult:
    r"""Train an ``SVI`` with a deterministic loss by L-BFGS. It needs no learning rate, and detects convergence.

    ::

        svi = SVI(model, AutoDelta(model), optax.adam(0.01), Trace_ELBO())  # Adam is not used
        result = ogp.fit_lbfgs(svi, random.PRNGKey(0), (X, y), Z=Z)
        print(result.message)

    Use it for models with :class:`~numpyro_orthgp.CollapsedGP` under ``AutoDelta`` (or with ``param`` sites only), and for
    ``AutoSparseGP`` with likelihoods whose expectation has a closed form or uses quadrature. Each evaluation uses all data: there
    are no minibatches, and a loss with random draws raises an error. The search is over the unconstrained parameters of the
    ``SVI``, so :func:`~numpyro_orthgp.fit` can continue from ``result.state``.

    **When it ends.** A search stops when ten steps lower the loss by less than ``tolerance`` nats, or a line search finds no lower
    loss. It then restarts from there with an empty curvature memory. If it stops again in the same way, it has *converged*. It has
    *stalled* when line searches find no lower loss although the gradient says that there is one. Then there is a
    ``RuntimeWarning``, and 64-bit floats (``numpyro.enable_x64()``) are the likely fix. They are useful anyway: in float32 a loss
    of some thousand nats is known to a few thousandths, which is as much as late steps gain.

    It finds a local optimum near the start, and may be trapped where the model explains everything as noise. Start from several
    places (``init_params``) and keep the lowest loss.

    >>> import jax.numpy as jnp, numpyro, optax
    >>> from jax.random import PRNGKey
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro.infer.autoguide import AutoDelta
    >>> import numpyro.distributions as dist
    >>> import numpyro_orthgp as ogp
    >>> X = jnp.linspace(0.0, 1.0, 50)[:, None]
    >>> def model(X, y):
    ...     lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))
    ...     kernel = ogp.kernels.RBF(lengthscale)
    ...     numpyro.sample("y", ogp.CollapsedGP(kernel, X, X[::5], 0.1), obs=y)
    >>> svi = SVI(model, AutoDelta(model), optax.adam(0.01), Trace_ELBO())
    >>> result = ogp.fit_lbfgs(svi, PRNGKey(0), (X, jnp.sin(6 * X[:, 0])))
    >>> result.status, round(float(result.params["lengthscale_auto_loc"]), 1)
    ('converged', 0.3)

    :param svi: a NumPyro ``SVI``. Its optimizer is not used, except to make the returned state.
    :param rng_key: a key for ``svi.init``.
    :param data: a tuple of arrays (positional arguments of model and guide) or a dict of arrays (keyword arguments).
    :param num_steps: largest number of steps. A step takes one or a few evaluations of loss and gradient.
    :param tolerance: least decrease of the loss over ten steps, in nats.
    :param restarts: largest number of restarts.
    :param stands_for: as for :func:`~numpyro_orthgp.fit`.
    :param init_params: values of parameters to start from.
    :param init_state: an ``SVIState`` to start from.
    :param callback: called with a :class:`~numpyro_orthgp.training.Progress` after each step. It may raise ``KeyboardInterrupt``,
        which ends the fit with the status "interrupted".
    :param kwargs: further keyword arguments of model and guide.
    :return: parameters, state, the loss after each step, status ("converged", "finished" when the steps are used up, "stalled",
        "interrupted"), the number of steps, and why it ended.
    :raises ValueError: if the loss depends on the random key or on a mutable state; for a minibatch; for invalid options.
    :raises TypeError: if ``svi`` or ``data`` have the wrong type.
    :raises FloatingPointError: if the first loss or gradient is not finite.

    **References:**
        1. Liu, Nocedal. On the Limited Memory BFGS Method for Large Scale Optimization. 1989.
        2. Ober et al. Recommendations for Baselines and Benchmarking Approximate Gaussian Processes. 2024.
    """
    if "batch_size" in kwargs:
        raise ValueError(
            "L-BFGS needs the loss of all rows, not of minibatches: leave `batch_size` out, or use ogp.fit."
        )
    check_types(svi, None, callback, init_params, init_state, True)
    check_integer("num_steps", num_steps)
    check_integer("restarts", restarts, least=0)
    if not tolerance > 0:
        raise ValueError(f"`tolerance` must be a positive number of nats; got {tolerance!r}.")
    batches = Batches(data, None, seed_of(rng_key))
    check_groups(svi, batches)
    stands_for = batches.num_rows if stands_for is None else check_integer("stands_for", stands_for)
    with one_thread():
        state = start_of(svi, rng_key, batches, init_params, init_state, kwargs)
        objective = objective_of(svi, state, batches, stands_for, kwargs)
        result = _Search(objective, svi, num_steps, tolerance, restarts, callback).run()
    return result.of(Fitted(svi, data, batches.num_rows, batches.num_rows, kwargs))


class _Enough(Exception):
    """Raised to end a search when the stopping rule is met."""


@dataclass
class _Search:
    """One fit: its current and best points."""

    objective: Objective
    svi: Any
    num_steps: int
    tolerance: float
    restarts: int
    callback: Callable[[Progress], Any] | None
    losses: list[float] = field(default_factory=list)
    best: tuple[float, Any, Any] = (np.inf, None, None)  # loss, vector, gradient
    num_evaluations: int = 0
    num_walls: int = 0
    begun: int = 0  # the step at which the last search began

    def run(self) -> FitResult:
        value, gradient = self.evaluate(self.objective.start)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            raise FloatingPointError(
                f"The first loss is {value:.6g}, and {np.isfinite(gradient).sum()} of {gradient.size} entries of its gradient are "
                "finite, so there is nothing to go on from. Look for NaN and infinity in the data and in the initial parameters. "
                "Likely fixes: standardize inputs and outputs, a larger `jitter`, 64-bit floats (numpyro.enable_x64())."
            )
        self.best = value, self.objective.start, gradient
        try:
            return self.result(*self.search())
        except KeyboardInterrupt:
            return self.result("interrupted", "Interrupted.")

    def search(self) -> tuple[Status, str]:
        """Search, and restart until a restart gains nothing."""
        for turn in range(self.restarts + 1):
            before, self.begun = self.best[0], len(self.losses)
            by_rule = self.one_search()
            if len(self.losses) >= self.num_steps:
                fell = self.losses[-min(WINDOW, len(self.losses))] - self.losses[-1]
                return (
                    "finished",
                    f"All {self.num_steps} steps were taken; the last {WINDOW} lowered the loss by {fell:.3g} nats.",
                )
            gained = before - self.best[0] >= self.tolerance
            if not gained and (turn or not by_rule):
                break
        slope = float(np.linalg.norm(self.best[2]))
        if by_rule and gained:
            return (
                "converged",
                f"Ten steps lowered the loss by less than {self.tolerance:g} nats; no restarts were left to doubt it.",
            )
        if by_rule or (not gained and slope < FLAT):
            return "converged", f"Converged: begun anew, the loss fell by less than {self.tolerance:g} nats."
        if slope < self.tolerance:  # no lower loss where the gradient promises none
            return (
                "converged",
                f"Converged: the gradient is as long as {slope:.3g}, and line searches find nothing lower.",
            )
        walls = f" {self.num_walls} evaluations were not finite." if self.num_walls else ""
        return "stalled", (
            f"Stalled: after {turn} restarts line searches still find nothing lower, where the gradient is as long as {slope:.3g}."
            f"{walls} Likely fixes: 64-bit floats (numpyro.enable_x64()), standardized inputs and outputs, a larger `jitter`, "
            "another start."
        )

    def one_search(self) -> bool:
        """L-BFGS from the best point. Return whether the stopping rule ended it; else a line search found no lower loss."""
        scale = {"maxcor": MEMORY, "maxls": MOST_EVALUATIONS, "maxiter": self.num_steps - len(self.losses)}
        options = {**scale, "maxfun": 100 * self.num_steps, "ftol": 0.0, "gtol": 0.0}
        try:
            found = scipy.optimize.minimize(
                self.guarded, self.best[1], jac=True, method="L-BFGS-B", callback=self.step, options=options
            )
        except _Enough:
            return True
        return bool(found.success)

    def evaluate(self, vector: Any) -> tuple[float, Any]:
        self.num_evaluations += 1
        value, gradient = self.objective.value_and_grad(vector)
        return float(value), np.asarray(gradient, np.float64)

    def guarded(self, vector: Any) -> tuple[float, Any]:
        """The loss and its gradient. If they are not finite, a wall that rises with distance from the best point."""
        value, gradient = self.evaluate(vector)
        if np.isfinite(value) and np.isfinite(gradient).all():
            if value < self.best[0]:
                self.best = value, vector.copy(), gradient
            return value, gradient
        self.num_walls += 1
        away, height = vector - self.best[1], 10 * (1 + abs(self.best[0]))
        return self.best[0] + height, 2 * height * away / max(float(away @ away), float(np.finfo(float).tiny))

    def step(self, intermediate_result: Any) -> None:
        """Called by SciPy after each step."""
        self.losses.append(float(intermediate_result.fun))
        if self.callback is not None:
            params = partial(self.params, self.best[1])
            self.callback(Progress(len(self.losses), float(len(self.losses)), np.asarray(self.losses[-1:]), params))
        recent = self.losses[self.begun :]
        if len(recent) > WINDOW and recent[-1 - WINDOW] - recent[-1] < self.tolerance:
            raise _Enough

    def params(self, vector: Any) -> dict[str, Any]:
        return self.svi.get_params(self.objective.state_at(vector))

    def result(self, status: Status, message: str) -> FitResult:
        if status == "stalled":
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        message += f" ({len(self.losses)} steps, {self.num_evaluations} evaluations)"
        state = self.objective.state_at(self.best[1])
        return FitResult(self.svi.get_params(state), state, np.asarray(self.losses), status, len(self.losses), message)
