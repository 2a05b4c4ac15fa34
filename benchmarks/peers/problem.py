"""What all contenders are given: data, inducing points, a q and hyperparameters to start from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

# Relative to a kernel variance of 1, so that relative and absolute jitters are the same.
JITTER = {"float32": 1e-6, "float64": 1e-10}
LENGTHSCALE, VARIANCE, NOISE = 2.0, 1.0, 0.3  # noise is a standard deviation
LEARNING_RATE = 1e-3  # small: parameters stay where Cholesky factors exist


class Problem(NamedTuple):
    """
    :param X: the inputs of a minibatch, of all data for a collapsed bound, or to predict at; shape (B, D).
    :param y: shape (B,).
    :param Z: inducing points, shape (M, D).
    :param O: those of a second set, or mean-only points, shape (H, D); may be empty.
    :param mean: of q, whitened, shape (M,).
    :param root: Cholesky factor of q's covariance, whitened, shape (M, M).
    :param num_data: rows that the minibatch stands for.
    """

    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    O: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    num_data: int

    @property
    def dtype(self) -> np.dtype:
        return self.X.dtype

    @property
    def jitter(self) -> float:
        return JITTER[self.dtype.name]

    @property
    def lengthscale(self) -> np.ndarray:
        """One for each input dimension."""
        return np.full(self.X.shape[1], LENGTHSCALE, self.dtype)


def load(path: Path | None, num_data: int = 32_000) -> tuple[np.ndarray, np.ndarray]:
    """Standardized rows in random order; without a file, made up ones of kin40k's shape. Their values do not change times."""
    rng = np.random.default_rng(0)
    if path is None:
        X = rng.normal(size=(max(40_000, num_data), 8))
        y = np.sin(X.sum(1)) + 0.1 * rng.normal(size=len(X))
    else:
        with np.load(path) as arrays:
            X, y = arrays["X"].astype(float), arrays["y"].astype(float)
    rows = rng.permutation(len(y))[:num_data]
    X, y = X[rows], y[rows]
    return (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()


def make(X: np.ndarray, y: np.ndarray, dtype: str, *, batch: int, num_inducing: int, second: int = 0) -> Problem:
    """A problem of so many rows and points: the first rows are the batch, the last ones the inducing points.

    q is not the prior, whose variance would hide mistakes: its mean and root are random, standard deviations about 0.5.
    """
    M = num_inducing
    if M + second > len(X) or batch > len(X):
        raise ValueError(f"{len(X)} rows are too few for a batch of {batch} and {M} + {second} points.")
    rng = np.random.default_rng(1)
    noise = np.tril(0.3 / np.sqrt(M) * rng.normal(size=(M, M)), -1)
    points = X[len(X) - M - second :]
    arrays = X[:batch], y[:batch], points[:M], points[M:], 0.5 * rng.normal(size=M), noise + 0.5 * np.eye(M)
    return Problem(*(np.ascontiguousarray(a, dtype) for a in arrays), num_data=len(X))


def save(problem: Problem, path: Path) -> None:
    np.savez(path, **problem._asdict())


def read(path: Path) -> Problem:
    with np.load(path) as arrays:
        return Problem(**{**arrays, "num_data": int(arrays["num_data"])})
