"""A table and nothing to choose: ogp.regression beside gradient-boosted trees and a linear regression.

    python examples/one_call.py [--out out] [--seed 0] [--quick]

The diabetes data of scikit-learn: 442 patients, ten columns, a measure of how the disease went on in a year. A fifth of the
patients is put aside. The call is made as it stands, but for M, so that it does not look at the clock. Log densities of trees and
of the linear regression are those of a normal distribution with the spread of the residuals of a tenth of the rows that each had
not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression

import numpyro_orthgp as ogp


class Normal(NamedTuple):
    """Predictions of a method that knows no spread, with one for all rows."""

    mean: np.ndarray
    sd: np.ndarray

    def log_density(self, y: np.ndarray) -> np.ndarray:
        return stats.norm.logpdf(y, self.mean, self.sd)

    def cdf(self, y: np.ndarray) -> np.ndarray:
        return stats.norm.cdf(y, self.mean, self.sd)


def report(name: str, y: np.ndarray, predicted: Any) -> None:
    away = np.abs(predicted.cdf(y) - 0.5)
    inside = [100 * np.mean(away < level / 2) for level in (0.5, 0.8, 0.95)]
    error = np.sqrt(np.mean((y - predicted.mean) ** 2))
    score = np.mean(predicted.log_density(y))
    print(f"{name:18s}{score:11.3f}{error:8.2f}" + "".join(f"{share:8.1f}" for share in inside))


def with_spread(estimator: Any, X: np.ndarray, y: np.ndarray, X_new: np.ndarray) -> Normal:
    held = np.arange(len(y)) % 10 == 0
    sd = np.sqrt(np.mean((estimator.fit(X[~held], y[~held]).predict(X[held]) - y[held]) ** 2))
    return Normal(estimator.fit(X, y).predict(X_new), np.full(len(X_new), sd))


def save_figure(path: Path, y: np.ndarray, predicted: Any, importance: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    order = np.argsort(predicted.mean)
    place = np.arange(len(y))
    for level, shade in ((0.95, 0.18), (0.5, 0.35)):
        lower, upper = predicted.interval(level)
        left.fill_between(
            place, lower[order], upper[order], color="#0072B2", alpha=shade, lw=0, label=f"{100 * level:.0f} % interval"
        )
    left.plot(place, predicted.mean[order], color="#0072B2", lw=2, label="mean")
    left.plot(place, y[order], "o", ms=4, color="0.25", label="patients put aside")
    left.set(xlabel="patients, by their mean", ylabel="progression of the disease")
    left.legend(frameon=False, fontsize=8)
    names = list(importance)[::-1]
    right.barh(names, [importance[name] for name in names], color="#0072B2")
    right.set(xlabel="share of the variance of predictions", title="importance of the columns")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few points and steps, to see that it runs")
    args = parser.parse_args(argv)
    table = load_diabetes(scaled=False)
    X, y = table.data, table.target
    order = np.random.default_rng(args.seed).permutation(len(y))
    X, y = X[order], y[order]
    new = slice(0, len(y) // 5)
    known = slice(len(y) // 5, None)

    budget = {"M": 10, "num_steps": 5} if args.quick else {"M": 150}
    fit = ogp.regression(X[known], y[known], **budget)
    print(f"{fit}\n")
    predicted = fit.predict(X[new])
    print(f"{'':18s}{'log density':>11s}{'RMSE':>8s}{'50 %':>8s}{'80 %':>8s}{'95 %':>8s}")
    report("one call", y[new], predicted)
    report("trees", y[new], with_spread(HistGradientBoostingRegressor(random_state=0), X[known], y[known], X[new]))
    report("linear regression", y[new], with_spread(LinearRegression(), X[known], y[known], X[new]))
    the_mean = Normal(np.full(len(y[new]), y[known].mean()), np.full(len(y[new]), y[known].std()))
    report("mean", y[new], the_mean)
    importance = {table.feature_names[int(name[1:])]: share for name, share in fit.importance().items()}
    print("\nimportance: " + ", ".join(f"{name} {share:.2f}" for name, share in importance.items()))
    args.out.mkdir(parents=True, exist_ok=True)
    save_figure(args.out / "one_call.png", y[new], predicted, importance)


if __name__ == "__main__":
    main()
