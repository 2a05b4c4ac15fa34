"""Runs of a model in which draws of f are constants.

If a site's density still varies with q, the site takes moments of f as numbers. So ``check`` finds sites such as
``numpyro.sample("y", dist.Normal(f(X).mean, s))``, whose density gives no bound.

``f(X).at(nodes)`` is a draw if the nodes are random numbers. If they are the value of a latent site, it is not: under the guide the
site does not have its prior distribution. So the nodes are recorded, and calls of the second kind can keep their derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from jax import lax
from jax.extend.core import get_opaque_trace_state

from numpyro_orthgp.types import Array

__all__ = ["Frozen", "constant_if_frozen", "frozen"]


@dataclass
class Frozen:
    """
    :param left: positions of the calls of ``at``, in their order, that keep their derivative.
    :param nodes: the nodes of all these calls so far. Calls within a loop of JAX are left out: its arrays are not valid outside.
    """

    left: frozenset[int]
    nodes: list[Array] = field(default_factory=list)
    trace: object = field(default_factory=get_opaque_trace_state)


_frozen: ContextVar[Frozen | None] = ContextVar("frozen", default=None)


@contextmanager
def frozen(left: frozenset[int]) -> Iterator[Frozen]:
    """Context, of one run of a model, in which draws have no derivative.

    :param left: see :class:`Frozen`.
    """
    state = Frozen(left)
    token = _frozen.set(state)
    try:
        yield state
    finally:
        _frozen.reset(token)


def constant_if_frozen(values: Array, nodes: Array | None = None) -> Array:
    """``values``, without a derivative inside of :func:`frozen`.

    :param nodes: what the caller's user gave as standard-normal numbers, if anything.
    """
    state = _frozen.get()
    if state is None:
        return values
    if nodes is not None and get_opaque_trace_state() == state.trace:
        state.nodes.append(nodes)
        if len(state.nodes) - 1 in state.left:
            return values
    return lax.stop_gradient(values)
