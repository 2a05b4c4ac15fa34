"""Made-up data of the three stories, the same for every library: NumPy arrays in float64."""

from __future__ import annotations

import numpy as np


def table() -> tuple[np.ndarray, ...]:
    """600 rows of three columns on different scales, and 200 rows to predict: X, y, X_test, y_test."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(800, 3)) * [10.0, 1.0, 100.0] + [0.0, 5.0, -50.0]
    y = 20 + 5 * np.sin(X[:, 0]) * (X[:, 1] - 5) + 0.05 * X[:, 2] + rng.normal(size=800) / 2
    return X[:600], y[:600], X[600:], y[600:]


def counties() -> tuple[np.ndarray, ...]:
    """100 counties in 12 regions: places (100, 2), covariate, region, births, deaths; level -6, slope 0.5, spread 0.3."""
    rng = np.random.default_rng(1)
    X, covariate, region = rng.uniform(size=(100, 2)) * 4, rng.normal(size=100), rng.integers(0, 12, 100)
    effect = 0.3 * rng.normal(size=12)
    births = rng.integers(500, 20_000, 100).astype(float)
    log_rate = -6 + 0.5 * covariate + effect[region] + 0.2 * np.sin(2 * X[:, 0])
    return X, covariate, region, births, rng.poisson(births * np.exp(log_rate)).astype(float)


def classes() -> tuple[np.ndarray, ...]:
    """1000 rows of two columns with labels 0 and 1, and 200 rows to predict: X, y, X_test, y_test."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(1200, 2))
    y = (np.sin(2 * X[:, 0]) > X[:, 1]).astype(float)
    return X[:1000], y[:1000], X[1000:], y[1000:]
