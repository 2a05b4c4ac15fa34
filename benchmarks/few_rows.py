"""`ogp.regression(X, y)` on tables of few rows: are its intervals what they say?

    python -m benchmarks.few_rows --data FOLDER [--sets concrete ...] [--rows 12 20 32] [--splits 3] [--budget 20]

FOLDER is as for `benchmarks.no_choices`. Of each set and split, so many random rows are for training, and at most 300 others for
tests.
Printed, as means over sets and splits: the log density of a test output where y has standard deviation 1, the same by mean and
standard deviation of y alone, RMSE, and the share of test outputs in intervals of 50, 80 and 95 %.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
from scipy import stats

import numpyro_orthgp as ogp

SETS = ("yacht", "breastcancer", "energy", "concrete", "airfoil", "wine", "skillcraft", "bike")
LEVELS = (0.5, 0.8, 0.95)


def one_fit(X: np.ndarray, y: np.ndarray, num: int, seed: int, budget: float) -> list[float]:
    order = np.random.default_rng(seed).permutation(len(y))
    seen, new = order[:num], order[num : num + 300]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = ogp.regression(X[seen], y[seen], time=budget).predict(X[new])
    alone = stats.norm.logpdf(y[new], y[seen].mean(), y[seen].std())
    below = p.cdf(y[new])
    held = [float(np.mean(np.abs(below - 0.5) <= level / 2)) for level in LEVELS]
    return [
        float(p.log_density(y[new]).mean()),
        float(alone.mean()),
        float(np.sqrt(np.mean((p.mean - y[new]) ** 2))),
        *held,
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--rows", nargs="+", type=int, default=[12, 20, 32])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--budget", type=float, default=20.0)
    options = parser.parse_args(argv)
    print("| rows | log density | mean and sd alone | RMSE | 50, 80, 95 % hold |\n| --- | --- | --- | --- | --- |")
    for num in options.rows:
        found = []
        for name in options.sets:
            with np.load(options.data / f"{name}.npz") as file:
                X, y = file["X"].astype(float), file["y"].astype(float)
            y = (y - y.mean()) / y.std()
            found += [one_fit(X, y, num, seed, options.budget) for seed in range(options.splits)]
        score, alone, error, *held = np.mean(found, 0)
        shares = ", ".join(f"{100 * share:.0f}" for share in held)
        print(f"| {num} | {score:.3f} | {alone:.3f} | {error:.3f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
