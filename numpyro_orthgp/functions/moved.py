"""Runs of a model in which draws move by steps, which show what depends on them (``guides/own_draws.py``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import get_opaque_trace_state

from numpyro_orthgp.types import Array

__all__ = ["DrawByRows", "Noted", "moved", "moved_draws", "moving"]

# Draws by name of the gp and number in the run; ``None`` for one within a loop, whose arrays are of the loop.
Noted = dict[tuple[str, int], Array | None]


class _State(NamedTuple):
    steps: Mapping[Any, Array]
    noted: Noted
    instead: Noted
    trace: Any


_state: ContextVar[_State | None] = ContextVar("moved", default=None)


@contextmanager
def moved_draws(steps: Mapping[Any, Array], instead: Noted) -> Iterator[Noted]:
    """Context in which draws row by row, which do not depend on the run's inducing variables, depend on these steps.

    Joint draws are not of one function there, so that each row depends on its own inputs only.

    :param steps: by name of the gp and number of the draw in the run.
    :param instead: values to use in place of draws, such as those of a run in which Gaussians have not moved.
    :return: the draws, before their steps.
    """
    noted: Noted = {}
    token = _state.set(_State(steps, noted, instead, get_opaque_trace_state()))
    try:
        yield noted
    finally:
        _state.reset(token)


def moved(values: Array, gp: str, number: int) -> Array:
    """A draw row by row, which within :func:`moved_draws` has moved by its step."""
    if (state := _state.get()) is None:
        return values
    key = gp, number
    state.noted[key] = values if get_opaque_trace_state() == state.trace else None
    instead, step = state.instead.get(key), state.steps.get(key)
    values = values if instead is None else instead
    return values if step is None else values + step.astype(values.dtype)


def moving() -> bool:
    """Whether the model runs within :func:`moved_draws`."""
    return _state.get() is not None


class DrawByRows(NamedTuple):
    """A draw row by row.

    :param shape: its shape.
    :param columns: the outputs that it is known to be of, one for each entry of its last axis, or a single one; else none.
    :param several: whether its last axis is that of outputs.
    """

    shape: tuple[int, ...]
    columns: tuple[int, ...]
    several: bool

    @property
    def num_rows(self) -> int:
        """How many values it has of each output, which are independent."""
        return math.prod(self.shape[:-1] if self.several else self.shape)

    def rows(self, values: np.ndarray) -> np.ndarray:
        """One value for each row, as an array that broadcasts to the draw."""
        return values.reshape((*self.shape[:-1], 1) if self.several else self.shape)

    def of(self, column: int | None, random: np.random.Generator) -> np.ndarray:
        """Random steps for the values of one output, or of all."""
        steps = random.choice([-1, 1], self.shape) * random.uniform(0.5, 1.5, self.shape)
        return steps if column is None else steps * (np.asarray(self.columns) == column)
