"""One call for a table on disk: seconds, memory, and what the rows beyond those searched in are good for.

    python -m benchmarks.tables_on_disk --num-rows 10000000
    python -m benchmarks.tables_on_disk --data airline_2008_jan_apr.npz    # X (N, D) and y (N,)

Made up rows, unless ``--data`` is given, are written to a temporary .npy file, which is memory-mapped. 10,000 are for the test.
Printed are ``regression``'s page, seconds, the most memory that the process took before and after the call, and the test log
density per standardized output of the fit and of y alone, by one normal distribution and by a mixture as the fit's errors have it.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

import numpyro_orthgp as ogp
from numpyro_orthgp.tabular.mixtures import STANDARD, fit_mixture

TEST = 10_000


def made_up(folder: Path, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Eight columns, three of which matter."""
    rng, D = np.random.default_rng(0), 8
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float64, (num_rows, D))
    y = np.empty(num_rows)
    for start in range(0, num_rows, 1_000_000):
        rows = rng.normal(size=(min(1_000_000, num_rows - start), D))
        X[start : start + len(rows)] = rows
        noise = 0.2 * rng.normal(size=len(rows))
        y[start : start + len(rows)] = np.sin(2 * rows[:, 0]) * np.cos(rows[:, 1]) + 0.5 * rows[:, 2] + noise
    X.flush()
    return np.load(folder / "X.npy", mmap_mode="r"), y


def stored(folder: Path, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a file in random order, on disk."""
    with np.load(path) as file:
        X, y = np.asarray(file["X"]), np.asarray(file["y"], float)
    order = np.random.default_rng(0).permutation(len(y))
    np.save(folder / "X.npy", X[order])
    return np.load(folder / "X.npy", mmap_mode="r"), y[order]


def peak() -> float:
    """Most memory that the process has had, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main(argv: list[str] | None = None) -> ogp.tabular.RegressionFit:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rows", type=int, default=3_000_000)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--time", type=float, default=60.0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        X, y = stored(folder, args.data) if args.data else made_up(folder, args.num_rows)
        train, before, begin = y.copy(), peak(), time.perf_counter()
        train[:TEST] = np.nan  # left out
        fit = ogp.regression(X, train, time=args.time)
        seconds = time.perf_counter() - begin
        scale = np.nanstd(train)
        density = fit.predict(X[:TEST]).log_density(y[:TEST]).mean() + np.log(scale)
        z = (y - np.nanmean(train)) / scale
        alone = fit_mixture(z[TEST : 11 * TEST])
        print(fit)
        print(f"\n{seconds:.0f} s; y has {y.nbytes / 1e9:.2f} GB, X {X.nbytes / 1e9:.2f} GB; most memory {before:.2f} GB before, "
              f"{peak():.2f} GB after")  # fmt: skip
        one, several = (errors.log_density(z[:TEST]).mean() for errors in (STANDARD, alone))
        print(f"test log density {density:.4f}; mean and sd alone {one:.4f}; y alone, a mixture {several:.4f}")
    return fit


if __name__ == "__main__":
    main()
