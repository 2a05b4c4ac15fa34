"""Chooses the number of steps per call to the device.

Python sees losses once per call, about twice a second.
"""

from __future__ import annotations

__all__ = ["Plan"]

MAX_STEPS = 1000  # in one call
MAX_BYTES = 2**24  # of batches in one call
SECONDS = 0.5  # approximate time of a call. Ctrl-C and the progress bar wait for its end
BYTES_PER_SECOND = 1e8  # calls that copy a large state are longer, so that copying takes a few percent of the time


class Plan:
    """Calls to the device end where something is done between them, and sooner if steps are slow.

    Results do not depend on the plan.

    :param num_steps: number of steps of the run.
    :param periods: a call must end at multiples of these.
    :param most: largest number of steps in one call; ``None`` to choose it from the size of a batch and the time of steps.
    :param bytes_per_step: size of a batch, 0 if it stays on the device.
    :param bytes_copied: size of the arrays that each call copies before its first step.
    :param may_adapt: whether the plan may depend on time; not if several processes must agree.
    """

    def __init__(
        self,
        num_steps: int,
        periods: list[int],
        most: int | None,
        bytes_per_step: int,
        may_adapt: bool,
        bytes_copied: int = 0,
    ) -> None:
        self.num_steps, self.periods = num_steps, periods
        self.seconds = max(SECONDS, bytes_copied / BYTES_PER_SECOND)
        self.adapts = most is None and may_adapt
        self.most = min(most or max(1, min(MAX_STEPS, MAX_BYTES // max(bytes_per_step, 1))), *periods, num_steps)
        # If arrays have room for one step only, XLA simplifies the program, and the last bits differ.
        self.capacity = max(2, self.most)
        self.pace = 1 if self.adapts else self.most

    def length(self, step: int) -> int:
        """The number of steps in the call after ``step`` steps; 0 at the end."""
        ends = [self.num_steps, *((step // period + 1) * period for period in self.periods)]
        return max(0, min(self.pace, min(ends) - step))

    def took(self, num: int, seconds: float) -> None:
        """Adapt the plan to the time of a call."""
        if self.adapts:
            self.pace = max(1, min(self.most, int(self.seconds * num / max(seconds, self.seconds / self.most))))
