"""`fit_lbfgs` beside `optax.lbfgs` and Adam, on the collapsed bound.

    python -m benchmarks.lbfgs --data FOLDER [--sets concrete energy airfoil] [--num-inducing 100] [--max-rows 1000] [--steps 1000]

FOLDER has files such as concrete.npz with arrays X (N, D) and y (N,). One model for all: Matern 5/2 with a lengthscale for each
column, inducing points at k-means centres that are learned, standardized data, float64, nine tenths of the rows to train. Printed:
evaluations of loss and gradient, seconds without compilation, the loss at the end (minus the bound and the log prior, nats; lower
is better), and the mean log density of test outputs where y has standard deviation 1. `optax.lbfgs` has its own line search (zoom)
and the rule of `fit_lbfgs`: ten steps that lower the loss by less than 0.01 nats. Adam(0.02) takes --steps steps.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_orthgp as ogp
from benchmarks.equal_time import Data
from numpyro_orthgp import init, kernels
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.objective import Objective, objective_of

WINDOW, TOLERANCE = 10, 0.01


def model(X, y=None, *, Z):
    lengthscale = numpyro.sample(
        "lengthscale", dist.LogNormal(0.5 * jnp.log(X.shape[1]), 1.0).expand([X.shape[1]]).to_event(1)
    )
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    numpyro.sample(
        "y", ogp.CollapsedGP(scale**2 * kernels.Matern52(lengthscale), X, numpyro.param("Z", Z), noise), obs=y
    )


def load(path: Path, max_rows: int) -> Data:
    with np.load(path) as arrays:
        X, y = arrays["X"].astype(float), arrays["y"].astype(float)
    order = np.random.default_rng(0).permutation(len(X))[: max_rows * 10 // 9]
    X, y, num = X[order], y[order], len(order) * 9 // 10
    spread = X[:num].std(0)
    X = (X - X[:num].mean(0)) / np.where(spread > 0, spread, 1)
    y = (y - y[:num].mean()) / y[:num].std()
    return Data(*(jnp.asarray(a) for a in (X[:num], y[:num], X[num:], y[num:])))


def with_optax(objective: Objective, num_steps: int) -> tuple[Any, int]:
    """Parameters, a vector, and the number of evaluations."""
    optimizer = optax.lbfgs(memory_size=20)

    def value(x: Any) -> Any:
        return objective.value_and_grad(x)[0]

    @jax.custom_vjp
    def differentiable(x: Any) -> Any:
        return value(x)

    differentiable.defvjp(objective.value_and_grad, lambda gradient, g: (g * gradient,))

    @jax.jit
    def step(x, state):
        loss, gradient = optax.value_and_grad_from_state(differentiable)(x, state=state)
        moves, state = optimizer.update(gradient, state, x, value=loss, grad=gradient, value_fn=differentiable)
        return optax.apply_updates(x, moves), state, loss

    x = jnp.asarray(objective.start)
    state = optimizer.init(x)
    jax.block_until_ready(step(x, state))
    losses, evaluations = [], 1
    for _ in range(num_steps):
        x, state, loss = step(x, state)
        losses.append(float(loss))
        evaluations += int(optax.tree_utils.tree_get(state, "info").num_linesearch_steps)
        if len(losses) > WINDOW and losses[-1 - WINDOW] - losses[-1] < TOLERANCE:
            break
    return x, evaluations


def rows(data: Data, num_inducing: int, num_steps: int):
    """Method, evaluations, seconds, loss and test log density."""
    kwargs = {"Z": init.kmeans(random.PRNGKey(0), data.X, min(num_inducing, len(data.y)))}
    svi = SVI(model, AutoDelta(model), optax.adam(0.02), Trace_ELBO())
    pair = (data.X, data.y)
    state = svi.init(random.PRNGKey(0), *pair, **kwargs)
    objective = objective_of(svi, state, Batches(pair, None, (0,)), len(data.y), kwargs)

    def measured(params: Any) -> tuple[float, float]:
        loss = svi.loss.loss(random.PRNGKey(0), params, model, svi.guide, *pair, **kwargs)
        f = ogp.posterior(model, svi.guide, params, *pair, **kwargs)["y"]
        y = ogp.likelihoods.Gaussian(f(data.X_test), params["noise_auto_loc"])
        return float(loss), float(y.log_predictive(data.y_test).mean())

    begin = time.perf_counter()
    result = ogp.fit_lbfgs(svi, random.PRNGKey(0), pair, num_steps=num_steps, **kwargs)
    seconds = time.perf_counter() - begin
    evaluations = int(re.search(r"(\d+) evaluations", result.message)[1])
    yield f"fit_lbfgs ({result.status})", evaluations, seconds, *measured(result.params)
    begin = time.perf_counter()
    x, evaluations = with_optax(objective, num_steps)
    seconds = time.perf_counter() - begin
    yield "optax.lbfgs", evaluations, seconds, *measured(svi.get_params(objective.state_at(x)))
    begin = time.perf_counter()
    adam = ogp.fit(svi, random.PRNGKey(0), pair, num_steps=num_steps, progress_bar=False, **kwargs)
    yield "Adam", num_steps, time.perf_counter() - begin, *measured(adam.params)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of npz files with arrays X and y")
    parser.add_argument("--sets", nargs="+", default=["concrete", "energy", "airfoil"])
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--max-rows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    print(f"{'set':10s} {'method':24s} {'evaluations':>11s} {'seconds':>8s} {'loss':>10s} {'test log p':>10s}")
    for name in args.sets:
        for method, evaluations, seconds, loss, score in rows(
            load(args.data / f"{name}.npz", args.max_rows), args.num_inducing, args.steps
        ):
            print(f"{name:10s} {method:24s} {evaluations:11d} {seconds:8.1f} {loss:10.2f} {score:10.3f}", flush=True)


if __name__ == "__main__":
    main()
