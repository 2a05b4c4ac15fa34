"""Rows of a file to train with and to test, and their columns without choices."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["Split", "load", "standardized_columns"]


class Split(NamedTuple):
    """As they come: nothing is standardized."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def load(path: Path, split: int, max_rows: int | None) -> Split:
    with np.load(path) as file:
        X = file["X"].astype(float)
        y = file["y"] if "y" in file else file["total"]  # counts of bicycles, whose week matters
        X = np.column_stack([X, file["day_of_week"]]) if "day_of_week" in file else X
        rng = np.random.default_rng(split)
        test = file["test_mask"][:, split] if "test_mask" in file else rng.permutation(len(y)) < len(y) // 10
    train = rng.permutation(np.flatnonzero(~test))[:max_rows]
    return Split(X[train], y[train], X[test], y[test])


def standardized_columns(X: np.ndarray, X_test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both with mean zero and standard deviation one in ``X``, without its constant columns."""
    used = X.std(0) > 0
    shift, scale = X.mean(0)[used], X.std(0)[used]
    return (X[:, used] - shift) / scale, (X_test[:, used] - shift) / scale
