"""Whether a loss has stopped falling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Convergence", "comparable", "convergence_of"]

SHARE = 10  # the last tenth of the steps is compared with the tenth before it
FEWEST = 2 * SHARE  # losses that can be compared so
CLEAR = 3.0  # standard errors
SURE = 5.0  # of the lowest of several


@dataclass(frozen=True)
class Convergence:
    """The mean loss over the last tenth of the steps, compared with the tenth before.

    :param gain: decrease of the mean loss, in nats.
    :param standard_error: standard error of ``gain``, as if losses were independent given their trend.
    :param num_steps: number of losses.
    :param num_not_finite: number of NaN or infinite losses among those compared. If it is not zero, ``gain`` is NaN.
    :param risen: difference between the last tenth and the lowest tenth, in nats.
    """

    gain: float
    standard_error: float
    num_steps: int
    num_not_finite: int = 0
    risen: float = 0.0

    @property
    def was_lower(self) -> bool:
        """Whether the loss clearly was lower earlier, by more than a nat."""
        return self.risen > max(1.0, SURE * self.standard_error)

    @property
    def falling(self) -> bool:
        """Whether the loss clearly fell, by more than a nat."""
        return self.gain > max(1.0, CLEAR * self.standard_error)

    @property
    def rising(self) -> bool:
        """Whether the loss clearly rose, by more than a nat."""
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


def comparable(losses: np.ndarray | None) -> np.ndarray | None:
    """The losses of a fit; ``None`` if they are too few to say whether they still fall."""
    return losses if losses is not None and len(losses) >= FEWEST else None


def convergence_of(losses: Any) -> Convergence:
    """
    :param losses: one per step, shape (num_steps,).
    :raises ValueError: if the shape is another, or there are fewer than 20 losses.
    """
    values = np.asarray(losses, float)
    if values.ndim != 1 or len(values) < FEWEST:
        raise ValueError(f"`losses` must have shape (num_steps,), at least {FEWEST} of them; got {values.shape}.")
    num = len(values) // SHARE
    not_finite = int((~np.isfinite(values[-2 * num :])).sum())
    if not_finite:
        return Convergence(float("nan"), float("nan"), len(values), not_finite)
    last, before = values[-num:], values[-2 * num : -num]
    # Differences about their mean measure the noise; a trend does not count as noise.
    noise = np.var(np.diff(values[-2 * num :])) / 2
    error = float(np.sqrt(2 * noise / num))
    tenths = values[len(values) - SHARE * num :].reshape(SHARE, num).mean(1)
    lowest = np.min(tenths, initial=np.inf, where=np.isfinite(tenths))
    return Convergence(float(before.mean() - last.mean()), error, len(values), 0, float(last.mean() - lowest))
