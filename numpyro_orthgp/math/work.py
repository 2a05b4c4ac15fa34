"""How much a program computes, by its graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

__all__ = ["elements_of"]


def elements_of(jaxpr: core.Jaxpr) -> int:
    """Numbers of all results of its operations. Those in a loop count as often as it runs, or once if that is not known."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [elements_of(x) for x in _programs(eqn.params)]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(inner) if inner else sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)
    return total


def _programs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, core.ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, core.Jaxpr):
                yield x
