"""Labels and counts by one call and by scikit-learn's estimators, for benchmarks/no_choices.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import numpyro_orthgp as ogp
from benchmarks.splits import Split

__all__ = ["COUNTS", "LABELS", "classes_line", "count_line", "of_classes", "of_counts"]

LABELS = ("wdbc", "banana", "waveform", "wine_quality_white", "ringnorm", "magic", "letter", "adult")
COUNTS = ("nyc_bicycle",)
LEAST = 1e-6  # probability of a label that trees may take for impossible


class Probabilities(NamedTuple):
    """Shape (N, C), of the classes in this order."""

    of: np.ndarray
    classes: np.ndarray


class Rates(NamedTuple):
    """Means and log probabilities of the test counts; whether these are in intervals of 50, 80 and 95 %, if there are any."""

    mean: np.ndarray
    log_density: np.ndarray
    inside: tuple[float, ...] = ()


def _linear(model: Any, data: Split) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model).fit(data.X, data.y)


def labels_by_call(data: Split, budget: float) -> Probabilities:
    predicted = ogp.classification(data.X, data.y, time=budget).predict(data.X_test)
    return Probabilities(predicted.probabilities, predicted.classes)


def labels_by_trees(data: Split, budget: float) -> Probabilities:
    from sklearn.ensemble import HistGradientBoostingClassifier

    found = HistGradientBoostingClassifier(random_state=0).fit(data.X, data.y)
    return Probabilities(found.predict_proba(data.X_test), found.classes_)


def labels_linear(data: Split, budget: float) -> Probabilities:
    from sklearn.linear_model import LogisticRegression

    found = _linear(LogisticRegression(max_iter=1000), data)
    return Probabilities(found.predict_proba(data.X_test), found.classes_)


def shares(data: Split, budget: float) -> Probabilities:
    classes, counts = np.unique(data.y, return_counts=True)
    return Probabilities(np.tile(counts / counts.sum(), (len(data.y_test), 1)), classes)


def counts_by_call(data: Split, budget: float) -> Rates:
    p = ogp.counts(data.X, data.y, time=budget).predict(data.X_test)
    ends = [p.interval(level) for level in (0.5, 0.8, 0.95)]
    inside = tuple(float(np.mean((low <= data.y_test) & (data.y_test <= high))) for low, high in ends)
    return Rates(p.mean, p.log_density(data.y_test), inside)


def _poisson(data: Split, mean: np.ndarray) -> Rates:
    return Rates(mean, stats.poisson.logpmf(data.y_test, np.maximum(mean, 1e-9)))


def counts_by_trees(data: Split, budget: float) -> Rates:
    from sklearn.ensemble import HistGradientBoostingRegressor

    found = HistGradientBoostingRegressor(loss="poisson", random_state=0).fit(data.X, data.y)
    return _poisson(data, found.predict(data.X_test))


def counts_linear(data: Split, budget: float) -> Rates:
    from sklearn.linear_model import PoissonRegressor

    return _poisson(data, _linear(PoissonRegressor(alpha=1e-3, max_iter=1000), data).predict(data.X_test))


def mean_count(data: Split, budget: float) -> Rates:
    return _poisson(data, np.full(len(data.y_test), data.y.mean()))


of_classes: dict[str, Callable[[Split, float], Any]] = {
    "one call": labels_by_call, "trees": labels_by_trees, "linear": labels_linear, "mean": shares,
}  # fmt: skip
of_counts: dict[str, Callable[[Split, float], Any]] = {
    "one call": counts_by_call, "trees": counts_by_trees, "linear": counts_linear, "mean": mean_count,
}  # fmt: skip


def classes_line(data: Split, found: Probabilities) -> str:
    position = np.searchsorted(found.classes, data.y_test)
    p = found.of[np.arange(len(position)), position]
    right = float(np.mean(found.classes[found.of.argmax(-1)] == data.y_test))
    return f"{np.log(np.maximum(p, LEAST)).mean():10.3f} {right:7.3f}"


def count_line(data: Split, found: Rates) -> str:
    error = np.sqrt(np.mean((data.y_test - found.mean) ** 2)) / data.y.std()
    shown = " ".join(f"{100 * share:5.1f}" for share in found.inside)
    return f"{found.log_density.mean():10.3f} {error:7.3f} {shown}".rstrip()
