"""One fit: data of a split, training by ``ogp.fit``, scores on the test rows."""

from __future__ import annotations

import importlib.metadata
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from benchmarks.paper.settings import Method, Setting, guide_of, model
from benchmarks.store import Store
from numpyro_orthgp import init

ROWS_AT_ONCE = 8192  # of predictions
NEIGHBORS = 32


class Key(NamedTuple):
    """All that a fit depends on.

    :param setting: the experiment.
    :param set: of data.
    :param method: its name.
    :param points: their numbers, such as "64+64".
    :param split: number of the random split.
    :param epochs: of the 100 that stand for the paper's run.
    :param rows: to train with.
    :param dtype: of the data.
    """

    setting: str
    set: str
    method: str
    points: str
    split: int
    epochs: int
    rows: int
    dtype: str

    @property
    def file_name(self) -> str:
        return "_".join(map(str, self)).replace("+", "-")


class Data(NamedTuple):
    """Inputs (N, D) and outputs (N,) in host memory, both with mean 0 and variance 1 over the split's training rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as file:
        return file["X"].astype(float), file["y"].astype(float).reshape(len(file["X"]))


def num_rows(setting: Setting, N: int, max_rows: int | None) -> int:
    """Rows to train with, of a set of N."""
    return min(int(setting.train * N), max_rows or N)


def split(X: np.ndarray, y: np.ndarray, setting: Setting, seed: int, rows: int, dtype: str) -> Data:
    """A random split. With fewer training rows than it has, test rows and units stay what they are."""
    N = len(y)
    order = np.random.default_rng(seed).permutation(N)
    test, train = order[: int(setting.test * N)], order[N - int(setting.train * N) :]
    width = X[train].std(0)
    X = (X - X[train].mean(0)) / np.where(width > 0, width, 1)
    y = (y - y[train].mean()) / y[train].std()
    train = train[:rows]
    return Data(*(a.astype(dtype) for a in (X[train], y[train], X[test], y[test])))


class Clock:
    """A callback that times steps between calls to the device; the first call, which compiles, is only where it starts."""

    def __init__(self) -> None:
        self.last: tuple[int, float] | None = None
        self.seconds: list[float] = []

    def __call__(self, progress: Any) -> None:
        now = progress.step, time.perf_counter()
        if self.last is not None:
            steps, seconds = (b - a for a, b in zip(self.last, now, strict=True))
            self.seconds.append(seconds / steps)
        self.last = now

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def fit(key: Key, data: Data, setting: Setting, method: Method, checkpoint: Path) -> dict[str, Any]:
    """Train, going on from the checkpoint if there is one, and score.

    :return: a row; with NaN if the very first step failed.
    :raises SystemExit: after Ctrl-C; the checkpoint is up to date.
    """
    N, clock = len(data.y), Clock()
    points = setting.start(random.PRNGKey(key.split), jnp.asarray(data.X), method.sizes)
    if method.group_size is not None:
        order = np.asarray(init.groups(data.X, method.group_size))
        data = data._replace(X=data.X[order], y=data.y[order])
    if N <= setting.batch_size:  # every step sees all rows, which are all in groups then
        method = method._replace(num_groups=None)
    constants = {"N": N, "setting": setting, "method": method, "points": points}
    svi = SVI(model, guide_of(method), setting.optimizer(method), TraceMeanField_ELBO())
    row = {"log_density": math.nan, "rmse": math.nan, "status": "diverged", "steps": 0}
    try:
        result = train(svi, key, data, constants, checkpoint, clock)
    except FloatingPointError as error:
        print(f"{key.set}, {method.label}: {error}", file=sys.stderr)
    else:
        if result.status == "interrupted":
            raise SystemExit(f"Interrupted. The same command goes on from {checkpoint}.")
        bound = -float(result.losses[-math.ceil(N / setting.batch_size) :].mean()) / N
        row = scores(svi, result.params, data, constants) | {"bound": bound}
        row |= {"status": result.status, "steps": len(result.losses)}
    versions = {"jax": importlib.metadata.version("jax"), "library": ogp.__version__}
    return row | {"seconds": clock.median, "device": jax.devices()[0].device_kind} | versions


def train(
    svi: SVI, key: Key, data: Data, constants: dict[str, Any], checkpoint: Path, clock: Clock
) -> ogp.training.FitResult:
    """All steps that are left; the same batches for all methods of a split."""
    setting, N = constants["setting"], constants["N"]
    return ogp.fit(
        svi,
        random.PRNGKey(key.split),
        (data.X, data.y),
        batch_size=min(setting.batch_size, N),
        group_size=constants["method"].group_size,
        num_groups=constants["method"].num_groups,
        num_steps=setting.num_steps(N, key.epochs),
        checkpoint=checkpoint,
        progress_bar=sys.stderr.isatty(),
        callback=clock,
        **constants,
    )


def scores(svi: SVI, params: dict[str, Any], data: Data, constants: dict[str, Any]) -> dict[str, float]:
    """Mean log predictive density of test outputs, their RMSE, and the noise's standard deviation; block by block.

    For functions of the library both scores again, as ``log_density_near`` and ``rmse_near``, of predictions that also use the data
    near each test input.
    """

    @jax.jit
    def of(params: Any, X: jax.Array, y: jax.Array) -> Any:
        f, noise = fitted(svi, params, X[:1], y[:1], constants)
        functions = {"": f}
        if constants["method"].has_sites:
            functions["_near"] = ogp.with_neighbors(f, data.X, data.y, noise, num_neighbors=NEIGHBORS)
        found = {}
        for name, function in functions.items():
            predicted = ogp.likelihoods.Gaussian(function(X), noise)
            found[name] = predicted.log_predictive(y), (predicted.mean - y) ** 2
        return found, noise

    num = len(data.y_test)
    size = -(-num // -(-num // ROWS_AT_ONCE))
    blocks = [of(params, *padded(data.X_test[i:][:size], data.y_test[i:][:size], size)) for i in range(0, num, size)]
    result = {"noise": float(blocks[0][1])}
    for name in blocks[0][0]:
        density, squares = (np.concatenate([np.asarray(b[name][k], float) for b, _ in blocks])[:num] for k in (0, 1))
        result |= {f"log_density{name}": float(density.mean()), f"rmse{name}": float(squares.mean() ** 0.5)}
    return result


def fitted(svi: SVI, params: dict[str, Any], X: jax.Array, y: jax.Array, constants: dict[str, Any]) -> Any:
    """The function, without tightening, and the noise."""
    setting, method = constants["setting"], constants["method"]
    with handlers.block(), handlers.seed(rng_seed=0), handlers.substitute(data=params):
        if not method.has_sites:
            return svi.model(X, y, **constants)
        noise = setting.prior(X.shape[1], X.dtype)[1]
    return ogp.posterior(svi.model, svi.guide, params, X, y, **constants)["f"], noise


def padded(X: np.ndarray, y: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """With copies of the last row, so that all blocks are of one size and compile once."""
    missing = size - len(y)
    return np.pad(X, ((0, missing), (0, 0)), mode="edge"), np.pad(y, (0, missing), mode="edge")


def run(
    key: Key, arrays: tuple[np.ndarray, np.ndarray], setting: Setting, method: Method, store: Store[Key]
) -> dict[str, Any]:
    """The row of a key: read if it is there, else a fit, whose checkpoint is removed when its row is written."""
    row = store.get(key)
    if row is None:
        checkpoint = store.path.parent / "checkpoints" / f"{key.file_name}.npz"
        data = split(*arrays, setting, key.split, key.rows, key.dtype)
        row = fit(key, data, setting, method, checkpoint)
        store.add(key, row)
        checkpoint.unlink(missing_ok=True)
    return row
