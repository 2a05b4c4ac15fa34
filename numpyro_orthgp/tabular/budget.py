"""The budget of a fit: seconds by the clock, or numbers of points and steps. The latter give the same fit on any machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.training import FitResult, Progress

__all__ = ["BY_CTRL_C", "Budget"]

MOST_STEPS = 200  # of one search, unless the user says so
BY_CTRL_C = ", ended by Ctrl-C"


class Interrupt:
    """Whether the user has asked for an end; one for all parts of a budget."""

    asked = False


@dataclass
class Budget:
    """
    :param seconds: time limit; None for no limit.
    :param num_points: M, if the user gives it; then there is no time limit.
    :param num_steps: maximum number of steps of one search.
    """

    seconds: float | None
    num_points: int | None
    num_steps: int
    begin: float = field(default_factory=time.monotonic)
    interrupt: Interrupt = field(default_factory=Interrupt)

    @classmethod
    def of(cls, time: float | None, M: int | None, num_steps: int | None, usual: int = MOST_STEPS) -> Budget:
        """
        :param usual: the number of steps if the user gives none.
        :raises ValueError: for invalid options.
        """
        if time is not None and not (isinstance(time, int | float) and time > 0):
            raise ValueError(f"`time` must be a positive number of seconds, or None for no limit; got {time!r}.")
        if M is not None:
            check_integer("M", M)
        if num_steps is not None:
            check_integer("num_steps", num_steps)
        by_clock = M is None and num_steps is None
        return cls(float(time) if by_clock and time is not None else None, M, num_steps or usual)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begin

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite if there is none, and zero after Ctrl-C."""
        if self.interrupt.asked:
            return 0.0
        return float("inf") if self.seconds is None else self.seconds - self.spent

    def allows(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return seconds < self.left

    def part(self, share: float) -> Budget:
        """The same clock with a share of the seconds."""
        return self if self.seconds is None else replace(self, seconds=share * self.seconds)

    def renewed(self, share: float) -> Budget:
        """The same clock, set back if less than a share of the seconds is left."""
        if self.seconds is None or self.allows(share * self.seconds):
            return self
        return replace(self, seconds=self.spent + share * self.seconds)

    def watch(self, progress: Progress) -> None:
        """Callback that ends a search when the time is over."""
        if not self.allows(0.0):
            raise KeyboardInterrupt

    def note(self, result: FitResult) -> None:
        """After a search that :meth:`watch` did not end, the user did: the time is over."""
        if result.status == "interrupted" and self.allows(0.0):
            self.interrupt.asked = True

    def words(self, was_interrupted: bool = False) -> str:
        end = BY_CTRL_C if was_interrupted or self.interrupt.asked else ""
        if self.seconds is not None:
            return f"{self.seconds:g} s{end}"
        points = f"M = {self.num_points}" if self.num_points is not None else "as many points as pay"
        return f"{points}, {self.num_steps} steps a search{end}"
