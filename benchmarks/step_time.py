"""Time of one training step (loss, all gradients, Adam), as ratios from one run.

Compares SVGP, SOLVE-GP and SVGP with twice the points, written with numpyro_orthgp and fitted by NumPyro's ``SVI``, with a
hand-written plain JAX step of the same bound. Runs of the four are interleaved and the medians of many short blocks are
compared, since machines are noisy. Example::

    python -m benchmarks.step_time --data kin40k.npz --num-inducing 256

Without ``--data`` the inputs are random: the time of a step does not depend on them.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.peers.plain import plain_jax_step
from numpyro_orthgp import kernels, likelihoods


def model(X, y, *, N, inducing):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.ones(X.shape[1], X.dtype), constraint=positive)
    variance = numpyro.param("variance", jnp.ones((), X.dtype), constraint=positive)
    noise = numpyro.param("noise", jnp.asarray(0.3, X.dtype), constraint=positive)
    sets = [numpyro.param(f"Z{i}", Z) for i, Z in enumerate(inducing)]
    f = ogp.gp("f", variance * kernels.Matern32(lengthscale), sets)
    with numpyro.plate("data", N, subsample_size=X.shape[0]):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def library_step(inducing, N, X, y, optimizer, **options):
    svi = SVI(model, ogp.AutoSparseGP(model, **options), optimizer, TraceMeanField_ELBO())
    state = svi.init(jax.random.PRNGKey(0), X, y, N=N, inducing=inducing)
    return jax.jit(lambda state, X, y: svi.update(state, X, y, N=N, inducing=inducing)), state


def timed(steps, X, y, blocks, per_block):
    """Median milliseconds per step of each, blocks interleaved; and the last losses."""
    states = {name: state for name, (_, state) in steps.items()}
    times, losses = {name: [] for name in steps}, {}
    for block in range(-1, blocks):
        for name, (step, _) in steps.items():
            state = states[name]
            start = time.perf_counter()
            for _ in range(per_block):
                state, losses[name] = step(state, X, y)
            jax.block_until_ready(losses[name])
            if block >= 0:
                times[name].append((time.perf_counter() - start) / per_block * 1e3)
            states[name] = state
    return {name: float(np.median(t)) for name, t in times.items()}, {n: float(v) for n, v in losses.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="npz file with arrays X (N, D) and y (N,); random inputs if absent")
    parser.add_argument("--num-inducing", type=int, default=256, help="M")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--per-block", type=int, default=10)
    parser.add_argument("--x64", action="store_true", help="float64 instead of float32")
    args = parser.parse_args(argv)
    if args.x64:
        jax.config.update("jax_enable_x64", True)
    dtype = jnp.float64 if args.x64 else jnp.float32
    rng = np.random.default_rng(0)
    if args.data:
        with np.load(args.data) as archive:
            X, y = archive["X"], archive["y"]
    else:
        X, y = rng.normal(size=(40_000, 8)), rng.normal(size=40_000)
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    order, M = rng.permutation(len(X)), args.num_inducing
    Xb, yb = (jnp.asarray(a[order[: args.batch_size]], dtype) for a in (X, y))
    Z, O = (jnp.asarray(X[order[args.batch_size + i * M :][:M]], dtype) for i in range(2))
    adam = optax.adam(1e-2)
    common = (len(X), Xb, yb, adam)
    steps = {
        f"plain JAX SVGP ({M})": plain_jax_step(Z, *common),
        f"SVGP ({M})": library_step([Z], *common),
        f"SOLVE-GP ({M}+{M})": library_step([Z, O], *common),
        f"SOLVE-GP ({M}+{M}) tight": library_step([Z, O], *common, residual="tight"),
        f"SVGP ({2 * M})": library_step([jnp.concatenate([Z, O])], *common),
    }
    ms, losses = timed(steps, Xb, yb, args.blocks, args.per_block)
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "not set")
    device = jax.devices()[0].device_kind
    print(
        f"JAX {jax.__version__}, {device}, {os.cpu_count()} cores, OPENBLAS_NUM_THREADS {threads}; "
        f"{np.dtype(dtype).name}, B = {args.batch_size}, D = {X.shape[1]}, "
        f"medians of {args.blocks} blocks of {args.per_block} steps"
    )
    for name in steps:
        print(f"{name:28s} {ms[name]:8.2f} ms   loss {losses[name]:.6g}")
    names = list(steps)
    print(f"SVGP / plain JAX SVGP             {ms[names[1]] / ms[names[0]]:.3f}")
    print(f"SOLVE-GP / SVGP with 2M           {ms[names[2]] / ms[names[4]]:.3f}")
    print(f"tight SOLVE-GP / SVGP with 2M     {ms[names[3]] / ms[names[4]]:.3f}")
    return ms


if __name__ == "__main__":
    main()
