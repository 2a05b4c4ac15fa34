"""What each test row says of predictions, so that splits can be taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["LEVELS", "Scores", "together"]

LEVELS = (0.5, 0.8, 0.95)  # of intervals


class Scores(NamedTuple):
    """
    :param log_density: log density or log probability of each output, shape (N,).
    :param errors: squared errors over the variance of the training outputs, shape (N,); of labels whether each is right.
    :param inside: whether each output is in the intervals of :data:`LEVELS`, shape (3, N), or (0, N) without intervals.
    :param are_labels: whether errors are of labels.
    """

    log_density: np.ndarray
    errors: np.ndarray
    inside: np.ndarray
    are_labels: bool = False

    @property
    def num(self) -> int:
        return len(self.errors)

    def __str__(self) -> str:
        error = self.errors.mean() if self.are_labels else np.sqrt(self.errors.mean())
        shares = " ".join(f"{100 * share.mean():5.1f}" for share in self.inside)
        return f"{self.log_density.mean():10.3f} {error:7.3f} {shares}".rstrip()


def together(parts: Sequence[Scores]) -> Scores:
    """Of the rows of all parts."""
    arrays = [np.concatenate(part, axis=-1) for part in zip(*(part[:3] for part in parts), strict=True)]
    return Scores(*arrays, parts[0].are_labels)
