"""One call, `ogp.regression(X, y)`, `ogp.classification` or `ogp.counts`, beside fixed recipes of this library and scikit-learn's.

    python -m benchmarks.no_choices --data FOLDER [--sets concrete ...] [--budget 60] [--max-rows N] [--methods ...] [--splits 0 1]
        [--peer gpytorch=PYTHON] [--peer gpflow=PYTHON]

FOLDER has files such as concrete.npz with arrays X (N, D) and y (N,), and test_mask (N, S) where there are given splits; a tenth of
the rows is for tests otherwise. Sets without a file are left out. Recipes see standardized columns and outputs, without
constant columns; the call does that itself. Of numbers:

    one call        ogp.regression(X, y, time=BUDGET)
    getting started Matern 5/2, one lengthscale, 100 points that are learned, Adam(0.02), 1000 steps; batches of 1024 for more rows
    README          Matern 3/2 with a lengthscale for each column, 100 points, residual="tight", natural steps and Adam, 1000 steps
    Adam            CollapsedGP, Matern 5/2 with a lengthscale for each column, 200 points that are learned, Adam(0.02), 500 steps
    L-BFGS          the same by fit_lbfgs, 500 steps at most
    trees           scikit-learn's HistGradientBoostingRegressor; its density is normal, with the spread of a tenth of the rows
    mean            of y, with its standard deviation
    GPyTorch        that library's tutorials, by the interpreter of an environment that has it (benchmarks/tutorials/gpytorch_.py)
    GPflow          likewise (benchmarks/tutorials/gpflow_.py)

Adam and L-BFGS see 5000 rows at most. Printed: seconds with compilation, mean log density of test outputs where y has standard
deviation 1, RMSE, and the share of them in intervals of 50, 80 and 95 %. Of several splits a last line has the test rows of all
splits together, and their number. A peer without an interpreter is left out; one that fails says why.

Of labels and counts (benchmarks/labels_and_counts.py): the call, for labels the first two recipes, HistGradientBoosting,
LogisticRegression or PoissonRegressor on standardized columns ("linear"), the shares of the classes or the mean count ("mean"),
and for labels GPyTorch and GPflow, whose tutorials do not cover such counts. Printed: mean log probability of test labels and the
share of the most probable ones that are right; mean log probability of test counts and RMSE over their standard deviation, and for
the call the share of counts in its intervals.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy import stats

import numpyro_orthgp as ogp
from benchmarks import tutorials
from benchmarks.labels_and_counts import (
    COUNTS,
    LABELS,
    classes_scores,
    count_scores,
    labels_by_tutorial,
    of_classes,
    of_counts,
)
from benchmarks.scores import LEVELS, Scores, together
from benchmarks.splits import Split, load, standardized_columns
from numpyro_orthgp import init, kernels, likelihoods

SETS = (
    "snelson", "yacht", "breastcancer", "energy", "concrete", "airfoil", "wine", "skillcraft", "pumadyn32nm",
    "elevators", "bike", "kin40k", "protein", "keggdirected",
)  # fmt: skip
BATCH, MOST_COLLAPSED = 1024, 5000


class Predicted(NamedTuple):
    """Normal distributions; the call's predictions have the same methods."""

    mean: np.ndarray
    scale: np.ndarray

    def log_density(self, y: np.ndarray) -> np.ndarray:
        return stats.norm.logpdf(y, self.mean, self.scale)

    def cdf(self, y: np.ndarray) -> np.ndarray:
        return stats.norm.cdf(y, self.mean, self.scale)


# ---------------------------------------------------------------- methods


def one_call(data: Split, budget: float) -> ogp.tabular.Predictions:
    return ogp.regression(data.X, data.y, time=budget).predict(data.X_test)


def trees(data: Split, budget: float) -> Predicted:
    from sklearn.ensemble import HistGradientBoostingRegressor

    held = np.arange(len(data.y)) % 10 == 0
    part = HistGradientBoostingRegressor(random_state=0).fit(data.X[~held], data.y[~held])
    sd = np.sqrt(np.mean((part.predict(data.X[held]) - data.y[held]) ** 2))
    mean = HistGradientBoostingRegressor(random_state=0).fit(data.X, data.y).predict(data.X_test)
    return Predicted(mean, np.full(len(mean), sd))


def the_mean(data: Split, budget: float) -> Predicted:
    return Predicted(np.full(len(data.y_test), data.y.mean()), np.full(len(data.y_test), data.y.std()))


def standardized(
    fit: Callable[[Any, Any, Any], Predicted], most: int | None, dtype: Any
) -> Callable[[Split, float], Predicted]:
    def method(data: Split, budget: float) -> Predicted:
        X, y = data.X[:most], data.y[:most]
        columns = [jnp.asarray(a, dtype) for a in standardized_columns(X, data.X_test)]
        found = fit(columns[0], jnp.asarray((y - y.mean()) / y.std(), dtype), columns[1])
        return Predicted(y.mean() + y.std() * np.asarray(found.mean), y.std() * np.asarray(found.scale))

    return method


def gp_model(X, y=None, *, N, Z, smooth, num_scales):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([num_scales]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    f = ogp.gp("f", variance * smooth(lengthscale), numpyro.param("Z", Z))
    with numpyro.plate("data", N, subsample_size=X.shape[0]):
        numpyro.sample("y", likelihoods.Gaussian(f(X), noise), obs=y)


def getting_started(X: Any, y: Any, X_test: Any) -> Predicted:
    return _by_svi(X, y, X_test, kernels.Matern52, 1, optax.adam(0.02))


def readme(X: Any, y: Any, X_test: Any) -> Predicted:
    optimizer = ogp.natural_gradient(optax.adam(0.02), 0.1)
    return _by_svi(X, y, X_test, kernels.Matern32, X.shape[1], optimizer, residual="tight", natural=True)


def _by_svi(X: Any, y: Any, X_test: Any, smooth: Any, num_scales: int, optimizer: Any, **guided: Any) -> Predicted:
    kwargs = {
        "N": len(y),
        "Z": init.kmeans(random.PRNGKey(0), X, min(100, len(y))),
        "smooth": smooth,
        "num_scales": num_scales,
    }
    guide = ogp.AutoSparseGP(gp_model, **guided)
    svi = SVI(gp_model, guide, optimizer, TraceMeanField_ELBO())
    options = {"batch_size": min(BATCH, len(y)), "num_steps": 1000, "progress_bar": False}
    params = ogp.fit(svi, random.PRNGKey(0), (X, y), **options, **kwargs).params
    f = jax.jit(lambda p: ogp.posterior(gp_model, guide, p, X[:2], y[:2], **kwargs)["f"])(params)
    return _predicted(f, X_test, guide.median(params)["noise"])


def collapsed_model(X, y=None, *, Z):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    kernel = variance * kernels.Matern52(lengthscale)
    numpyro.sample("y", ogp.CollapsedGP(kernel, X, numpyro.param("Z", Z), noise), obs=y)


def collapsed_by(train: Callable[..., Any]) -> Callable[[Any, Any, Any], Predicted]:
    def fit(X: Any, y: Any, X_test: Any) -> Predicted:
        Z = init.kmeans(random.PRNGKey(0), X, min(200, len(y)))
        svi = SVI(collapsed_model, AutoDelta(collapsed_model), optax.adam(0.02), Trace_ELBO())
        params = train(svi, random.PRNGKey(0), (X, y), num_steps=500, Z=Z).params
        f = jax.jit(lambda p: ogp.posterior(collapsed_model, svi.guide, p, X, y, Z=Z)["y"])(params)
        return _predicted(f, X_test, params["noise_auto_loc"])

    return fit


def _predicted(f: Any, X_test: Any, noise: Any) -> Predicted:
    @jax.jit
    def moments(f, X):
        y = likelihoods.Gaussian(f(X), noise)
        return y.mean, jnp.sqrt(y.variance)

    return Predicted(*moments(f, X_test))


def by_tutorial(python: str, script: Path) -> Callable[[Split, float], Predicted]:
    """See :mod:`benchmarks.tutorials`."""

    def fit(X: Any, y: Any, X_test: Any) -> Predicted:
        found = tutorials.follow(python, script, X=X, y=y, X_test=X_test)
        return Predicted(found["mean"], found["scale"])

    return standardized(fit, None, jnp.float64)


METHODS: dict[str, Callable[[Split, float], Any]] = {
    "one call": one_call,
    "getting started": standardized(getting_started, None, jnp.float32),
    "README": standardized(readme, None, jnp.float32),
    "Adam": standardized(
        collapsed_by(lambda *a, **k: ogp.fit(*a, progress_bar=False, **k)), MOST_COLLAPSED, jnp.float64
    ),
    "L-BFGS": standardized(collapsed_by(ogp.fit_lbfgs), MOST_COLLAPSED, jnp.float64),
    "trees": trees,
    "mean": the_mean,
}

# ---------------------------------------------------------------- table


def scores(data: Split, predicted: Any) -> Scores:
    scale = data.y.std()
    away = np.abs(predicted.cdf(data.y_test) - 0.5)
    return Scores(
        predicted.log_density(data.y_test) + np.log(scale),
        ((data.y_test - predicted.mean) / scale) ** 2,
        np.array([away < level / 2 for level in LEVELS]),
    )


def task_of(
    name: str, pythons: dict[str, str]
) -> tuple[dict[str, Callable[[Split, float], Any]], Callable[[Split, Any], Scores]]:
    """Methods for a set, and what its test rows say of their predictions."""
    if name in COUNTS:
        return of_counts, count_scores
    methods, follows = (of_classes, labels_by_tutorial) if name in LABELS else (METHODS, by_tutorial)
    peers = {peer: follows(python, tutorials.SCRIPTS[peer]) for peer, python in pythons.items()}
    return methods | peers, classes_scores if name in LABELS else scores


def main(argv: list[str] | None = None) -> None:
    every = list(dict.fromkeys([*METHODS, *of_classes, *of_counts, *tutorials.SCRIPTS]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of npz files with arrays X and y")
    parser.add_argument("--sets", nargs="+", default=[*SETS, *LABELS, *COUNTS])
    parser.add_argument("--methods", nargs="+", default=every, choices=every)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, of the one call")
    parser.add_argument("--max-rows", type=int, help="to train with")
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="gpytorch or gpflow")
    args = parser.parse_args(argv)
    pythons = pythons_of(args.peer, parser)
    jax.config.update("jax_enable_x64", True)
    inside = " ".join(f"{f'{100 * level:.0f} %':>5s}" for level in LEVELS)
    print("RMSE / right: of numbers and counts over their standard deviation; of labels the share that is right")
    print(f"{'set':18s} {'split':>5s} {'rows':>6s} {'method':16s} {'seconds':>7s} {'log p':>10s} {'RMSE':>7s} {inside}")
    for peer in sorted(set(args.methods) & set(tutorials.SCRIPTS) - set(pythons)):
        print(f"{peer}: no --peer, left out")
    for name in args.sets:
        if not (args.data / f"{name}.npz").exists():
            print(f"{name}: no file, left out")
            continue
        run(name, args, pythons)


def pythons_of(given: list[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    """Interpreters by the name of the library, from words such as ``gpflow=PYTHON``."""
    known = {peer.lower(): peer for peer in tutorials.SCRIPTS}
    pairs = [word.partition("=")[::2] for word in given]
    if unknown := [name for name, python in pairs if name not in known or not python]:
        parser.error(f"--peer takes NAME=PYTHON with a name of {', '.join(known)}; got {', '.join(unknown)}")
    return {known[name]: python for name, python in pairs}


def run(name: str, args: argparse.Namespace, pythons: dict[str, str]) -> None:
    """Print a line for each split and method, and one for all splits if there are several."""
    methods, scored = task_of(name, pythons)
    used = {method: methods[method] for method in args.methods if method in methods}
    found: dict[str, list[Scores]] = {method: [] for method in used}
    for split in args.splits:
        data = load(args.data / f"{name}.npz", split, args.max_rows)
        for method, predict in used.items():
            begin = time.perf_counter()
            try:
                found[method].append(scored(data, predict(data, args.budget)))
                row = str(found[method][-1])
            except tutorials.PeerFailed as reason:
                row = f" failed: {reason}"
            seconds = time.perf_counter() - begin
            print(f"{name:18s} {split:5d} {len(data.y):6d} {method:16s} {seconds:7.1f} {row}", flush=True)
    for method, rows in found.items():
        if len(rows) > 1:
            every = together(rows)
            print(f"{name:18s} {'all':>5s} {every.num:6d} {method:16s} {'':7s} {every}", flush=True)


if __name__ == "__main__":
    main()
