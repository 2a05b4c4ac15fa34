"""scikit-learn estimators for :func:`numpyro_orthgp.regression` and :func:`numpyro_orthgp.classification`. The library itself does
not import this module, which needs scikit-learn::

    from numpyro_orthgp.sklearn import GPClassifier, GPRegressor
    scores = cross_val_score(GPRegressor(M=100), X, y)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"numpyro_orthgp.sklearn needs scikit-learn, 1.6 or newer: pip install 'numpyro_orthgp[sklearn]'. ({error})"
    ) from error

from numpyro_orthgp.foreign import filled
from numpyro_orthgp.tabular import classification, regression
from numpyro_orthgp.tabular.labels import categories_of
from numpyro_orthgp.tabular.rows import LEAST_ROWS, series_of

__all__ = ["GPClassifier", "GPRegressor"]

_turn = threading.Lock()  # scikit-learn takes a refusal for a score of NaN, so threads of joblib wait for each other


class _Estimator(BaseEstimator):
    """Base class of both estimators: options, and tables or arrays with missing entries."""

    def __init__(
        self, time: float | None = 60.0, M: int | None = None, num_steps: int | None = None, random_state: Any = 0
    ) -> None:
        self.time, self.M, self.num_steps, self.random_state = time, M, num_steps, random_state

    def _fit(self, call: Callable[..., Any], X: Any, y: Any, **checks: Any) -> Any:
        if np.ma.is_masked(y):
            raise ValueError("`y` is a masked array with entries missing. Leave these rows out.")
        X = filled(X)  # scikit-learn does not see masks
        if not hasattr(X, "columns"):
            X, y = validate_data(self, X, y, ensure_all_finite="allow-nan", ensure_min_samples=LEAST_ROWS, **checks)
        else:
            validate_data(self, X, y, skip_check_array=True)
        options: dict[str, Any] = {"time": self.time, "M": self.M, "num_steps": self.num_steps}
        seed = self.random_state
        if seed is None or isinstance(seed, np.random.RandomState):
            seed = int(check_random_state(seed).randint(2**31))
        with _turn:
            self.gp_ = call(X, y, seed=seed, **options)
        if self.gp_.was_interrupted:  # else a search over options would go on with the next one
            raise KeyboardInterrupt
        return self

    def _predicted(self, X: Any) -> Any:
        check_is_fitted(self)
        X = filled(X)
        if not hasattr(X, "columns"):
            X = validate_data(self, X, reset=False, ensure_all_finite="allow-nan")
        else:
            validate_data(self, X, reset=False, skip_check_array=True)
        return self.gp_.predict(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


class GPRegressor(RegressorMixin, _Estimator):
    """Gaussian-process regression as a scikit-learn estimator; all options have defaults.

    After ``fit``, ``gp_`` holds the result of :func:`numpyro_orthgp.regression`. ``score`` is R^2. Arrays of numbers may have
    missing entries (NaN). Text and categories need a pandas table.

    >>> import numpy as np
    >>> from numpyro_orthgp.sklearn import GPRegressor
    >>> x = np.linspace(0.0, 10.0, 80)[:, None]
    >>> estimator = GPRegressor(M=20, num_steps=50).fit(x, 100 + 5 * np.sin(x[:, 0]))
    >>> mean, std = estimator.predict(np.array([[1.5], [4.7]]), return_std=True)
    >>> mean.round(0), std.shape
    (array([105.,  95.]), (2,))

    :param time: time limit in seconds, as for :func:`numpyro_orthgp.regression`.
    :param M: number of inducing points, likewise.
    :param num_steps: maximum number of steps of each search, likewise.
    :param random_state: an integer seed, which decides which rows are held out; ``None`` or a ``RandomState`` draws one.
    """

    def fit(self, X: Any, y: Any) -> GPRegressor:
        """Fit to a table and numbers.

        :param X: shape (N, D).
        :param y: shape (N,).
        :return: the estimator.
        :raises ValueError: as :func:`numpyro_orthgp.regression`.
        """
        return self._fit(regression, X, y, y_numeric=True)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means of new outputs. With ``return_std`` their standard deviations, noise included, are a second array.

        :param X: shape (N, D).
        """
        predicted = self._predicted(X)
        return (predicted.mean, predicted.sd) if return_std else predicted.mean


class GPClassifier(ClassifierMixin, _Estimator):
    """Gaussian-process classification as a scikit-learn estimator; all options have defaults.

    After ``fit``, ``gp_`` holds the result of :func:`numpyro_orthgp.classification`. ``score`` is the accuracy. Arrays of numbers
    may have missing entries (NaN). Columns of text and categories need a pandas table.

    >>> import numpy as np
    >>> from numpyro_orthgp.sklearn import GPClassifier
    >>> x = np.linspace(0.0, 10.0, 80)[:, None]
    >>> y = np.where(np.sin(x[:, 0]) > 0, "up", "down")
    >>> estimator = GPClassifier(M=20, num_steps=100).fit(x, y)
    >>> new = np.array([[1.5], [4.7]])
    >>> estimator.predict(new), estimator.predict_proba(new).shape
    (array(['up', 'down'], dtype='<U4'), (2, 2))

    :param time: time limit in seconds, as for :func:`numpyro_orthgp.classification`.
    :param M: number of inducing points, likewise.
    :param num_steps: number of steps of each search, likewise.
    :param random_state: an integer seed, which decides which rows are held out; ``None`` or a ``RandomState`` draws one.
    """

    def fit(self, X: Any, y: Any) -> GPClassifier:
        """Fit to a table and labels.

        :param X: shape (N, D).
        :param y: shape (N,).
        :return: the estimator, with the sorted labels as ``classes_``.
        :raises ValueError: as :func:`numpyro_orthgp.classification`.
        """
        y = series_of(y)
        if y is not None:
            check_classification_targets(y)
        if categories_of(y) is not None:
            y = y.astype(object)  # scikit-learn takes the classes to be sorted, and not in the order of the categories
        self._fit(classification, X, y)
        self.classes_ = self.gp_.classes
        return self

    def predict(self, X: Any) -> Any:
        """The most probable labels, shape (N,).

        :param X: shape (N, D).
        """
        return np.asarray(self._predicted(X).label)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, shape (N, C), in the order of ``classes_``.

        :param X: shape (N, D).
        """
        return np.asarray(self._predicted(X).probabilities)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of :meth:`predict_proba`, shape (N, C).

        :param X: shape (N, D).
        """
        with np.errstate(divide="ignore"):  # a probability below those of float64
            return np.log(self.predict_proba(X))
