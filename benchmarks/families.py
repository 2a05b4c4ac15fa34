"""Families of q beside each other: the bound that each reaches at the same hyperparameters, and the time of a step.

    python -m benchmarks.families [--data FILE.npz] [--rows 4000] [--num-inducing 200] [--steps 4000]

Hyperparameters are those of a collapsed fit, so the best q of full covariance is known, and with it what a family gives away after
so many steps of Adam. The rows "covariance of rank K" are the usual other way to put a low rank in, S = D^2 + G G^T, as a family of
this script's own. A step is one of minibatches of 1024 rows in which points and hyperparameters are learned too.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods
from numpyro_orthgp.gaussians import LowRank, Whitened

BATCH = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankCovariance(Whitened):
    """S = D^2 + G G^T."""

    scale: jax.Array
    factor: jax.Array

    name = "low-rank covariance"
    constraints = {"scale": dist.constraints.positive}

    @classmethod
    def start(cls, shape, scale, rank=16):
        noise = 0.1 * random.normal(random.PRNGKey(0), (*shape, rank), scale.dtype) / rank**0.5
        return cls(jnp.zeros(shape, scale.dtype), jnp.full(shape, scale), noise * scale)

    def spread(self, A):
        return jnp.concatenate([self.scale[..., None] * A, jnp.swapaxes(self.factor, -1, -2) @ A], -2)


def data(path: str | None, rows: int) -> tuple[jax.Array, jax.Array]:
    """Standardized inputs and outputs: of a file with X and y, or a smooth function of four columns with noise."""
    rng = np.random.default_rng(0)
    if path is None:
        X = rng.uniform(-2, 2, (rows, 4))
        y = np.sin(2 * X[:, 0]) * X[:, 1] + np.cos(X[:, 2] * X[:, 3]) + 0.3 * rng.normal(size=rows)
    else:
        with np.load(path) as file:
            X, y = file["X"], np.ravel(file["y"])
        picked = rng.permutation(len(X))[:rows]
        X, y = X[picked], y[picked]
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    return jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


def hyperparameters(X: jax.Array, y: jax.Array, Z: jax.Array, steps: int) -> dict[str, jax.Array]:
    """Those of a collapsed fit."""

    def loss(u):
        p = jax.tree.map(jnp.exp, u)
        kernel = p["variance"] * kernels.Matern32(p["lengthscale"])
        return -ogp.CollapsedGP(kernel, X, Z, p["noise"]).log_prob(y) / len(X)

    u = {"variance": jnp.zeros(()), "lengthscale": jnp.log(init.median_lengthscale(X)), "noise": jnp.log(0.5)}
    optim = optax.adam(0.05)

    @jax.jit
    def step(u, state):
        value, g = jax.value_and_grad(loss)(u)
        updates, state = optim.update(g, state)
        return optax.apply_updates(u, updates), state, value

    state = optim.init(u)
    for _ in range(steps):
        u, state, _ = step(u, state)
    return jax.tree.map(jnp.exp, u)


def learned(p: dict[str, jax.Array], Z: jax.Array) -> tuple[kernels.Kernel, jax.Array]:
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", p["lengthscale"], constraint=positive)
    return numpyro.param("variance", p["variance"], constraint=positive) * kernels.Matern32(lengthscale), numpyro.param(
        "Z", Z
    )


def milliseconds(svi: SVI, times: int = 20) -> float:
    """Of a step, the median of five runs."""
    state = svi.init(random.PRNGKey(0), fixed=False)
    update = jax.jit(lambda state: svi.update(state, fixed=False)[0])
    state, taken = jax.block_until_ready(update(state)), []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            state = update(state)
        jax.block_until_ready(state)
        taken.append(1e3 * (time.perf_counter() - start) / times)
    return float(np.median(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="an .npz file with X and y")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--num-inducing", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    X, y = data(args.data, args.rows)
    Z = init.kmeans(random.PRNGKey(0), X, args.num_inducing)
    p = hyperparameters(X, y, Z, min(args.steps, 200))
    kernel = p["variance"] * kernels.Matern32(p["lengthscale"])
    best = ogp.CollapsedGP(kernel, X, Z, p["noise"], bound="titsias2009").log_prob(y) / len(X)
    print(f"N = {len(X)}, M = {len(Z)}; the best q of full covariance: {best:.4f} nats per point")

    def model(fixed=True):
        own, points = (kernel, Z) if fixed else learned(p, Z)
        rows = slice(None) if fixed else slice(BATCH)
        f = ogp.gp("f", own, points)
        with numpyro.plate("data", len(X), subsample_size=len(X[rows])):
            numpyro.sample("y", likelihoods.Gaussian(f(X[rows]), p["noise"]), obs=y[rows])

    families = {"full": "full", "diagonal": "diagonal"}
    for rank in (4, 16, 64):
        families[f"low_rank, K = {rank}"] = LowRank.of_rank(rank)
        families[f"covariance of rank {rank}"] = partial(LowRankCovariance.start, rank=rank)
    print("| family | parameters of q | short of it, nats per point | ms per step |\n| --- | --- | --- | --- |")
    for name, covariance in families.items():
        optim = optax.adam(optax.cosine_decay_schedule(0.02, args.steps))
        svi = SVI(model, ogp.AutoSparseGP(model, covariance=covariance), optim, TraceMeanField_ELBO())
        state = svi.init(random.PRNGKey(0))
        run = jax.jit(lambda state, svi=svi: jax.lax.fori_loop(0, args.steps, lambda _, s: svi.update(s)[0], state))
        state = run(state)
        short = float(best + svi.evaluate(state) / len(X))
        count = sum(v.size for v in svi.get_params(state).values())
        print(f"| {name} | {count:,} | {short:.4f} | {milliseconds(svi):.2f} |", flush=True)


if __name__ == "__main__":
    main()
