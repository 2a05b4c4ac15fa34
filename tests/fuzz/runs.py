"""A program as it is run: what the package says of it, computed at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.util import log_density

import numpyro_orthgp as ogp
from tests.fuzz.covariances import names
from tests.fuzz.programs import Program

NUM_KEYS = 500
NUM_DRAWS = 400
TIMES, MORE = 10, 50  # as many keys to begin with, and where they say that something is wrong
# Rounding, relative to the size of what is compared, and standard errors from which on an average of draws is wrong. What is found
# beyond is looked at again with more.
RELATIVE = {"float64": 1e-7, "float32": 3e-4}
SIGMAS = 5.0


@dataclass
class Run:
    """A program as it was run.

    :param failures: what was found, a line each.
    """

    program: Any
    properties: tuple[str, ...]
    failures: list[str] = field(default_factory=list)
    space: dict[str, Any] = field(default_factory=dict)

    def fail(self, name: str, message: str) -> None:
        self.failures.append(f"{name}: {message}")

    def expect(self, name: str, value: Any, expected: Any, times: float = 1.0) -> None:
        """Fail unless two arrays are the same up to rounding."""
        value, expected = np.asarray(value, float), np.asarray(expected, float)
        allowed = times * RELATIVE[self.program.dtype] * (1 + np.abs(expected).max())
        if value.shape != expected.shape or not np.abs(value - expected).max() <= allowed:
            self.fail(name, f"{value.tolist()}, dense formula {expected.tolist()}")

    def slope(self, function: Callable[[Any], float], params: dict[str, Any], gradient: dict[str, Any]) -> None:
        """Fail unless the gradient is that of differences, along a random direction."""
        rng = np.random.default_rng(self.program.seed)
        # Entries of factors above the diagonal are no parameters.
        direction = {
            n: np.tril(d) if n.endswith("scale_tril") else d
            for n, d in ((n, rng.normal(size=v.shape)) for n, v in params.items())
        }

        def at(step: float) -> float:
            return function({n: v + step * direction[n] for n, v in params.items()})

        slope = sum(float(np.sum(gradient[n] * direction[n])) for n in params)
        size = abs(slope) + abs(at(0.0)) + 1
        # Where draws cross a kink of the kernel within a step, differences of two lengths differ: take shorter steps.
        for h in (1e-5, 3e-7, 1e-8):
            first, second = ((at(k * h) - at(-k * h)) / (2 * k * h) for k in (1, 2))
            differences, doubt = (4 * first - second) / 3, abs(first - second)
            if abs(slope - differences) <= 1e-6 * size + doubt:
                return
            if doubt <= 1e-6 * size:
                break
        self.fail("gradient", f"slope {slope:.9g}, by differences {differences:.9g} ({first:.9g} and {second:.9g})")


def execute(program: Program) -> dict[str, Any]:
    """The names that the text of a program defines."""
    space: dict[str, Any] = {}
    exec(compile(program.source(), f"<seed {program.seed}>", "exec"), space)
    return space


def more_losses(run: Run, params: Any, times: int = MORE) -> np.ndarray:
    """Losses for so many times as many keys; running costs little beside compiling."""
    if not is_random(run):
        times = 1
    seeds = [10_000 + 100 * run.program.seed + i for i in range(times)]
    parts = [run.space["function"](params, keys_of(run, seed))["losses"] for seed in seeds]
    return np.concatenate([np.asarray(part, float) for part in parts])


Values = dict[str, Any]


def compute(run: Run) -> Values:
    """Everything at once, as one compiled program."""
    function = jax.jit(whole(run))
    run.space["function"] = function
    values = jax.tree.map(np.asarray, function(params_of(run), keys_of(run, run.program.seed)))
    return {**values, "losses": more_losses(run, params_of(run), TIMES)} if is_random(run) else values


def keys_of(run: Run, seed: int) -> Any:
    """Keys to average over; one for a loss that is exact."""
    return jax.random.split(jax.random.PRNGKey(seed), NUM_KEYS if is_random(run) else 1)


def params_of(run: Run) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in run.space["params"].items()}


def test_inputs(program: Program) -> np.ndarray:
    """Inputs of predictions: two of the data, two between."""
    X = np.array(program.X)
    return np.concatenate([X[:2], np.round((X[1:3] + X[2:4]) / 2, 2) if not _has_tasks(program) else X[2:4]])


def _has_tasks(program: Program) -> bool:
    return any("Coregion" in names(g.tree) for g in program.gps)


def whole(run: Run) -> Callable[..., Values]:
    """Losses for keys, and what else the properties need."""
    program, space = run.program, run.space
    model, guide = space["model"], space["guide"]
    elbo = Trace_ELBO() if "trace" in run.properties else TraceMeanField_ELBO()
    X_new = test_inputs(program).astype(program.dtype)

    def losses(params: Any, keys: Any) -> Any:
        if not is_random(run):
            return elbo.loss(keys[0], params, model, guide)[None]
        return jax.vmap(lambda key: elbo.loss(key, params, model, guide))(keys)

    def function(params: Any, keys: Any) -> Values:
        values: Values = {}
        if "gradient" in run.properties:
            mean = jax.value_and_grad(lambda p: ((each := losses(p, keys)).mean(), each), has_aux=True)
            (_, values["losses"]), values["gradient"] = mean(params)
        else:
            values["losses"] = losses(params, keys)
        if "posterior" in run.properties:
            for name, f in ogp.posterior(model, guide, params).items():
                marginals, joint = f(X_new), f.joint(X_new)
                values[name] = {
                    "mean": marginals.mean,
                    "variance": marginals.variance,
                    "covariance": joint.covariance_matrix,
                    "draws": marginals.sample(keys[0], (NUM_DRAWS,)),
                }
        if "potential" in run.properties:
            drawn = {k: v for k, v in latents(program).items()}
            # What `obs_mask` imputes is a site without a value here, and no part of the density of what was observed.
            imputing = handlers.seed(model, run.program.seed)
            observed = handlers.block(imputing, hide_fn=lambda site: site["name"].endswith("_unobserved"))
            values["log_density"] = log_density(observed, (), {}, {**only_model(params), **drawn})[0]
        return values

    return function


def is_random(run: Run) -> bool:
    return run.program.random or "trace" in run.properties


def latents(program: Program) -> dict[str, jnp.ndarray]:
    """Values of all inducing variables."""
    rng, values = np.random.default_rng(program.seed), {}
    for g in program.gps:
        batch = () if g.num_latents is None else (g.num_latents,)
        for i, Z in enumerate(g.sets):
            values[f"{g.name}.u{i}"] = jnp.asarray(
                np.round(rng.normal(size=(*batch, np.shape(Z)[-2])), 2), program.dtype
            )
    return values


def only_model(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters without those of q."""
    ends = ("_loc", "_scale", "_scale_tril")
    return {n: v for n, v in params.items() if not (n.endswith(ends) and "lengthscale" not in n)}
