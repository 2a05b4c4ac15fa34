"""Regression with three collapsed bounds and the exact GP: Titsias 2025, Sec. 5.2, Table 1 and Figure 2.

    python benchmarks/medium_regression.py --data FOLDER [--sets pol bike elevators] [--num-data 1000] [--num-inducing 64]
        [--steps 1500] [--repeats 1] [--dtype float64] [--full] [--out out]

FOLDER has pol.npz, bike.npz and elevators.npz, with arrays X and y; sets without a file are left out. SGPR (Titsias 2009),
SGPR-artemev (Artemev et al. 2021), SGPR-new (Titsias 2025), SGPR-new-G16, which is in no table of that paper and tightens in
groups of 16 near rows (Bui and Titsias 2025), and the exact GP are trained from the same start, each by itself, as in App. D:
squared-exponential kernel with a lengthscale for each input, softplus for the square roots of variances, which start at noise
0.51, signal 0.69 and lengthscales 1; inducing points from k-means, and learned; Adam(0.01). A fifth of all rows is for tests, a
fifth of the others is for validation, of which there is none, and ``--num-data`` of what is left are trained with. As in Wang
et al. 2019, whose splits these are, X and y have mean 0 and variance 1 in training rows. Other than in the paper, k-means
starts by k-means++.

Printed, per point and in units where y has standard deviation 1: the bound at the end of training; log p(y), the exact log
marginal likelihood at the hyperparameters that it found; the variance of the noise; the mean test log density, as in the paper; the
RMSE; and seconds without compilation. Bounds at equal parameters are in the order of the list above. Each trained by itself they
are so at their optima; before, another path through the parameters can turn differences of a few thousandths around.

``--full`` is the paper's run: all training rows (10,600 of bike), 1024 and 2048 points, 10,000 steps, five splits, and Table 1
beside. That is for a GPU. Rows of the table are kept in ``medium_regression.jsonl`` in the folder ``--out``, and what is there is
not run again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_orthgp as ogp
from benchmarks.store import Store
from numpyro_orthgp import init, kernels

SETS = ("pol", "bike", "elevators")
EXACT = "exact GP"
BOUNDS = {"SGPR": "titsias2009", "SGPR-artemev": "artemev2021", "SGPR-new": "titsias2025"}
BOUNDS |= {"SGPR-new-G16": "titsias2025/16", EXACT: None}  # in groups of 16 near rows
LINES = {
    "SGPR": ("#0072B2", "--"),
    "SGPR-artemev": ("#009E73", "-."),
    "SGPR-new": ("#D55E00", "-"),
    "SGPR-new-G16": ("#CC79A7", "-"),
    EXACT: ("black", ":"),
}
MAX_ROWS = {"bike": 10_600}  # of the paper, whose GPU could not hold more for the exact GP

# Titsias 2025, Table 1: mean test log likelihood, by inducing points and method (0: the exact GP).
PAPER = {
    "pol": {
        0: {EXACT: 1.089},
        1024: {"SGPR": 0.821, "SGPR-artemev": 0.859, "SGPR-new": 0.920},
        2048: {"SGPR": 0.958, "SGPR-artemev": 0.976, "SGPR-new": 0.998},
    },
    "bike": {
        0: {EXACT: 3.105},
        1024: {"SGPR": 2.176, "SGPR-artemev": 2.199, "SGPR-new": 2.326},
        2048: {"SGPR": 2.337, "SGPR-artemev": 2.356, "SGPR-new": 2.511},
    },
    "elevators": {
        0: {EXACT: -0.386},
        1024: {"SGPR": -0.387, "SGPR-artemev": -0.387, "SGPR-new": -0.387},
        2048: {"SGPR": -0.387, "SGPR-artemev": -0.387, "SGPR-new": -0.387},
    },
}


class Data(NamedTuple):
    """Inputs (N, D) and outputs (N,), both with mean 0 and variance 1 over training rows."""

    X: jax.Array
    y: jax.Array
    X_test: jax.Array
    y_test: jax.Array


def split(X: np.ndarray, y: np.ndarray, seed: int, num_data: int | None = None, dtype: str = "float64") -> Data:
    """20% of rows for tests, 64% for training, of which ``num_data`` at most are kept."""
    N = len(y)
    order = np.random.default_rng(seed).permutation(N)
    test, train = order[: N // 5], order[N // 5 + round(0.16 * N) :][: int(0.64 * N)]
    shift, scale = X[train].mean(0), X[train].std(0)
    X = (X - shift) / np.where(scale > 0, scale, 1)
    y = (y - y[train].mean()) / y[train].std()
    train = train[:num_data]
    return Data(*(jnp.asarray(a.astype(dtype)) for a in (X[train], y[train], X[test], y[test])))


# ---------------------------------------------------------------- model


def parameter(name: str, start: jax.Array) -> jax.Array:
    return numpyro.param(name, start, constraint=dist.constraints.softplus_positive)


def model(X, y, Z, *, bound):
    """The bound of that name, or the exact GP for ``None``, which has no use for Z."""
    noise = parameter("noise", jnp.asarray(0.51, X.dtype))
    scale = parameter("scale", jnp.asarray(0.69, X.dtype))
    kernel = scale**2 * kernels.RBF(parameter("lengthscale", jnp.ones(X.shape[1], X.dtype)))
    if bound is None:
        # One factor of an N x N matrix; CollapsedGP with Z = X would take three.
        outputs = dist.MultivariateNormal(jnp.zeros_like(y), kernel(X, X) + noise**2 * jnp.eye(len(X), dtype=X.dtype))
    else:
        outputs = collapsed(kernel, X, numpyro.param("Z", Z), noise, bound)
    numpyro.sample("y", outputs, obs=y)


def collapsed(kernel: Any, X: Any, Z: Any, noise: Any, bound: str) -> ogp.CollapsedGP:
    name, _, size = bound.partition("/")
    return ogp.CollapsedGP(kernel, X, Z, noise, bound=name, group_size=int(size) if size else None)


def guide(X, y, Z, *, bound):
    """Nothing: the model has no latent variables but the function, which is integrated out."""


def objective(params: Any, data: Data, bound: str | None) -> jax.Array:
    """Bound or log marginal likelihood of the training outputs, in nats."""
    loss = Trace_ELBO().loss(random.PRNGKey(0), params, model, guide, data.X, data.y, params.get("Z"), bound=bound)
    return -loss


def predict(params: Any, data: Data, bound: str | None) -> tuple[jax.Array, jax.Array]:
    """Means and variances of the function at the test inputs."""
    kernel, noise = params["scale"] ** 2 * kernels.RBF(params["lengthscale"]), params["noise"]
    if bound is not None:
        f = collapsed(kernel, data.X, params["Z"], noise, bound).posterior(data.y)(data.X_test)
        return f.mean, f.variance
    K = kernel(data.X, data.X) + noise**2 * jnp.eye(len(data.X), dtype=data.X.dtype)
    L = jnp.linalg.cholesky(K)
    A = jax.scipy.linalg.solve_triangular(L, kernel(data.X, data.X_test), lower=True)
    w = jax.scipy.linalg.solve_triangular(L, data.y, lower=True)
    return w @ A, kernel(data.X_test) - jnp.sum(A**2, 0)


# ---------------------------------------------------------------- one run


def train(data: Data, Z: jax.Array, bound: str | None, steps: int) -> tuple[Any, np.ndarray, np.ndarray, float]:
    """Parameters after training; objective (nats) and variance of the noise before each step; seconds."""
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO(), bound=bound)

    def run(X, y, Z):
        def step(state, _):
            noise = svi.get_params(state)["noise"]
            state, loss = svi.update(state, X, y, Z)
            return state, (-loss, noise**2)

        state, trace = lax.scan(step, svi.init(random.PRNGKey(0), X, y, Z), None, length=steps)
        return svi.get_params(state), trace

    compiled = jax.jit(run).lower(data.X, data.y, Z).compile()
    begin = time.perf_counter()
    params, trace = jax.block_until_ready(compiled(data.X, data.y, Z))
    return params, *(np.asarray(a) for a in trace), time.perf_counter() - begin


def measure(data: Data, Z: jax.Array, method: str, steps: int) -> dict[str, Any]:
    """A row of the table, as plain numbers, and at most 200 points of the curves of the picture."""
    bound = BOUNDS[method]
    if bound and "/" in bound:
        order = init.groups(data.X, int(bound.partition("/")[2]))
        data = data._replace(X=data.X[order], y=data.y[order])
    params, values, noises, seconds = train(data, Z, bound, steps)

    @jax.jit
    def report(params, data):
        mean, variance = predict(params, data, bound)
        score = dist.Normal(mean, jnp.sqrt(variance + params["noise"] ** 2)).log_prob(data.y_test).mean()
        error = jnp.sqrt(jnp.mean((mean - data.y_test) ** 2))
        values = [objective(params, data, b) / len(data.y) for b in (bound, None)]
        return *values, params["noise"] ** 2, score, error

    kept = np.unique(np.linspace(0, steps - 1, 200).astype(int))
    names = ("bound", "evidence", "noise", "score", "rmse")
    row = dict(zip(names, map(float, report(params, data)), strict=True))
    curves = {"step": kept, "value": values[kept] / len(data.y), "variance": noises[kept]}
    return {**row, "seconds": seconds, "curves": {k: v.tolist() for k, v in curves.items()}}


# ---------------------------------------------------------------- all runs


def load(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    path = folder / f"{name}.npz"
    if not path.exists():
        print(f"{name}: no file {path}, left out")
        return None
    with np.load(path) as file:
        return file["X"].astype(float), file["y"].astype(float)


class Key(NamedTuple):
    """All that a run depends on."""

    set: str
    method: str
    rows: int
    num_inducing: int
    steps: int
    dtype: str
    split: int


def run_set(name: str, X: np.ndarray, y: np.ndarray, args: argparse.Namespace, store: Store[Key]):
    """Number of inducing points (0: exact GP), method and the rows of all splits, one method after another."""
    num_data = MAX_ROWS.get(name) if args.full else args.num_data
    cases = [(M, method) for M in args.num_inducing for method in BOUNDS if method != EXACT] + [(0, EXACT)]
    for M, method in cases:
        rows = []
        for seed in range(args.repeats):
            data = split(X, y, seed, num_data, args.dtype)
            Z = init.kmeans(random.PRNGKey(seed), data.X, M) if M else data.X[:0]
            key = Key(name, method, len(data.y), M, args.steps, args.dtype, seed)
            rows.append(store.get(key) or store.add(key, measure(data, Z, method, args.steps)))
        yield M, method, rows


def line(name: str, M: int, method: str, rows: list[dict[str, Any]], full: bool) -> str:
    def shown(key, digits, width):
        values = np.array([row[key] for row in rows])
        error = f" ({values.std(ddof=1) / len(rows) ** 0.5:.{digits}f})" if len(rows) > 1 else ""
        return f"{f'{values.mean():.{digits}f}{error}':>{width}s}"

    wide = 9 * (len(rows) > 1)
    paper = PAPER.get(name, {}).get(M, {}).get(method) if full else None
    digits = {"bound": 4, "evidence": 4, "noise": 5, "score": 4, "rmse": 4}
    cells = [shown(key, places, 11 + wide) for key, places in digits.items()]
    seconds = f"{np.mean([row['seconds'] for row in rows]):9.1f}"
    return f"{name:10s} {M or '':>5} {method:13s}" + "".join(cells) + seconds + (f"{paper:8.3f}" if paper else "")


def draw(found: dict[str, dict[tuple[int, str], list[dict[str, Any]]]], M: int, path: Path) -> None:
    """Objective and variance of the noise along steps, a column for each data set: mean over splits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4.2 * len(found), 5.6)
    figure, axes = plt.subplots(2, len(found), figsize=size, layout="constrained", squeeze=False, sharex="col")
    for column, (name, cases) in zip(axes.T, found.items(), strict=True):
        final = []
        for method, (colour, style) in LINES.items():
            rows = cases[0 if method == EXACT else M, method]
            for ax, key in zip(column, ("value", "variance"), strict=True):
                y = np.array([row["curves"][key] for row in rows])
                x, mean, error = rows[0]["curves"]["step"], y.mean(0), y.std(0) / len(y) ** 0.5
                ax.plot(x, mean, color=colour, linestyle=style, linewidth=1.6, label=method)
                ax.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
                if key == "value":
                    final += [mean[len(mean) // 20 :].min(), mean.max()]
        top, bottom = max(final), min(final)
        column[0].set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
        column[0].set_title(f"{name}, {M} inducing points")
        column[1].set_yscale("log")
        column[1].set_xlabel("step")
    axes[0, 0].set_ylabel("bound or log likelihood\n(nats per training point)")
    axes[1, 0].set_ylabel("variance of the noise\n(y has variance 1)")
    axes[0, 0].legend(frameon=False, fontsize="small")
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of npz files with arrays X and y")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--num-data", type=int, default=1000, help="training rows at most")
    parser.add_argument("--num-inducing", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=1, help="random splits")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--full", action="store_true", help="the sizes of the paper, whatever else is given")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(argv)
    if args.full:
        args.num_data, args.num_inducing, args.steps, args.repeats = None, [1024, 2048], 10_000, 5
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    store, found = Store(args.out / "medium_regression.jsonl", Key), {}
    device = f"{jax.devices()[0].platform}, {os.cpu_count()} CPU cores"
    print(f"{device}, JAX {importlib.metadata.version('jax')}, {args.dtype}, {args.steps} steps, {args.repeats} splits")
    width = 11 + 9 * (args.repeats > 1)
    columns = "".join(f"{c:>{width}s}" for c in ("bound", "log p(y)", "noise", "test log p", "RMSE"))
    print(f"{'set':10s} {'M':>5s} {'method':13s}{columns}{'seconds':>9s}" + ("   paper" if args.full else ""))
    for name in args.sets:
        arrays = load(args.data, name)
        if arrays is None:
            continue
        found[name] = {}
        for M, method, rows in run_set(name, *arrays, args, store):
            found[name][M, method] = rows
            print(line(name, M, method, rows, args.full), flush=True)
    for M in args.num_inducing if found else ():
        draw(found, M, args.out / f"medium_regression_{M}.png")


if __name__ == "__main__":
    main()
