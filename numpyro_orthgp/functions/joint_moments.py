"""Runs of a model that show what depends on moments of f given the run's inducing variables, ``f.joint(X).mean`` and covariance.

Both together are p(f | u), and a site may use them. The mean alone is a function without the variance that u leaves
(``diagnostics/means_alone.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from numpyro_orthgp.types import Array

__all__ = ["Moved", "Steps", "joint_moments", "moved_moments"]


class Steps(NamedTuple):
    """By how much the moments of one function move: the mean, and the root of the covariance."""

    mean: Array
    root: Array


@dataclass
class Moved:
    """
    :param steps: by name of the gp.
    :param left: by name of each gp that was asked, the largest share of the prior variance that the inducing variables leave, for
        each call. Those of calls within a loop of JAX are left out: its arrays are not valid outside.
    """

    steps: Mapping[str, Steps]
    left: dict[str, list[Array]] = field(default_factory=dict)
    trace: object = field(default_factory=get_opaque_trace_state)

    def note(self, gp: str, left: Array, prior: Array) -> None:
        """What is left of the prior variances at some inputs, both of shape (..., B)."""
        shares = self.left.setdefault(gp, [])
        if get_opaque_trace_state() == self.trace:
            shares.append(jnp.max(left / jnp.maximum(prior, jnp.finfo(left.dtype).tiny)))


_moved: ContextVar[Moved | None] = ContextVar("moved_moments", default=None)


@contextmanager
def moved_moments(steps: Mapping[str, Steps]) -> Iterator[Moved]:
    """Context, of one run of a model, in which moments given the inducing variables depend on ``steps``."""
    state = Moved(steps)
    token = _moved.set(state)
    try:
        yield state
    finally:
        _moved.reset(token)


def joint_moments(gp: str | None, mean: Array, root: Array, prior: Array) -> tuple[Array, Array]:
    """Mean and root of the covariance, which within :func:`moved_moments` have moved.

    :param gp: the name of the function, if it is known.
    :param mean: shape (..., B).
    :param root: shape (..., B, B).
    :param prior: variances of the prior, shape (..., B).
    """
    state = _moved.get()
    if state is None or gp is None or gp not in state.steps:
        return mean, root
    state.note(gp, jnp.sum(root**2, -1), prior)
    steps = state.steps[gp]
    return mean + steps.mean.astype(mean.dtype), root + steps.root.astype(root.dtype)
