"""scikit-learn's protocol for :func:`numpyro_orthgp.regression`. Nothing imports this module but those who have scikit-learn::

from numpyro_orthgp.sklearn import GPRegressor
scores = cross_val_score(GPRegressor(M=100), X, y)
"""

from __future__ import annotations

from typing import Any

from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_orthgp.tabular import regression
from numpyro_orthgp.tabular.rows import LEAST_ROWS

__all__ = ["GPRegressor"]


class GPRegressor(RegressorMixin, BaseEstimator):
    """A Gaussian-process regression with nothing to choose, as a scikit-learn estimator.

    It is :func:`numpyro_orthgp.regression`, which ``gp_`` holds after ``fit``; ``score`` is R^2. Arrays of numbers with missing
    entries (NaN) are taken as they are; text and categories need a pandas table.

    >>> import numpy as np
    >>> from numpyro_orthgp.sklearn import GPRegressor
    >>> x = np.linspace(0.0, 10.0, 80)[:, None]
    >>> estimator = GPRegressor(M=20, num_steps=50).fit(x, 100 + 5 * np.sin(x[:, 0]))
    >>> mean, std = estimator.predict(np.array([[1.5], [4.7]]), return_std=True)
    >>> mean.round(0), std.shape
    (array([105.,  95.]), (2,))

    :param time: seconds, as for :func:`numpyro_orthgp.regression`.
    :param M: number of inducing points, likewise.
    :param num_steps: the most steps of each search, likewise.
    :param random_state: an integer, for which rows are held out.
    """

    def __init__(
        self, time: float | None = 60.0, M: int | None = None, num_steps: int | None = None, random_state: int = 0
    ) -> None:
        self.time, self.M, self.num_steps, self.random_state = time, M, num_steps, random_state

    def fit(self, X: Any, y: Any) -> GPRegressor:
        """Fit to a table and numbers.

        :param X: shape (N, D).
        :param y: shape (N,).
        :return: itself.
        :raises ValueError: as :func:`numpyro_orthgp.regression`.
        """
        if not hasattr(X, "columns"):
            checks: dict[str, Any] = {"ensure_all_finite": "allow-nan", "ensure_min_samples": LEAST_ROWS}
            X, y = validate_data(self, X, y, y_numeric=True, **checks)
        else:
            validate_data(self, X, y, skip_check_array=True)
        options: dict[str, Any] = {
            "time": self.time,
            "M": self.M,
            "num_steps": self.num_steps,
            "seed": self.random_state,
        }
        self.gp_ = regression(X, y, **options)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means of new outputs, and with ``return_std`` their standard deviations, noise included, as a second array.

        :param X: shape (N, D).
        """
        check_is_fitted(self)
        if not hasattr(X, "columns"):
            X = validate_data(self, X, reset=False, ensure_all_finite="allow-nan")
        else:
            validate_data(self, X, reset=False, skip_check_array=True)
        predicted = self.gp_.predict(X)
        return (predicted.mean, predicted.sd) if return_std else predicted.mean

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags
