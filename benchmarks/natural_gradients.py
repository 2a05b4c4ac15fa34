"""Steps that natural gradients and Adam need for the same bound, hyperparameters and inducing points fixed.

Regression on kin40k (or random functions without ``--data``): Matern 3/2, the same minibatches for all. Prints the bound on all
training data after powers of two of steps, for SVGP, SOLVE-GP and ODVGP, and in how many natural steps each has the bound that
Adam has at the end. Example::

    python benchmarks/natural_gradients.py --data kin40k.npz --num-inducing 512
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import init, kernels, likelihoods


def model(X, y, *, N, inducing, lengthscale, noise):
    f = ogp.gp("f", kernels.Matern32(lengthscale), inducing)
    with numpyro.plate("data", N, subsample_size=X.shape[0]):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def train(X, y, rows, checkpoints, optimizer, natural, **kwargs):
    """Bounds on all data (nats) after the given numbers of steps, and seconds per step without compilation."""
    svi = SVI(model, ogp.AutoSparseGP(model, natural=natural), optimizer, TraceMeanField_ELBO(), N=len(X))
    state = svi.init(jax.random.PRNGKey(0), X[rows[0]], y[rows[0]], **kwargs)

    @jax.jit
    def run(state, rows, X, y, kwargs):  # all of them arguments: a constant would be worked out at compile time
        return jax.lax.scan(lambda s, r: (svi.update(s, X[r], y[r], **kwargs)[0], None), state, rows)[0]

    bound = jax.jit(lambda state, X, y, kwargs: -svi.evaluate(state, X, y, **kwargs))
    bounds, seconds, done = [], 0.0, 0
    for step in checkpoints:
        leg = run.lower(state, rows[done:step], X, y, kwargs).compile()
        start = time.perf_counter()
        state = jax.block_until_ready(leg(state, rows[done:step], X, y, kwargs))
        seconds, done = seconds + time.perf_counter() - start, step
        bounds.append(float(bound(state, X, y, kwargs)))
    return np.array(bounds), seconds / done


def collapsed(X, y, Z, *, lengthscale, noise, jitter=1e-6):
    """The bound at the best q of SVGP (Titsias 2009), in float64."""
    kernel = kernels.Matern32(lengthscale)
    K = np.asarray(kernel(Z, Z), np.float64) + jitter * np.eye(len(Z))
    A = np.linalg.solve(np.linalg.cholesky(K), np.asarray(kernel(Z, X), np.float64))
    B = np.eye(len(Z)) + A @ A.T / noise**2
    c = A @ np.asarray(y, np.float64) / noise**2
    quadratic = np.sum(np.asarray(y, np.float64) ** 2) / noise**2 - c @ np.linalg.solve(B, c)
    trace = (len(X) - np.sum(A**2)) / noise**2
    return -0.5 * (len(X) * np.log(2 * np.pi * noise**2) + np.linalg.slogdet(B)[1] + quadratic + trace)


def load(path, num_data, seed):
    if path is None:
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(num_data, 8))
        return X, np.sin(X @ rng.normal(size=(8, 4))).sum(1) + 0.3 * rng.normal(size=num_data)
    data = np.load(path)
    X, y = data["X"], data["y"]
    test = data["test_mask"][:, 0] if "test_mask" in data else np.zeros(len(X), bool)
    X, y = (X[~test] - X[~test].mean(0)) / X[~test].std(0), (y[~test] - y[~test].mean()) / y[~test].std()
    rows = np.random.default_rng(seed).permutation(len(X))[:num_data]
    return X[rows], y[rows]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="npz file with X, y and maybe test_mask (kin40k)")
    parser.add_argument("--num-data", type=int, default=40_000, help="rows to use at most")
    parser.add_argument("--num-inducing", type=int, default=512, help="M of SVGP; the others divide it")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000, help="of Adam")
    parser.add_argument("--natural-steps", type=int, default=100)
    parser.add_argument("--lengthscale", type=float, default=4.0)
    parser.add_argument("--noise", type=float, default=0.25)
    parser.add_argument("--adam", type=float, default=0.01)
    parser.add_argument("--rate", type=float, default=0.1, help="length of natural steps")
    parser.add_argument("--mean-only", type=float, default=0.1, help="Adam's rate for weights of mean-only points")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    X, y = (jnp.asarray(a, jnp.float32) for a in load(args.data, args.num_data, args.seed))
    fixed = {"lengthscale": args.lengthscale, "noise": args.noise}
    M, H = args.num_inducing, args.num_inducing // 2
    Z = init.kmeans(jax.random.PRNGKey(args.seed), X, M)
    few = init.kmeans(jax.random.PRNGKey(args.seed), X, H)
    O = init.greedy_variance(kernels.Matern32(args.lengthscale), X, H, given=few, max_points=5000)
    rows = np.random.default_rng(args.seed).integers(0, len(X), (args.steps, args.batch_size))
    checkpoints = [2**i for i in range(int(np.log2(args.steps)) + 1)] + [args.steps]
    early = [s for s in checkpoints if s < args.natural_steps] + [args.natural_steps]

    threads = os.environ.get("OPENBLAS_NUM_THREADS", "not set")
    print(f"jax {jax.__version__}, {jax.devices()[0].platform}, {os.cpu_count()} CPUs, OPENBLAS_NUM_THREADS {threads}")
    print(
        f"N = {len(X)}, B = {args.batch_size}, Adam({args.adam}), natural steps of {args.rate}; bounds in nats per point"
    )
    print(f"best q of SVGP({M}): {collapsed(X, y, Z, **fixed) / len(X):.4f}")
    methods = {f"SVGP({M})": Z, f"SOLVE-GP({H}+{H})": [few, O], f"ODVGP({H}+{H})": [few, ogp.MeanOnly(O)]}
    for name, inducing in methods.items():
        options = {"inducing": inducing, **fixed}
        adam, adam_time = train(X, y, rows, checkpoints, optax.adam(args.adam), False, **options)
        optimizer = ogp.natural_gradient(optax.adam(args.adam), args.rate, mean_only=optax.adam(args.mean_only))
        natural, natural_time = train(X, y, rows, early, optimizer, True, **options)
        reached = next((s for s, b in zip(early, natural, strict=True) if b >= adam[-1]), None)
        print(f"\n{name}: Adam {1e3 * adam_time:.1f} ms a step, natural {1e3 * natural_time:.1f}")
        print("  steps   " + "".join(f"{s:>9d}" for s in checkpoints))
        print("  Adam    " + "".join(f"{b / len(X):>9.4f}" for b in adam))
        print(
            "  natural "
            + "".join(f"{b / len(X):>9.4f}" for b in natural[: len(early) - 1])
            + f"   {natural[-1] / len(X):.4f} after {early[-1]}"
        )
        print(
            f"  Adam's last bound is reached in {reached if reached else 'more than ' + str(early[-1])} natural steps"
        )


if __name__ == "__main__":
    main()
