"""Steps of many latent functions that share inducing points, beside the arithmetic floor and the memory of their temporaries.

    python -m benchmarks.many_functions [--functions 10,100] [--sizes 64,256] [--batch-size 1024]

Gaussian noise, Matern 3/2 with eight lengthscales, everything learned. The floor counts three dense products of M x M with M x B
for each function, and as many for what they share, at the rate of a product of 2048 x 2048 in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.peers.floor import product_flops
from numpyro_orthgp import kernels, likelihoods


def model(X: Any, Y: Any, Z: Any) -> None:
    lengthscale = numpyro.param("lengthscale", jnp.ones(X.shape[1], X.dtype), constraint=dist.constraints.positive)
    f = ogp.gp("f", kernels.Matern32(lengthscale), numpyro.param("Z", Z), num_latents=Y.shape[1])
    with numpyro.plate("data", 32_000, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3).to_event(1), obs=Y)


def seconds(run: Any, *args: Any, blocks: int = 5) -> float:
    """Median over blocks of the time of a call."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(blocks):
        started, num = time.perf_counter(), 0
        while num < 2 or time.perf_counter() - started < 0.3:
            jax.block_until_ready(run(*args))
            num += 1
        times.append((time.perf_counter() - started) / num)
    return statistics.median(times)


def main(argv: list[str] | None = None) -> list[tuple[int, int, float, float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--functions", "10,100"), ("--sizes", "64,256")):
        parser.add_argument(name, type=lambda text: [int(n) for n in text.split(",")], default=default)
    parser.add_argument("--batch-size", type=int, default=1024)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    square = jnp.asarray(rng.normal(size=(2048, 2048)), jnp.float32)
    rate = product_flops() / seconds(jax.jit(jnp.matmul), square, square)
    B = args.batch_size
    X = jnp.asarray(rng.normal(size=(B, 8)), jnp.float32)
    rows = []
    print(f"{rate / 1e9:.0f} GFLOP/s\n{'functions':>10s}{'M':>6s}{'ms':>9s}{'/ floor':>9s}{'temporaries, MB':>17s}")
    for P in args.functions:
        for M in args.sizes:
            Y, Z = jnp.asarray(rng.normal(size=(B, P)), jnp.float32), X[:M]
            svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(1e-3), TraceMeanField_ELBO())
            state = jax.jit(lambda key, svi=svi, Y=Y, Z=Z: svi.init(key, X, Y, Z))(jax.random.PRNGKey(0))
            step = jax.jit(lambda state, svi=svi, Y=Y, Z=Z: svi.update(state, X, Y, Z)).lower(state).compile()
            ms = 1e3 * seconds(step, state)
            memory = step.memory_analysis().temp_size_in_bytes / 2**20
            floor = 1e3 * 6 * (P + 1) * M * M * B / rate
            rows.append((P, M, ms, ms / floor, memory))
            print(f"{P:10d}{M:6d}{ms:9.1f}{ms / floor:9.2f}{memory:17.0f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
