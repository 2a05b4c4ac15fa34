"""How much a fit may take: seconds by the clock, or numbers of points and steps, which give the same fit on any machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.training import Progress

__all__ = ["Budget"]

MOST_STEPS = 200  # of one search, unless the user says so


@dataclass
class Budget:
    """
    :param seconds: of the clock; None to look at no clock.
    :param num_points: M, if it is given; then no clock is looked at.
    :param num_steps: the most steps of one search.
    """

    seconds: float | None
    num_points: int | None
    num_steps: int
    begin: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, time: float | None, M: int | None, num_steps: int | None, usual: int = MOST_STEPS) -> Budget:
        """
        :param usual: the number of steps if the user gives none.
        :raises ValueError: for options that are not what they should be.
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
        """Seconds since the beginning."""
        return time.monotonic() - self.begin

    def allows(self, seconds: float) -> bool:
        """Whether as much time is left."""
        return self.seconds is None or self.spent + seconds < self.seconds

    def part(self, share: float) -> Budget:
        """The same clock with a share of the seconds, for what is not to take all of them."""
        return self if self.seconds is None else replace(self, seconds=share * self.seconds)

    def watch(self, progress: Progress) -> None:
        """A callback that ends a search when the time is over."""
        if not self.allows(0.0):
            raise KeyboardInterrupt

    def words(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:g} s"
        points = f"M = {self.num_points}" if self.num_points is not None else "as many points as pay"
        return f"{points}, {self.num_steps} steps a search"
