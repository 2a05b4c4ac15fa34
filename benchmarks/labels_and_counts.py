"""Labels and counts by one call, by scikit-learn's estimators and by other libraries' tutorials, for benchmarks/no_choices.py."""

from __future__ import annotations

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
from numpyro.infer import SVI, TraceMeanField_ELBO
from scipy import stats

import numpyro_orthgp as ogp
from benchmarks import tutorials
from benchmarks.scores import LEVELS, Scores
from benchmarks.splits import Split, standardized_columns
from numpyro_orthgp import init, kernels, likelihoods

__all__ = ["COUNTS", "LABELS", "classes_scores", "count_scores", "labels_by_tutorial", "of_classes", "of_counts"]

LABELS = ("wdbc", "banana", "waveform", "wine_quality_white", "ringnorm", "magic", "letter", "adult")
COUNTS = ("nyc_bicycle",)
BATCH, BLOCK = 1024, 1000
LEAST = 1e-6  # probability of a label that trees may take for impossible


class Probabilities(NamedTuple):
    """Shape (N, C), of the classes in this order."""

    of: np.ndarray
    classes: np.ndarray


class Rates(NamedTuple):
    """Means and log probabilities of the test counts, shape (N,); whether they are in intervals, shape (3, N), if there are any."""

    mean: np.ndarray
    log_density: np.ndarray
    inside: np.ndarray | None = None


def _linear(model: Any, data: Split) -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), model).fit(data.X, data.y)


def labels_by_call(data: Split, budget: float) -> Probabilities:
    predicted = ogp.classification(data.X, data.y, time=budget).predict(data.X_test)
    return Probabilities(predicted.probabilities, predicted.classes)


def labels_model(X, y=None, *, N, Z, smooth, num_scales, num_classes):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 1.0).expand([num_scales]).to_event(1))
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    num_latents = None if num_classes == 2 else num_classes
    f = ogp.gp("f", variance * smooth(lengthscale), numpyro.param("Z", Z), num_latents=num_latents)
    likelihood = likelihoods.Bernoulli if num_latents is None else likelihoods.Categorical
    with numpyro.plate("data", N, subsample_size=X.shape[0]):
        numpyro.sample("y", likelihood(f(X)), obs=y)


def labels_by_recipe(smooth: Any, own_scales: bool, optimizer: Any, **guided: Any) -> Callable[..., Probabilities]:
    """100 points that are learned, 1000 steps, float32: the recipes of getting started and README for numbers."""

    def fit(data: Split, budget: float) -> Probabilities:
        X, X_test = (jnp.asarray(a, jnp.float32) for a in standardized_columns(data.X, data.X_test))
        classes, y = np.unique(data.y, return_inverse=True)
        Z = init.kmeans(random.PRNGKey(0), X, min(100, len(y)))
        kwargs = {"N": len(y), "Z": Z, "smooth": smooth, "num_scales": X.shape[1] if own_scales else 1}
        kwargs |= {"num_classes": len(classes)}
        guide = ogp.AutoSparseGP(labels_model, **guided)
        svi = SVI(labels_model, guide, optimizer, TraceMeanField_ELBO())
        options = {"batch_size": min(BATCH, len(y)), "num_steps": 1000, "progress_bar": False}
        params = ogp.fit(svi, random.PRNGKey(0), (X, jnp.asarray(y)), **options, **kwargs).params
        f = jax.jit(lambda p: ogp.posterior(labels_model, guide, p, X[:2], jnp.asarray(y[:2]), **kwargs)["f"])(params)
        found = np.concatenate([_probabilities(f, X_test[i : i + BLOCK]) for i in range(0, len(X_test), BLOCK)])
        return Probabilities(found, classes)

    return fit


def labels_by_tutorial(python: str, script: Path) -> Callable[..., Probabilities]:
    """See :mod:`benchmarks.tutorials`."""

    def fit(data: Split, budget: float) -> Probabilities:
        X, X_test = standardized_columns(data.X, data.X_test)
        classes, y = np.unique(data.y, return_inverse=True)
        found = tutorials.follow(python, script, X=X, y=y, X_test=X_test, num_classes=len(classes))
        return Probabilities(found["probabilities"], classes)

    return fit


@jax.jit
def _probabilities(f: Any, X: Any) -> Any:
    if f.num_latents is not None:
        return likelihoods.Categorical(f(X)).probs
    p = likelihoods.Bernoulli(f(X)).mean
    return jnp.stack([1 - p, p], -1)


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
    ends = [p.interval(level) for level in LEVELS]
    inside = np.array([(low <= data.y_test) & (data.y_test <= high) for low, high in ends])
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
    "one call": labels_by_call,
    "getting started": labels_by_recipe(kernels.Matern52, False, optax.adam(0.02)),
    "README": labels_by_recipe(
        kernels.Matern32, True, ogp.natural_gradient(optax.adam(0.02), 0.1), residual="tight", natural=True
    ),
    "trees": labels_by_trees, "linear": labels_linear, "mean": shares,
}  # fmt: skip
of_counts: dict[str, Callable[[Split, float], Any]] = {
    "one call": counts_by_call, "trees": counts_by_trees, "linear": counts_linear, "mean": mean_count,
}  # fmt: skip


def classes_scores(data: Split, found: Probabilities) -> Scores:
    position = np.searchsorted(found.classes, data.y_test)
    p = found.of[np.arange(len(position)), position]
    right = found.classes[found.of.argmax(-1)] == data.y_test
    return Scores(np.log(np.maximum(p, LEAST)), right, np.empty((0, len(right))), are_labels=True)


def count_scores(data: Split, found: Rates) -> Scores:
    errors = (data.y_test - found.mean) ** 2 / data.y.std() ** 2
    inside = np.empty((0, len(errors))) if found.inside is None else found.inside
    return Scores(found.log_density, errors, inside)
