"""How long the steps of searches take, learned from searches that have run; so how many steps a time allows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Pace"]


@dataclass
class Pace:
    """
    :param per_step: seconds of a step, divided by the square of the number of inducing points; NaN if no search has run.
    :param start: seconds of a search before its first step, compilation among them.
    """

    per_step: float = np.nan
    start: float = 0.0

    def learn(self, calls: list[tuple[int, float]], num_points: int) -> None:
        """
        :param calls: number of steps so far and seconds since the search began, at the end of each call to the device. The first
            call compiles, so one alone tells nothing.
        """
        if len(calls) > 1:
            (step, begin), (last, end) = calls[0], calls[-1]
            seconds = (end - begin) / (last - step)
            self.per_step, self.start = seconds / num_points**2, max(self.start, begin - step * seconds)

    def seconds(self, num_steps: int, num_points: int) -> float:
        """Seconds of so many steps; zero if no search has run."""
        return 0.0 if np.isnan(self.per_step) else num_steps * self.per_step * num_points**2

    def steps(self, seconds: float, num_points: int, most: int) -> int:
        """Number of steps that so many seconds allow, at most ``most``."""
        step = self.seconds(1, num_points)
        return most if step == 0 else int(np.clip(seconds / step, 0, most))
