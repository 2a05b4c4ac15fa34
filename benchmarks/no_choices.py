"""One call, `ogp.regression(X, y)`, `ogp.classification` or `ogp.counts`, beside fixed recipes of this library and scikit-learn's.

    python -m benchmarks.no_choices --data FOLDER [--sets concrete ...] [--budget 60] [--max-rows N] [--methods ...] [--splits 0 1]

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

Adam and L-BFGS see 5000 rows at most. Printed: seconds with compilation, mean log density of test outputs where y has standard
deviation 1, RMSE, and the share of them in intervals of 50, 80 and 95 %.

Of labels and counts (benchmarks/labels_and_counts.py): the call, for labels the first two recipes, HistGradientBoosting,
LogisticRegression or PoissonRegressor on standardized columns ("linear"), and the shares of the classes or the mean count
("mean"). Printed: mean log probability of test labels and the share of the most probable ones that are right; mean log
probability of test counts and RMSE over their standard deviation, and for the call the share of counts in its intervals.
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
from benchmarks.labels_and_counts import COUNTS, LABELS, classes_line, count_line, of_classes, of_counts
from benchmarks.splits import Split, load
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
        used = X.std(0) > 0
        shift, scale = X.mean(0)[used], X.std(0)[used]
        columns = [jnp.asarray((a[:, used] - shift) / scale, dtype) for a in (X, data.X_test)]
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


def line(data: Split, predicted: Any) -> str:
    scale = data.y.std()
    score = float(np.mean(predicted.log_density(data.y_test))) + np.log(scale)
    error = float(np.sqrt(np.mean((data.y_test - predicted.mean) ** 2))) / scale
    away = np.abs(predicted.cdf(data.y_test) - 0.5)
    inside = [float(np.mean(away < level / 2)) for level in (0.5, 0.8, 0.95)]
    return f"{score:10.3f} {error:7.3f} " + " ".join(f"{100 * share:5.1f}" for share in inside)


def task_of(name: str) -> tuple[dict[str, Callable[[Split, float], Any]], Callable[[Split, Any], str]]:
    if name in LABELS:
        return of_classes, classes_line
    return (of_counts, count_line) if name in COUNTS else (METHODS, line)


def main(argv: list[str] | None = None) -> None:
    every = list(dict.fromkeys([*METHODS, *of_classes, *of_counts]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of npz files with arrays X and y")
    parser.add_argument("--sets", nargs="+", default=[*SETS, *LABELS, *COUNTS])
    parser.add_argument("--methods", nargs="+", default=every, choices=every)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, of the one call")
    parser.add_argument("--max-rows", type=int, help="to train with")
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    inside = " ".join(f"{level:>5s}" for level in ("50 %", "80 %", "95 %"))
    print("RMSE / right: of numbers and counts over their standard deviation; of labels the share that is right")
    print(f"{'set':18s} {'split':>5s} {'rows':>6s} {'method':16s} {'seconds':>7s} {'log p':>10s} {'RMSE':>7s} {inside}")
    for name in args.sets:
        if not (args.data / f"{name}.npz").exists():
            print(f"{name}: no file, left out")
            continue
        methods, words = task_of(name)
        for split in args.splits:
            data = load(args.data / f"{name}.npz", split, args.max_rows)
            for method in (m for m in args.methods if m in methods):
                begin = time.perf_counter()
                row = words(data, methods[method](data, args.budget))
                seconds = time.perf_counter() - begin
                print(f"{name:18s} {split:5d} {len(data.y):6d} {method:16s} {seconds:7.1f} {row}", flush=True)


if __name__ == "__main__":
    main()
