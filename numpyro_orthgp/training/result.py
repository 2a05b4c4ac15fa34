"""What a fit returns, and what it tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

__all__ = ["FitResult", "Progress", "Status"]

Status = Literal["finished", "stopped early", "interrupted", "diverged", "converged", "stalled"]


class FitResult(NamedTuple):
    """What :func:`~numpyro_orthgp.fit` and :func:`~numpyro_orthgp.fit_lbfgs` return; the first three as in
    NumPyro's ``SVIRunResult``.

    :param params: constrained parameters, by name.
    :param state: the ``SVIState`` that they are read from; ``init_state=`` of another fit goes on from it.
    :param losses: the losses of all steps that were taken, NumPy, shape (number of steps,); for "diverged" those that were
        finite.
    :param status: "finished" (``params`` are those after the last step), "stopped early" or "interrupted" (those of the best window
        so far, see :class:`~numpyro_orthgp.EarlyStopping`), "diverged" (the last whose loss was finite). Of
        :func:`~numpyro_orthgp.fit_lbfgs` also "converged" and "stalled"; ``params`` are those of the lowest loss.
    :param num_steps: the number of steps after which ``params`` were reached.
    :param message: of :func:`~numpyro_orthgp.fit_lbfgs`: why it ended, in words.
    """

    params: dict[str, Any]
    state: Any
    losses: np.ndarray
    status: Status
    num_steps: int
    message: str = ""


@dataclass(frozen=True)
class Progress:
    """What a ``callback`` sees after each call to the device.

    :param step: number of steps taken so far.
    :param epoch: how many times the data have been seen, a fraction.
    :param losses: losses of the steps since the last call, NumPy, shape (number of steps,).
    """

    step: int
    epoch: float
    losses: np.ndarray
    _params: Callable[[], dict[str, Any]] = field(repr=False)

    @property
    def elbo(self) -> float:
        """Minus the mean of ``losses``."""
        return -float(np.mean(self.losses, dtype=np.float64))

    def params(self) -> dict[str, Any]:
        """The constrained parameters after ``step`` steps; nothing is computed unless this is called."""
        return self._params()
