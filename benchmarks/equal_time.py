"""SOLVE-GP against the SVGP that takes as long for a step.

    python -m benchmarks.equal_time --data kin40k.npz [--num-inducing 256] [--steps 4000] [--seeds 0 1]

Steps of SOLVE-GP (M + M) and of SVGP with M to 2 M points are timed in one run, blocks interleaved. Then SOLVE-GP is fitted beside
the SVGPs with M and 2 M points and the smallest one whose step takes no less time than SOLVE-GP's (so the comparison favours
SVGP): Matern 3/2, Adam(0.01) decaying by a cosine, the same minibatches of 1024 for all, inducing points at k-means centres, 90 %
of the rows to train. Run with OPENBLAS_NUM_THREADS=1 on a CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.step_time import library_step, model, timed
from numpyro_orthgp import init, likelihoods

BATCH = 1024


class Data(NamedTuple):
    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array


def load(path: Path, seed: int) -> Data:
    with np.load(path) as arrays:
        X, y = arrays["X"].astype(float), arrays["y"].astype(float)
    order = np.random.default_rng(seed).permutation(len(X))
    X, y, num_train = X[order], y[order], int(0.9 * len(X))
    X = (X - X[:num_train].mean(0)) / X[:num_train].std(0)
    y = (y - y[:num_train].mean()) / y[:num_train].std()
    X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)
    return Data(X[:num_train], y[:num_train], X[num_train:], y[num_train:])


def points(data: Data, sizes: tuple[int, ...], seed: int) -> list[jax.Array]:
    Z = init.kmeans(random.PRNGKey(seed), data.X[:20_000], sum(sizes))
    Z = random.permutation(random.PRNGKey(seed + 1), Z)
    return [Z[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


def step_times(data: Data, methods: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Milliseconds per step of each, all in one run."""
    X, y, adam = data.X[:BATCH], data.y[:BATCH], optax.adam(1e-2)
    steps = {sizes: library_step([X[:n] for n in sizes], len(data.y), X, y, adam) for sizes in methods}
    return timed(steps, X, y, blocks=15, per_block=5)[0]


def fit(data: Data, sizes: tuple[int, ...], num_steps: int, seed: int) -> tuple[float, float, float]:
    """The bound per point (mean of the last twentieth of the steps), test log density and RMSE, y standardized."""
    guide = ogp.AutoSparseGP(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(1e-2, num_steps, 0.01)), TraceMeanField_ELBO())
    kwargs = {"N": len(data.y), "inducing": points(data, sizes, seed)}

    @jax.jit
    def run(X, y):
        def step(state, key):
            rows = random.randint(key, (BATCH,), 0, len(y))
            return svi.update(state, X[rows], y[rows], **kwargs)

        state = svi.init(random.PRNGKey(seed), X[:BATCH], y[:BATCH], **kwargs)
        state, losses = lax.scan(step, state, random.split(random.PRNGKey(seed + 2), num_steps))
        params = svi.get_params(state)
        f = ogp.posterior(model, guide, params, X[:BATCH], y[:BATCH], **kwargs)["f"]
        return losses[-num_steps // 20 :].mean(), f, params["noise"]

    loss, f, noise = run(data.X, data.y)
    likelihood = jax.jit(lambda f, X: likelihoods.Gaussian(f(X), noise))(f, data.X_test)
    error = jnp.sqrt(jnp.mean((likelihood.mean - data.y_test) ** 2))
    return -float(loss) / len(data.y), float(likelihood.log_predictive(data.y_test).mean()), float(error)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="npz file with arrays X (N, D) and y (N,)")
    parser.add_argument("--num-inducing", type=int, default=256, help="M")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args(argv)
    M = args.num_inducing
    solve, sizes = (M, M), [(M + M * i // 8,) for i in range(9)]
    ms = step_times(load(args.data, 0), [solve, *sizes])
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "not set")
    print(f"JAX {jax.__version__}, {os.cpu_count()} cores, OPENBLAS_NUM_THREADS {threads}; ms per step:")
    print("  ".join(f"{'+'.join(map(str, s))}: {t:.1f}" for s, t in ms.items()))
    equal = next((s for s in sizes if ms[s] >= ms[solve]), sizes[-1])
    print(f"\n{'method':20s}  {'ms/step':>7s}  {'seed':>4s}  {'bound/N':>8s}  {'test log p':>10s}  {'test RMSE':>9s}")
    for seed in args.seeds:
        data = load(args.data, seed)
        for chosen in dict.fromkeys([sizes[0], equal, solve, sizes[-1]]):
            name = f"{'SVGP' if len(chosen) == 1 else 'SOLVE-GP'} ({'+'.join(map(str, chosen))})"
            bound, log_p, error = fit(data, chosen, args.steps, seed)
            print(f"{name:20s}  {ms[chosen]:7.1f}  {seed:4d}  {bound:8.4f}  {log_p:10.4f}  {error:9.4f}", flush=True)


if __name__ == "__main__":
    main()
