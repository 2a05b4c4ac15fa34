"""What a step of a GP-LVM on minibatches costs by the number of rows, with ``lazy_rows`` and with Adam on whole tables.

Means and scales of N latent inputs, batches of B rows, float32. Milliseconds of a step within ``fit``: the time between two looks
at the fit, over the steps between, median, once the length of calls has settled; the copy of the state that each call makes is
part of it. Rounds alternate between the two, and the ratio is of their medians within one run.

    python -m benchmarks.gplvm_rows [--rows 10000 100000 1000000 5000000] [--batch-size 256] [--rounds 2] [--seconds 12]
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp

NUM_OUTPUTS, NUM_POINTS, DIM = 10, 64, 2


class _Enough(KeyboardInterrupt):
    """Time is up; ``fit`` ends as by Ctrl-C."""


def milliseconds(num_rows: int, batch_size: int, optimizer: Any, seconds: float) -> float:
    """Median time of a step."""
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(num_rows, NUM_OUTPUTS)).astype(np.float32)
    Z, start = (jnp.asarray(rng.normal(size=(n, DIM)), jnp.float32) for n in (NUM_POINTS, num_rows))

    def model(Y: Any) -> None:
        f = ogp.gp("f", ogp.kernels.RBF(1.0), Z, num_latents=NUM_OUTPUTS)
        with numpyro.plate("data", num_rows, subsample_size=len(Y)):
            X = ogp.latent_inputs("X", num_rows, DIM)
            numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.5).to_event(1), obs=Y)

    seen: list[tuple[int, float]] = []

    def look(progress: Any) -> None:
        seen.append((progress.step, time.perf_counter()))
        if seen[-1][1] - seen[0][1] > seconds and len(seen) > 8:
            raise _Enough

    guide = ogp.AutoSparseGP(model, latents={"X": start})
    svi = SVI(model, guide, optimizer, TraceMeanField_ELBO())
    steps = {"batch_size": batch_size, "num_steps": 10**6, "progress_bar": False}
    ogp.fit(svi, jax.random.PRNGKey(0), (Y,), **steps, callback=look)
    calls = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen)]
    settled = calls[len(calls) // 2 :]
    return 1e3 * float(np.median([took / num for num, took in settled]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 5_000_000])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each fit")
    args = parser.parse_args()
    print(f"{'rows':>10s} {'adam, ms':>10s} {'lazy_rows':>10s} {'ratio':>7s}", flush=True)
    for num_rows in args.rows:
        found: dict[str, list[float]] = {"adam": [], "lazy": []}
        for _ in range(args.rounds):
            for name, optimizer in (("adam", optax.adam(0.01)), ("lazy", ogp.lazy_rows(optax.adam(0.01)))):
                found[name].append(milliseconds(num_rows, args.batch_size, optimizer, args.seconds))
        dense, lazy = (float(np.median(times)) for times in found.values())
        print(f"{num_rows:10d} {dense:10.2f} {lazy:10.2f} {dense / lazy:7.1f}", flush=True)


if __name__ == "__main__":
    main()
