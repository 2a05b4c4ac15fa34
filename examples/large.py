"""Regression on more data than a device need hold: minibatches from host memory, a cosine schedule, checkpoints.

    python examples/large.py [--num-data 200000] [--num-inducing 256] [--num-orthogonal 0] [--epochs 10] [--batch-size 1024]
                             [--rate 0.01] [--checkpoint FILE.npz] [--data FILE.npz] [--out out] [--seed 0] [--quick]

Sparse GP regression (SVGP; SOLVE-GP with ``--num-orthogonal``) by ``ogp.fit``. By default the data are made here: a smooth function
of eight inputs, of which some matter more than others, with noise of standard deviation 0.3. ``FILE.npz`` may hold others as
arrays ``X`` (N, D) and ``y`` (N,), the airline delays, say; a tenth of them, at most 100,000 rows, is held out. With
``--checkpoint`` the run can be stopped at any moment and started again by the same command.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

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

MAX_TEST = 100_000
ROWS_AT_ONCE = 10_000  # of predictions


class Data(NamedTuple):
    """Standardized inputs (N, D) and outputs (N,), in host memory."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    scale: float  # standard deviation of y, for log densities in its units

    @classmethod
    def load(cls, path: Path | None, num: int, seed: int) -> Data:
        rng = np.random.default_rng(seed)
        X, y = simulate(rng, num) if path is None else read(path)
        rows = rng.permutation(len(y))
        num_test = min(len(y) // 10, MAX_TEST)
        test, train = rows[:num_test], rows[num_test:]
        mean, scale = y[train].mean(), y[train].std()
        shift, width = X[train].mean(0), np.where(X[train].std(0) > 0, X[train].std(0), 1)
        X, y = ((X - shift) / width).astype(np.float32), ((y - mean) / scale).astype(np.float32)
        return cls(X[train], y[train], X[test], y[test], float(scale))


def simulate(rng: np.random.Generator, num: int, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """A function of eight inputs: a few hundred waves, long ones along the later inputs."""
    X = rng.uniform(-1, 1, (num, dim))
    frequencies = rng.normal(size=(dim, 300)) * np.linspace(1.2, 0.1, dim)[:, None]
    phases, weights = rng.uniform(0, 2 * np.pi, 300), rng.normal(size=300) / np.sqrt(150)
    f = np.concatenate([np.cos(x @ frequencies + phases) @ weights for x in np.array_split(X, num // 10_000 + 1)])
    return X, f + 0.3 * rng.normal(size=num)


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as file:
        return file["X"].astype(float), file["y"].astype(float).reshape(len(file["X"]))


def model(X, y=None, *, N, inducing):
    lengthscale = numpyro.param("lengthscale", 2.0 * jnp.ones(X.shape[1]), constraint=dist.constraints.positive)
    variance = numpyro.param("variance", 1.0, constraint=dist.constraints.positive)
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    points = [numpyro.param(f"Z{i}", Z) for i, Z in enumerate(inducing)]
    f = ogp.gp("f", variance * kernels.Matern32(lengthscale), points)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def scores(guide: Any, params: dict[str, Any], data: Data, constants: dict[str, Any]) -> tuple[float, float]:
    """Mean log density of a held-out y in its own units, and root mean squared error in standard deviations."""

    @jax.jit
    def of(X, y):
        f = ogp.posterior(model, guide, params, X, **constants)["f"]
        predicted = likelihoods.Gaussian(f(X), params["noise"])
        return predicted.log_predictive(y).sum(), jnp.sum((predicted.mean - y) ** 2)

    starts = range(0, len(data.y_test), ROWS_AT_ONCE)
    sums = np.sum([of(data.X_test[i:][:ROWS_AT_ONCE], data.y_test[i:][:ROWS_AT_ONCE]) for i in starts], axis=0)
    log_density, squares = sums / len(data.y_test)
    return log_density - np.log(data.scale), np.sqrt(squares)


def save_figure(path: Path, losses: np.ndarray, steps_per_epoch: float, num_rows: int) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    epochs = np.arange(1, len(losses) + 1) / steps_per_epoch
    elbo = -losses / num_rows
    width = max(1, len(losses) // 50)
    axis.plot(epochs, elbo, color="0.8", lw=0.7, label="minibatches")
    smooth = np.convolve(elbo, np.ones(width) / width, "valid")
    axis.plot(epochs[width // 2 :][: len(smooth)], smooth, color="#0072B2", label=f"mean of {width} steps")
    low = np.quantile(elbo, 0.05)
    axis.set(xlabel="epoch", ylabel="ELBO per point (nats)", ylim=(low, elbo.max() + 0.1 * (elbo.max() - low)))
    axis.set_title("ogp.fit")
    axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"Wrote {path}.")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="npz file with arrays X (N, D) and y (N,)")
    parser.add_argument("--num-data", type=int, default=200_000, help="rows to make where there is no --data")
    parser.add_argument("--num-inducing", type=int, default=256, help="inducing points")
    parser.add_argument("--num-orthogonal", type=int, default=0, help="inducing points of a second, orthogonal set")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of Adam to begin with")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from and to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure")
    parser.add_argument("--quick", action="store_true", help="few data and steps, to see that all of it runs")
    parser.add_argument("--no-progress-bar", action="store_true")
    args = parser.parse_args(argv)
    if args.quick:
        args.num_data, args.num_inducing, args.epochs, args.batch_size = 4000, 16, 2, 128
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    data = Data.load(args.data, args.num_data, args.seed)
    N = len(data.y)
    print(f"{N} rows to train, {len(data.y_test)} to test, {data.X.shape[1]} inputs.")
    sample = jnp.asarray(data.X[: max(10_000, args.num_inducing)])  # rows are in random order
    points = init.kmeans(random.PRNGKey(args.seed), sample, args.num_inducing + args.num_orthogonal)
    inducing = [Z for Z in (points[: args.num_inducing], points[args.num_inducing :]) if len(Z)]
    constants = {"N": N, "inducing": inducing}

    num_steps = -(-args.epochs * N // args.batch_size)
    guide = ogp.AutoSparseGP(model)
    schedule = optax.cosine_decay_schedule(args.rate, num_steps)
    svi = SVI(model, guide, optax.adam(schedule), TraceMeanField_ELBO())
    started = time.perf_counter()
    result = ogp.fit(
        svi,
        random.PRNGKey(args.seed),
        (data.X, data.y),
        batch_size=args.batch_size,
        num_steps=num_steps,
        checkpoint=args.checkpoint,
        progress_bar=not args.no_progress_bar,
        **constants,
    )
    seconds = time.perf_counter() - started
    print(f"{result.status}: {len(result.losses)} steps, {seconds:.0f} s in this process.\n")

    log_density, error = scores(guide, result.params, data, constants)
    last = result.losses[-max(1, N // args.batch_size) :].mean() / N
    print(f"{'method':20s}  {'ELBO per point':>14s}  {'test log p':>10s}  {'test RMSE':>9s}  {'noise':>6s}")
    name = "SVGP" if len(inducing) == 1 else "SOLVE-GP"
    name = f"{name} ({'+'.join(str(len(Z)) for Z in inducing)})"
    print(f"{name:20s}  {-last:14.4f}  {log_density:10.4f}  {error:9.4f}  {float(result.params['noise']):6.3f}")
    print("\nELBO: mean over the last epoch. RMSE and noise in standard deviations of y, log p in its own units.")
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "large.png", result.losses, N / args.batch_size, N)


if __name__ == "__main__":
    main()
