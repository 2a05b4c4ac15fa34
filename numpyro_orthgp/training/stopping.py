"""Early stopping, and the best state so far."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpyro_orthgp.errors import check_integer

__all__ = ["EarlyStopping", "Windows", "as_score", "default_window"]

FEWEST_STEPS = 50  # of a window, unless the user sets it


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a fit that no longer improves, and return its best state.

    ::

        ogp.fit(..., early_stopping=ogp.EarlyStopping(patience=10))
        ogp.fit(..., early_stopping=ogp.EarlyStopping(5, metric=minus_held_out_log_density))

    Steps are grouped into windows of equal length. The score of a window is the mean of its losses. The best state is that at the
    end of the window with the lowest score.

    :param patience: the run ends after this many windows in a row without improvement.
    :param min_delta: how far a score must be below the last improvement to count as another, in units of the loss or metric.
    :param every: steps in a window; by default one epoch, or as many epochs as make at least 50 steps.
    :param metric: a score to use instead: ``metric(params) -> float``, lower is better. It is evaluated at the end of each window
        with the constrained parameters. NaN counts as no improvement, with a warning.
    :raises ValueError: if ``patience`` or ``every`` is not a positive integer or ``min_delta`` is negative.
    """

    patience: int
    min_delta: float = 0.0
    every: int | None = None
    metric: Callable[[dict[str, Any]], Any] | None = None

    def __post_init__(self) -> None:
        check_integer("patience", self.patience)
        if self.every is not None:
            check_integer("every", self.every)
        if not self.min_delta >= 0:
            raise ValueError(f"`min_delta` must not be negative; got {self.min_delta!r}.")
        if not (self.metric is None or callable(self.metric)):
            raise TypeError(f"`metric` must be a function of the parameters; got {type(self.metric).__name__}.")


def as_score(value: Any, step: int) -> float:
    """What a metric returned, as a number.

    :param step: number of steps so far.
    :raises TypeError: if it is none.
    """
    try:
        score = float(np.asarray(value).item())
    except (TypeError, ValueError):
        shape = f" of shape {np.shape(value)}" if np.ndim(value) else ""
        raise TypeError(
            "`metric` of EarlyStopping must return one number, lower where parameters are better; got "
            f"{type(value).__name__}{shape}."
        ) from None
    if math.isnan(score):
        warnings.warn(
            f"`metric` of EarlyStopping is NaN after step {step}, which counts as no improvement. Look for NaN in what it "
            "compares: missing outputs, or rows that no prediction has.",
            UserWarning,
            stacklevel=2,
        )
    return score


def default_window(num_rows: int, batch_size: int) -> int:
    """Steps of one epoch, or of as many epochs as make at least 50 steps."""
    epoch = math.ceil(num_rows / batch_size)
    return epoch * math.ceil(FEWEST_STEPS / epoch)


class Windows(NamedTuple):
    """Scores of the windows so far.

    :param best_score: the lowest score.
    :param best_step: number of steps at the end of the best window, 0 if there is none.
    :param best_state: the state there.
    :param mark: the last score that counted as an improvement.
    :param waited: number of windows since then.
    """

    best_score: float = math.inf
    best_step: int = 0
    best_state: Any = None
    mark: float = math.inf
    waited: int = 0

    def after(self, score: float, step: int, state: Any, min_delta: float = 0.0) -> Windows:
        """The windows with one more, which ends after ``step`` steps in ``state``."""
        windows = self._replace(mark=score, waited=0)
        if not score < self.mark - min_delta:
            windows = self._replace(waited=self.waited + 1)
        if score < self.best_score:
            windows = windows._replace(best_score=score, best_step=step, best_state=state)
        return windows
