"""Thompson sampling: the minimum of an expensive function, found by minimizing functions drawn from the posterior.

    python examples/thompson.py [--rounds 10] [--batch 4] [--runs 8] [--out out] [--seed 0] [--quick]

Branin's function on a square has three minima of the same depth. After 8 random evaluations each round fits an exact GP (a
`CollapsedGP` whose inducing points are the inputs), draws as many functions from its posterior as there are evaluations to make at
once, and evaluates where each of them is smallest: where the posterior is uncertain they disagree, so a batch explores by
itself. Paths are functions: evaluated at random points first, then followed downhill by their gradients. Compared
with random search, over several runs; all shapes are fixed, so that one compiled program serves all rounds and all runs.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels

MINIMUM = 0.39788735772973816
NUM_START = 8
NOISE = 0.001  # in standard deviations of y: next to none


def branin(X: jax.Array) -> jax.Array:
    """Branin's function with its inputs scaled to the unit square, shape (..., 2) to (...)."""
    a, b = 15 * X[..., 0] - 5, 15 * X[..., 1]
    valley = b - 5.1 / (4 * jnp.pi**2) * a**2 + 5 / jnp.pi * a - 6
    return valley**2 + 10 * (1 - 1 / (8 * jnp.pi)) * jnp.cos(a) + 10


class Evaluations(NamedTuple):
    """Rows beyond the first ``num`` have not been evaluated yet: there X holds random ones, y zeros."""

    X: jax.Array
    y: jax.Array
    num: jax.Array

    def add(self, X: jax.Array) -> Evaluations:
        update = lax.dynamic_update_slice_in_dim
        return Evaluations(update(self.X, X, self.num, 0), update(self.y, branin(X), self.num, 0), self.num + len(X))

    @property
    def observed(self) -> jax.Array:
        return jnp.arange(len(self.y)) < self.num


def model(X, y=None, *, observed):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.7).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.7))
    kernel = scale**2 * kernels.Matern52(lengthscale)
    numpyro.sample("y", ogp.CollapsedGP(kernel, X, X, NOISE, observed=observed), obs=y)


def fit(data: Evaluations, num_steps: int) -> ogp.GPFunction:
    """The posterior of the standardized function at the most probable hyperparameters."""
    y, weight = data.y, data.observed / data.num
    mean = jnp.sum(weight * y)
    y = (y - mean) / jnp.sqrt(jnp.sum(weight * (y - mean) ** 2))
    guide, kwargs = AutoDelta(model), {"observed": data.observed}
    svi = SVI(model, guide, optax.adam(0.05), Trace_ELBO())
    state = svi.init(random.PRNGKey(0), data.X, y, **kwargs)
    state, _ = lax.scan(lambda s, _: svi.update(s, data.X, y, **kwargs), state, None, length=num_steps)
    return ogp.posterior(model, guide, svi.get_params(state), data.X, y, **kwargs)["y"]


def minimize(
    paths: ogp.functions.paths.Paths, rng_key: jax.Array, num_steps: int, num_random: int = 500, num_starts: int = 8
):
    """Where each path is smallest in the square: the best of random points, followed downhill, shape (num, 2)."""
    X = random.uniform(rng_key, (num_random, 2))
    _, best = lax.top_k(-paths(X), num_starts)
    X = X[best]  # (num, starts, 2)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))

    def step(state, _):
        X, memory = state
        updates, memory = optimizer.update(jax.grad(lambda X: paths(X).sum())(X), memory)
        return (jnp.clip(optax.apply_updates(X, updates), 0, 1), memory), None

    (X, _), _ = lax.scan(step, (X, optimizer.init(X)), None, length=num_steps)
    return X[jnp.arange(paths.num), jnp.argmin(paths(X), axis=1)]


@partial(jax.jit, static_argnames=("num_rounds", "batch", "num_steps"))
@partial(jax.vmap, in_axes=(0, 0, None, None, None))
def search(X: jax.Array, rng_key: jax.Array, num_rounds: int, batch: int, num_steps: int) -> Evaluations:
    """A whole run: a start at the first 8 rows of X, then ``num_rounds`` rounds."""
    start = Evaluations(X, jnp.zeros(len(X)), jnp.asarray(0)).add(X[:NUM_START])

    def one_round(data, key):
        path_key, minimize_key = random.split(key)
        paths = fit(data, num_steps).sample_paths(path_key, batch)
        return data.add(minimize(paths, minimize_key, num_steps)), None

    return lax.scan(one_round, start, random.split(rng_key, num_rounds))[0]


def regret(y: jax.Array) -> np.ndarray:
    """Distance of the best value so far from the minimum, shape (runs, N)."""
    return np.minimum.accumulate(np.asarray(y), axis=1) - MINIMUM


def save_figure(path: Path, X: np.ndarray, regrets: dict[str, np.ndarray]) -> None:
    """Where one run looked, and regrets of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    grid = np.linspace(0, 1, 200)
    values = branin(jnp.stack(jnp.meshgrid(grid, grid), -1))
    left.contourf(grid, grid, np.log(values), levels=20, cmap="cividis")
    left.plot(*X[:NUM_START].T, "s", color="white", mec="black", ms=6, label="start")
    dots = left.scatter(
        *X[NUM_START:].T, c=np.arange(len(X) - NUM_START), cmap="Reds", edgecolors="black", s=40, clip_on=False
    )
    figure.colorbar(dots, ax=left, label="evaluation")
    left.legend(loc="upper right")
    left.set(title="Branin's function (log), evaluations of one run", xlabel="$x_1$", ylabel="$x_2$")
    for (name, values), colour in zip(regrets.items(), ("#D55E00", "#0072B2"), strict=True):
        number = np.arange(1, values.shape[1] + 1)
        right.plot(number, values.T, color=colour, lw=0.7, alpha=0.5)
        right.plot(number, np.median(values, 0), color=colour, lw=2.5, label=f"{name}, median")
    right.axvline(NUM_START, color="0.5", ls=":", lw=1)
    right.set(yscale="log", xlabel="evaluations", ylabel="regret", title=f"{len(values)} runs")
    right.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4, help="evaluations, and paths, of each round")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="few runs and steps, to see that all of it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.runs = 3, 2

    jax.config.update("jax_enable_x64", True)  # evaluations come close to each other near the minima
    N = NUM_START + args.rounds * args.batch
    start_key, search_key = random.split(random.PRNGKey(args.seed))
    X = random.uniform(start_key, (args.runs, N, 2))
    data = search(X, random.split(search_key, args.runs), args.rounds, args.batch, 20 if args.quick else 60)
    regrets = {"random search": regret(branin(X)), "Thompson sampling": regret(data.y)}

    print(f"{args.runs} runs of {NUM_START} random evaluations and {args.rounds} rounds of {args.batch}.\n")
    print(f"{'regret after':>12s}  {'random':>10s}  {'(worst)':>10s}  {'Thompson':>10s}  {'(worst)':>10s}")
    for n in range(NUM_START, N + 1, args.batch):
        columns = [f(values[:, n - 1]) for values in regrets.values() for f in (np.median, np.max)]
        print(f"{n:12d}  " + "  ".join(f"{value:10.2g}" for value in columns))
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "thompson.png", np.asarray(data.X[0]), regrets)
    print(f"\nMedian and worst regret over runs. Wrote {args.out / 'thompson.png'}.")


if __name__ == "__main__":
    main()
