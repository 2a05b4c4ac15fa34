"""Whether a loss has stopped falling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Convergence", "convergence_of"]

SHARE = 10  # the last tenth of the steps is compared with the tenth before it
CLEAR = 3.0  # standard errors
SURE = 5.0  # of the lowest of several


@dataclass(frozen=True)
class Convergence:
    """The mean loss over the last tenth of the steps beside the tenth before.

    :param gain: by how much it fell, in nats.
    :param standard_error: of that, as if losses were independent of each other given their trend.
    :param num_steps: number of losses.
    :param num_not_finite: how many of those compared are NaN or infinite; with one, ``gain`` is NaN.
    :param risen: by how much the last tenth is above the lowest tenth, in nats.
    """

    gain: float
    standard_error: float
    num_steps: int
    num_not_finite: int = 0
    risen: float = 0.0

    @property
    def was_lower(self) -> bool:
        """Whether it clearly was lower before, by more than a nat."""
        return self.risen > max(1.0, SURE * self.standard_error)

    @property
    def falling(self) -> bool:
        """Whether it clearly fell, by more than a nat."""
        return self.gain > max(1.0, CLEAR * self.standard_error)

    @property
    def rising(self) -> bool:
        """Whether it clearly rose, by more than a nat."""
        return -self.gain > max(1.0, CLEAR * self.standard_error)

    def __str__(self) -> str:
        if self.num_not_finite:
            compared = 2 * (self.num_steps // SHARE)
            return f"loss: not finite at {self.num_not_finite} of the last {compared} of {self.num_steps} steps"
        verb = "fell" if self.gain >= 0 else "rose"
        return (
            f"loss: {verb} by {abs(self.gain):.3g} nats (standard error {self.standard_error:.2g}) between the last two tenths of "
            f"{self.num_steps} steps"
        )


def convergence_of(losses: Any) -> Convergence:
    """
    :param losses: one per step, shape (num_steps,).
    :raises ValueError: for another shape, or fewer than 20.
    """
    values = np.asarray(losses, float)
    if values.ndim != 1 or len(values) < 2 * SHARE:
        raise ValueError(f"`losses` must have shape (num_steps,), at least {2 * SHARE} of them; got {values.shape}.")
    num = len(values) // SHARE
    not_finite = int((~np.isfinite(values[-2 * num :])).sum())
    if not_finite:
        return Convergence(float("nan"), float("nan"), len(values), not_finite)
    last, before = values[-num:], values[-2 * num : -num]
    # Noise as differences show it, about their mean: a trend is none.
    noise = np.var(np.diff(values[-2 * num :])) / 2
    error = float(np.sqrt(2 * noise / num))
    tenths = values[len(values) - SHARE * num :].reshape(SHARE, num).mean(1)
    lowest = np.min(tenths, initial=np.inf, where=np.isfinite(tenths))
    return Convergence(float(before.mean() - last.mean()), error, len(values), 0, float(last.mean() - lowest))
