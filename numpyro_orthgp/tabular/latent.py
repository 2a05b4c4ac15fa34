"""The searches of ``stages`` for a model with a non-Gaussian likelihood: stochastic steps for hyperparameters and q.

A step sees a minibatch. It moves q along its natural gradient, and hyperparameters and inducing points by Adam, whose rate falls to
a twentieth. The points begin where ``search`` would leave them: there more points are cheaper than better ones, here they are not.
A last fit, with half as many steps, sees all rows, also held-out ones.

Where the time allows few steps in float64, searches may take float32, at about half the cost. The last fit is always in float64. It
begins with q as it is: the larger jitter of float32 changes only directions in which f varies by less than a thousandth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.gaussians.natural_gradient import natural_gradient
from numpyro_orthgp.guides import AutoSparseGP, posterior
from numpyro_orthgp.tabular.blocks import moments
from numpyro_orthgp.tabular.budget import Budget
from numpyro_orthgp.tabular.pace import Pace
from numpyro_orthgp.tabular.points import Values, points_for
from numpyro_orthgp.tabular.stages import (
    FIRST_POINTS,
    LEAST_ROWS,
    ROWS_PER_POINT,
    Found,
    Stage,
    Tried,
    lowest,
    while_it_pays,
)
from numpyro_orthgp.tabular.starts import SHORTER, Alternative, in_order, shorter
from numpyro_orthgp.training import FitResult, Progress, fit

__all__ = ["LatentSearch", "latent_function"]

USUAL_STEPS, LEAST_STEPS = 300, 50
WORTH_STEPS = 100  # steps that a search with more points must have time for: q begins anew
BATCH = 1024
FUNCTIONS = 25  # with more of them batches are smaller, and first points fewer
FLAT = 0.3  # standard deviation of a function, below which a further search starts from shorter lengthscales
NATURAL, RATE, LAST_RATE = 0.3, 0.2, 0.05  # step of q; Adam's rate, and the share of it that remains at the end
WORSE = (
    1.0  # nats per row by which the last fit may end above its beginning; else it went astray, and the search stands
)
FEW = 2  # rows that suffice to trace a model
CALL = 10  # steps of a call to the device, so that searches of any number of steps share a program
PROBE = 2 * CALL  # steps that tell how long a step takes
SHIFT = 0.3  # standard deviations of a column that a point moves where the logarithm of a hyperparameter moves by one
SEARCHES, FIRST = 0.9, 0.15  # shares of the time: of all searches, and of each of the first ones
LEAST, LAST = 0.4, 0.1  # shares of it that the steps of a search and of the last fit may take if it is over


@dataclass
class LatentSearch:
    """
    :param model: has a gp "f", and takes the arguments in ``data`` and ``options``, ``Z`` and ``num_rows``.
    :param data: arguments with one entry per row, among them X and y, in random order, held-out rows first.
    :param options: further arguments.
    :param relevant: outputs for the relevance of columns, in the order of the rows.
    :param score: maps function, hyperparameters and rows of ``data`` to log densities.
    :param warped: X with maps of skewed columns, if it is to be tried. If it is better, it takes the place of X in ``data``.
    :param may_be_single: whether searches may take float32.
    """

    model: Callable[..., None]
    data: dict[str, np.ndarray]
    options: dict[str, Any]
    num_held: int
    budget: Budget
    relevant: list[np.ndarray]
    score: Callable[[GPFunction, Values, dict[str, np.ndarray]], np.ndarray]
    warped: np.ndarray | None = None
    may_be_single: bool = False
    seen: dict[str, np.ndarray] = field(init=False)
    held: dict[str, np.ndarray] = field(init=False)
    best: dict[str, Any] = field(init=False)  # result of the best search, which the held-out rows judge
    best_stage: Stage = field(init=False)
    pace: Pace = field(init=False, default_factory=Pace)  # in float64
    single: Pace | None = field(init=False, default=None)  # in float32, if searches take that

    def __post_init__(self) -> None:
        self.whole, self.budget = self.budget, self.budget.part(SEARCHES)
        self.take(self.data["X"])

    def take(self, X: np.ndarray) -> None:
        """Search with these inputs."""
        self.data = self.data | {"X": X}
        self.seen = {name: array[self.num_held :] for name, array in self.data.items()}
        self.held = {name: array[: self.num_held] for name, array in self.data.items()}

    @property
    def num_rows(self) -> int:
        return len(self.seen["y"])

    @property
    def share(self) -> float:
        """Of the usual work for each function that a step does, as the functions may be many."""
        return min(1.0, FUNCTIONS / max(len(self.relevant), 1))

    def rows_for(self, num_points: int) -> int:
        return self.num_rows

    def first(self, values: dict[str, Values] | None = None) -> list[Tried]:
        """The first searches, one from each start while there is time, and one at least.

        :param values: starts; by default those of ``starts``, and a further one if they take everything for noise.
        """
        num = min(self.budget.num_points or int(FIRST_POINTS * self.share**0.5), self.num_rows)
        best = self.data["X"]
        inputs = [best] if self.warped is None else [best, self.warped]
        order = [(0, values)] if values else self.in_order(inputs)
        tried: list[Tried] = []

        def go(name: str, start: Values) -> None:
            nonlocal best
            if not tried or self.budget.allows(0.0):
                tried.append(self.stage(num, name, {"values": start}))
                best = self.data["X"] if lowest(tried) is tried[-1] else best

        for place, (i, begin) in enumerate(order):
            self.take(inputs[i])
            for name, start in begin.items():
                go(name, start)
            first = not values and place == 0 and SHORTER not in begin
            if first and self.budget.allows(0.0) and self.is_flat(lowest(tried)[1]):
                go(SHORTER, shorter(best.shape[1]))
        self.take(best)
        return tried

    def in_order(self, inputs: list[np.ndarray]) -> list[tuple[int, dict[str, Values]]]:
        outputs = [y[self.num_held :] for y in self.relevant]
        return in_order([X[self.num_held :] for X in inputs], outputs, [Alternative(np.stack(outputs, -1))])

    def is_flat(self, ended: dict[str, Any]) -> bool:
        """Whether the function hardly varies between rows."""
        mean, _ = moments(self.function(ended["params"], ended["Z"]), self.seen["X"][:LEAST_ROWS])
        return bool(mean.std(axis=0).max() < FLAT)

    def search(self, tried: list[Tried]) -> Found:
        """The fit of all rows, after further searches while they pay."""
        rows = self.num_rows, self.num_held, self.rows_for
        stages, (last, ended), _ = while_it_pays(self.longer(tried), self.stage, self.budget, *rows, self.least_time)
        self.best, self.best_stage, losses = ended, last, ended["losses"]
        if self.num_held:
            params, Z, losses = self.on_all_rows(ended)
            ended = ended | {"params": params, "values": values_of(params), "Z": Z}
        return Found(ended["values"], ended["Z"], ended["params"], stages, losses=losses)

    def longer(self, tried: list[Tried]) -> list[Tried]:
        """With a search that goes on where the best one ended, if its steps were few, and there is time for as many again."""
        stage, ended = lowest(tried)
        few = self.budget.seconds is not None and stage.num_steps < self.budget.num_steps
        if not few or self.steps_left(stage.num_points) < stage.num_steps:
            return tried
        return [*tried, self.stage(stage.num_points, "the best so far; more steps", ended, goes_on=True)]

    def stage(self, num_points: int, name: str, before: dict[str, Any], goes_on: bool = False) -> Tried:
        begin = self.budget.spent
        values = before["values"]
        if goes_on:
            Z, start, num_steps = before["Z"], before["params"], self.steps_left(num_points)
        else:
            X = self.seen["X"][: max(LEAST_ROWS, ROWS_PER_POINT * num_points)]
            Z, start = points_for(values, X, num_points), as_params(values)
            Z, start = self.probed(Z, start)
            num_steps = self.steps_for(len(Z))
        result = self.trained(self.seen, Z, start, num_steps, RATE)
        params, Z = settled_points(result.params, Z)
        values, loss = values_of(params), settled(result.losses)
        held_out = np.nan
        if self.num_held:
            held_out = float(self.score(self.function(params, Z), values, self.held).mean())
        ended = {"values": values, "params": params, "Z": Z, "losses": result.losses}
        seconds = self.budget.spent - begin
        rows, num, status = self.num_rows, len(Z), result.status
        return Stage(rows, num, name, loss, status, result.num_steps, held_out, np.nan, seconds), ended

    def probed(self, Z: np.ndarray, start: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """Points and parameters after the first steps of all, which tell how long a step takes."""
        if self.budget.seconds is None or not np.isnan(self.pace.per_step) or not self.budget.allows(0.0):
            return Z, start
        result = self.trained(self.seen, Z, start, PROBE, RATE)
        self.choose_precision(len(Z))
        params, Z = settled_points(result.params, Z)
        return Z, params

    def steps_for(self, num_points: int) -> int:
        """Number of steps of a search. If steps take long, there are fewer: a search whose rate has not fallen is worth little."""
        budget, is_first = self.budget, num_points <= FIRST_POINTS
        if budget.seconds is None:
            return budget.num_steps
        least = self.of_searches.steps(LEAST * budget.seconds, num_points, LEAST_STEPS)
        return max(self.steps_left(num_points, FIRST * budget.seconds if is_first else np.inf), least, CALL)

    def choose_precision(self, num_points: int) -> None:
        """Take float32 if the time of a first search allows fewer than half of its steps, and another program to compile."""
        steps = self.pace.steps(FIRST * (self.budget.seconds or np.inf), num_points, self.budget.num_steps)
        few = 2 * steps < self.budget.num_steps and self.budget.allows(self.pace.start)
        if few and self.may_be_single and self.num_held:
            self.single = Pace(self.pace.per_step / 2, self.pace.start)

    def steps_left(self, num_points: int, most_seconds: float = np.inf) -> int:
        """Number of steps in the time that is left for searches."""
        return self.of_searches.steps(min(self.budget.left, most_seconds), num_points, self.budget.num_steps)

    @property
    def of_searches(self) -> Pace:
        return self.pace if self.single is None else self.single

    def least_time(self, num_points: int) -> float:
        """Seconds that a search with other points takes at least, and what the last fit takes to begin."""
        return self.of_searches.start + self.start_of_last + self.of_searches.seconds(WORTH_STEPS, num_points)

    @property
    def start_of_last(self) -> float:
        """Seconds before the first step of the last fit. It is another program if batches are all rows."""
        return self.pace.start if self.num_rows < int(BATCH * self.share) else 0.0

    def on_all_rows(self, ended: dict[str, Any]) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        num_steps = max(self.best_stage.num_steps // 2, 1)
        if np.isfinite(self.whole.left):
            seconds = self.whole.left - self.start_of_last
            least = self.pace.steps(LAST * (self.whole.seconds or np.inf), len(ended["Z"]), CALL)
            num_steps = min(num_steps, max(self.pace.steps(seconds, len(ended["Z"]), num_steps), least, 1))
        result = self.trained(self.data, ended["Z"], ended["params"], num_steps, LAST_RATE * RATE, is_last=True)
        if not settled(result.losses) < result.losses[:CALL].mean() + WORSE * len(self.data["y"]):
            return ended["params"], ended["Z"], ended["losses"]
        return *settled_points(result.params, ended["Z"]), result.losses

    def trained(
        self,
        data: dict[str, np.ndarray],
        Z: np.ndarray,
        start: dict[str, Any],
        num_steps: int,
        rate: float,
        is_last: bool = False,
    ) -> FitResult:
        """A fit from given points and values; in float64 also if float32 was not enough for it."""
        given = data, Z, jax.tree.map(np.asarray, start)
        if self.single is not None and not is_last:
            with jax.enable_x64(False):
                result = self.run(jax.tree.map(as_single, given), num_steps, rate, self.single)
            if result.status != "diverged":
                return result
            self.single = None
        return self.run(given, num_steps, rate, self.pace, watched=not is_last)

    def run(
        self, given: tuple[Any, np.ndarray, Any], num_steps: int, rate: float, pace: Pace, watched: bool = True
    ) -> FitResult:
        data, Z, start = given
        num_rows = len(data["y"])
        adam = optax.adam(optax.cosine_decay_schedule(rate, num_steps, LAST_RATE))
        model = moving_points(self.model) if len(Z) < self.num_rows else self.model
        svi = SVI(model, new_guide(model), natural_gradient(adam, NATURAL), TraceMeanField_ELBO())
        begun = self.budget.spent
        calls: list[tuple[int, float]] = []

        def after_call(progress: Progress) -> None:
            calls.append((progress.step, self.budget.spent - begun))
            if watched and progress.step >= LEAST_STEPS:  # compilation alone may take the time
                self.budget.watch(progress)

        result = fit(
            svi,
            jax.random.key(0),
            data,
            batch_size=min(int(BATCH * self.share), num_rows),
            num_steps=num_steps,
            init_params=jax.tree.map(jnp.asarray, start),
            steps_per_call=CALL,
            progress_bar=False,
            callback=after_call,
            Z=Z,
            num_rows=num_rows,
            **self.options,
        )
        (self.budget if watched else self.whole).note(result)
        pace.learn(calls, len(Z))
        return result

    def function(self, params: dict[str, Any], Z: np.ndarray) -> GPFunction:
        return latent_function(self.model, params, Z, self.data, self.options)


def new_guide(model: Callable[..., None]) -> AutoSparseGP:
    """A guide with a Gaussian for the inducing variables and posterior modes of the hyperparameters."""
    return AutoSparseGP(model, natural=True)


def moving_points(model: Callable[..., None]) -> Callable[..., None]:
    """The model with a parameter "shift": how far its inducing points have moved, in units of ``SHIFT``."""

    def with_shift(*args: Any, Z: Any, **kwargs: Any) -> None:
        model(*args, Z=Z + SHIFT * numpyro.param("shift", jnp.zeros_like(Z)), **kwargs)

    return with_shift


def settled_points(params: dict[str, Any], Z: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parameters of the model itself, and the inducing points where a search has left them."""
    found = {name: np.asarray(value, np.float64) for name, value in params.items()}
    return found, Z + SHIFT * found.pop("shift", np.zeros_like(Z))


def as_single(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def as_params(values: Values) -> dict[str, Any]:
    return {f"{name}_auto_loc": np.asarray(value) for name, value in values.items()}


def values_of(params: dict[str, Any]) -> Values:
    end = "_auto_loc"
    return {name.removesuffix(end): np.asarray(value) for name, value in params.items() if name.endswith(end)}


def settled(losses: np.ndarray) -> float:
    """The mean of the last tenth of the losses; infinite if there are none."""
    return float(losses[-max(len(losses) // 10, 1) :].mean()) if len(losses) else np.inf


def latent_function(
    model: Callable[..., None], params: dict[str, Any], Z: Any, data: dict[str, Any], options: dict[str, Any]
) -> GPFunction:
    """The fitted function, by one compiled program."""
    few = {name: jnp.asarray(array[:FEW]) for name, array in data.items()}
    static = tuple(sorted(options.items()))
    return _function(model, static, jax.tree.map(jnp.asarray, params), jnp.asarray(Z), few)


def _given(model: Callable[..., None], options: Any, params: Any, Z: Any, data: Any) -> GPFunction:
    return posterior(model, new_guide(model), params, Z=Z, **data, **dict(options))["f"]


_function = jax.jit(_given, static_argnums=(0, 1))
