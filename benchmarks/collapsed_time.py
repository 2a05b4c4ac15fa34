"""Time of the collapsed bound and its gradient, beside GPflow's and GPJax's in one run.

    python benchmarks/collapsed_time.py [--data kin40k.npz] [--num-data 20000] [--num-inducing 512] [--dtype float32] [--rounds 5]
        [--peer gpflow=PYTHON] [--peer gpjax=PYTHON]

SGPR with an RBF kernel of one lengthscale per input: value and gradient for lengthscales, variance, noise and inducing points. A
peer is timed if the interpreter of an environment that has it is given. Libraries take turns, a fresh process each time, so
that what else the machine does hits all alike; printed are the least and the median of the rounds, ratios of the least, and the
most memory that a process had, data and libraries included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def ours(bound, block_size=None):
    def prepare(X, y, Z):
        import jax
        import jax.numpy as jnp

        jax.config.update("jax_enable_x64", X.dtype == np.float64)
        import numpyro_orthgp as ogp
        from numpyro_orthgp import kernels

        X, y, Z = (jnp.asarray(a) for a in (X, y[:, 0], Z))

        def log_prob(params):
            kernel = params["variance"] * kernels.RBF(params["lengthscale"])
            gp = ogp.CollapsedGP(kernel, X, params["Z"], params["noise"], bound=bound, block_size=block_size)
            return gp.log_prob(y)

        one = jnp.ones((), X.dtype)
        params = {"variance": one, "lengthscale": jnp.full(X.shape[1], 2 * one), "noise": 0.3 * one, "Z": Z}
        step = jax.jit(jax.value_and_grad(log_prob))
        return lambda: float(jax.block_until_ready(step(params))[0])

    return prepare


def gpflow(X, y, Z):
    import gpflow
    import tensorflow as tf

    gpflow.config.set_default_float(X.dtype)
    gpflow.config.set_default_jitter(1e-6)
    kernel = gpflow.kernels.RBF(variance=1.0, lengthscales=np.full(X.shape[1], 2.0, X.dtype))
    model = gpflow.models.SGPR((X, y), kernel, inducing_variable=Z, noise_variance=0.09)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            value = model.maximum_log_likelihood_objective()
        return value, tape.gradient(value, model.trainable_variables)

    return lambda: float(step()[0].numpy())


def gpjax(X, y, Z):
    import jax

    jax.config.update("jax_enable_x64", X.dtype == np.float64)
    import equinox as eqx
    import gpjax as gpx
    import jax.numpy as jnp
    import paramax

    data = gpx.Dataset(X=jnp.asarray(X), y=jnp.asarray(y))
    kernel = gpx.kernels.RBF(lengthscale=jnp.full(X.shape[1], 2.0, X.dtype), variance=1.0)
    model = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel) * gpx.likelihoods.Gaussian(
        obs_stddev=jnp.asarray(0.3, X.dtype)
    )
    q = gpx.variational_families.CollapsedVariationalGaussian(model=model, inducing_inputs=jnp.asarray(Z))
    params, static = eqx.partition(q, eqx.is_inexact_array)
    cast = jax.tree.map(lambda a: a.astype(X.dtype), params)

    @jax.jit
    def step(params):
        def objective(params):
            return gpx.objectives.collapsed_elbo(paramax.unwrap(eqx.combine(params, static)), data)

        return jax.value_and_grad(objective)(params)

    return lambda: float(jax.block_until_ready(step(cast))[0])


LIBRARIES = {
    "titsias2009": ours("titsias2009"),
    "titsias2025": ours("titsias2025"),
    "titsias2009, at once": ours("titsias2009", 10**9),
    "gpflow": gpflow,
    "gpjax": gpjax,
}


def measure(name: str, problem: Path, calls: int) -> None:
    """In a process of its own: print the value, the least time of a call, and the most memory that the process had."""
    with np.load(problem) as file:
        call = LIBRARIES[name](file["X"], file["y"], file["Z"])
    value = call()
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"value": value, "seconds": min(seconds), "peak": peak}))


def load(args: argparse.Namespace) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if args.data is None:
        X = rng.normal(size=(args.num_data, 8))
        y = np.sin(X.sum(1)) + 0.1 * rng.normal(size=args.num_data)
    else:
        with np.load(args.data) as file:
            rows = rng.permutation(len(file["y"]))[: args.num_data]
            X, y = file["X"][rows], file["y"][rows]
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    return {
        "X": X.astype(args.dtype),
        "y": y[:, None].astype(args.dtype),
        "Z": X[: args.num_inducing].astype(args.dtype),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--num-data", type=int, default=20_000)
    parser.add_argument("--num-inducing", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=7, help="timed calls of a process; the least counts")
    parser.add_argument("--only", action="append", choices=list(LIBRARIES), help="instead of all that can be run")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "PROBLEM"), help="used by the script itself")
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure[0], Path(args.measure[1]), args.calls)

    peers = dict(peer.split("=", 1) for peer in args.peer)
    names = args.only or [name for name in LIBRARIES if name in peers or name not in ("gpflow", "gpjax")]
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "default")
    print(
        f"{os.cpu_count()} CPU cores, OPENBLAS_NUM_THREADS {threads}, {args.dtype}, N = {args.num_data}, M = {args.num_inducing}"
    )
    seconds: dict[str, list[float]] = {name: [] for name in names}
    values, peaks = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        np.savez(problem, **load(args))
        for _ in range(args.rounds):
            for name in names:
                command = [peers.get(name, sys.executable), __file__, "--measure", name, str(problem)]
                command += ["--calls", str(args.calls)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
                found = json.loads(done.stdout.splitlines()[-1])
                seconds[name].append(found["seconds"])
                values[name], peaks[name] = found["value"], found["peak"]
    best = min(min(s) for name, s in seconds.items() if name not in peers)
    print(f"{'':30s}{'least s':>9s}{'median s':>10s}{'/ ours':>8s}{'peak GB':>9s}{'bound':>14s}")
    for name, s in seconds.items():
        print(f"{name:30s}{min(s):9.3f}{np.median(s):10.3f}{min(s) / best:8.2f}{peaks[name]:9.2f}{values[name]:14.1f}")


if __name__ == "__main__":
    main()
