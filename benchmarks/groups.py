"""What groups of rows gain in collapsed bounds, and what the data near each test input add to predictions.

    python benchmarks/groups.py --data FOLDER [--sets kin40k pol bike elevators protein] [--num-data 4096] [--num-inducing 64]
        [--group-sizes 8 32 128] [--bounds titsias2009 titsias2025 fitc] [--neighbors 32] [--steps 1000] [--repeats 1] [--out out]

FOLDER has files such as kin40k.npz with arrays X and y; sets without a file are left out. Splits and units are those of
``medium_regression.py``. Matern 3/2 with a lengthscale for each input; scale, noise of at least 0.001, lengthscales and inducing
points, from k-means, are trained together by L-BFGS in float64 from the same start. Rows are sorted by ``init.groups`` for each
size. G = 1 is the bound without groups: "titsias2025" is Titsias 2025, in groups Bui and Titsias 2025; "fitc" is no bound, and in
groups it is PIC.

Printed: the bound per training row; the noise's standard deviation; mean log density and RMSE of test outputs by ``f(X)`` and by
``with_neighbors``; the time of a value and gradient beside that of the first line, each the least of several.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from jax import random
from jax.flatten_util import ravel_pytree

sys.path.append(str(Path(__file__).parents[1]))  # as a script, and not installed, it finds only its own folder
import numpyro_orthgp as ogp
from benchmarks.medium_regression import Data, load, split
from benchmarks.store import Store
from numpyro_orthgp import CollapsedGP, init, kernels, likelihoods, with_neighbors

SETS = ("kin40k", "pol", "bike", "elevators", "protein")
MAX_TESTED = 4000  # test rows
GROUPED = ("titsias2025", "fitc")
FAR = 1e10
LEAST_NOISE = 1e-3  # of y's standard deviation; on some sets FITC would have none


class Key(NamedTuple):
    """All that a line depends on."""

    set: str
    bound: str
    group_size: int
    rows: int
    num_inducing: int
    neighbors: int
    steps: int
    split: int


def process(params: Any, X: jax.Array, bound: str, size: int) -> CollapsedGP:
    kernel = jnp.exp(params["scale"]) ** 2 * kernels.Matern32(jnp.exp(params["lengthscale"]))
    return CollapsedGP(kernel, X, params["Z"], noise_of(params), bound=bound, group_size=size if size > 1 else None)


def noise_of(params: Any) -> jax.Array:
    return LEAST_NOISE + jnp.exp(params["noise"])


def best(value_and_grad: Callable[[Any], Any], start: Any, steps: int) -> Any:
    """Parameters by L-BFGS."""
    first, unravel = ravel_pytree(start)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_grad(unravel(jnp.asarray(x)))
        flat = np.asarray(ravel_pytree(gradient)[0])
        if not (np.isfinite(value) and np.isfinite(flat).all()):  # a step too far: back along the line
            return FAR, np.zeros_like(x)
        return float(value), flat

    found = scipy.optimize.minimize(objective, first, jac=True, method="L-BFGS-B", options={"maxiter": steps})
    return unravel(jnp.asarray(found.x))


def least_time(function: Callable[[], Any], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def scores(f: Any, data: Data, noise: jax.Array) -> tuple[float, float]:
    predicted = likelihoods.Gaussian(f(data.X_test), noise)
    density = predicted.log_predictive(data.y_test).mean()
    return float(density), float(jnp.sqrt(jnp.mean((predicted.mean - data.y_test) ** 2)))


def measure(data: Data, Z: jax.Array, key: Key) -> dict[str, float]:
    N, size = len(data.y), key.group_size
    order = init.groups(data.X, size) if size > 1 else np.arange(N)
    X, y = data.X[order], data.y[order]
    start = {
        "scale": jnp.zeros(()),
        "noise": jnp.log(jnp.asarray(0.5)),
        "lengthscale": jnp.zeros(X.shape[1]),
        "Z": Z,
    }

    def loss(params: Any, X: jax.Array, y: jax.Array) -> jax.Array:
        return -process(params, X, key.bound, size).log_prob(y) / N

    compiled = jax.jit(jax.value_and_grad(loss))
    params = best(lambda p: compiled(p, X, y), start, key.steps)
    noise, f = noise_of(params), process(params, X, key.bound, size).posterior(y)
    (density, rmse), near = (
        scores(g, data, noise) for g in (f, with_neighbors(f, X, y, noise, num_neighbors=key.neighbors))
    )
    return {
        "bound": -float(compiled(params, X, y)[0]),
        "noise": float(noise),
        "density": density,
        "rmse": rmse,
        "density_near": near[0],
        "rmse_near": near[1],
        "seconds": least_time(lambda: compiled(params, X, y)),
    }


def lines(name: str, arrays: Any, args: argparse.Namespace, store: Store[Key]) -> Iterator[tuple[str, int, Any]]:
    """Bound, size of groups and the means over splits."""
    cases = [(bound, size) for bound in args.bounds for size in (1, *args.group_sizes) if size == 1 or bound in GROUPED]
    for bound, size in cases:
        rows = []
        for seed in range(args.repeats):
            data = split(*arrays, seed, args.num_data)
            data = data._replace(X_test=data.X_test[:MAX_TESTED], y_test=data.y_test[:MAX_TESTED])
            key = Key(name, bound, size, len(data.y), args.num_inducing, args.neighbors, args.steps, seed)
            Z = init.kmeans(random.PRNGKey(seed), data.X, args.num_inducing)
            rows.append(store.get(key) or store.add(key, measure(data, Z, key)))
        yield bound, size, {k: float(np.mean([row[k] for row in rows])) for k in rows[0] if k in COLUMNS}


COLUMNS = {
    "bound": "bound",
    "noise": "noise",
    "density": "density",
    "density_near": "+near",
    "rmse": "RMSE",
    "rmse_near": "+near",
    "seconds": "time",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of npz files with arrays X and y")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--num-data", type=int, default=4096, help="training rows at most")
    parser.add_argument("--num-inducing", type=int, default=64)
    parser.add_argument("--group-sizes", type=int, nargs="*", default=[8, 32, 128])
    parser.add_argument("--bounds", nargs="+", default=["titsias2009", "titsias2025", "fitc"])
    parser.add_argument("--neighbors", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000, help="of L-BFGS at most")
    parser.add_argument("--repeats", type=int, default=1, help="random splits")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    store = Store(args.out / "groups.jsonl", Key)
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, numpyro_orthgp {ogp.__version__}, {args.repeats} splits"
    )
    for name in args.sets:
        arrays = load(args.data, name)
        if arrays is None:
            continue
        print(f"\n{name}, {args.num_data} rows at most, M = {args.num_inducing}, {args.neighbors} neighbours")
        print(f"{'bound':13s}{'G':>5s}" + "".join(f"{column:>11s}" for column in COLUMNS.values()))
        first = None
        for bound, size, row in lines(name, arrays, args, store):
            first = first or row["seconds"]
            shown = [f"{row[k]:11.4f}" for k in list(COLUMNS)[:-1]] + [f"{row['seconds'] / first:11.2f}"]
            print(f"{bound:13s}{size:5d}" + "".join(shown), flush=True)


if __name__ == "__main__":
    main()
