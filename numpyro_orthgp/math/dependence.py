"""On which arguments of a program each of its results depends, by its graph: whole arrays, not their entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

__all__ = ["reached"]

# Calls, whose inner programs have the inputs and outputs of the call. In other operations each output depends on each input.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "scan")


def reached(jaxpr: core.Jaxpr, given: Sequence[frozenset[Any]]) -> list[frozenset[Any]]:
    """The marks of the inputs on which each output depends."""
    marks = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> frozenset[Any]:
        return frozenset() if isinstance(atom, core.Literal) else marks.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        marks |= zip(eqn.outvars, _through(eqn, [of(atom) for atom in eqn.invars]), strict=True)
    return [of(atom) for atom in jaxpr.outvars]


def _carry_of(scan: Any, step: core.Jaxpr) -> tuple[int, int]:
    """Position of the first carry among the inputs, and the number of carries. Whatever JAX calls them, scanned inputs and results
    have an axis more than those of a step, and constants and carries, in this order, do not."""
    same = [
        [a.aval.shape == b.aval.shape for a, b in zip(*pair, strict=True)]
        for pair in ((scan.invars, step.invars), (scan.outvars, step.outvars))
    ]
    return sum(same[0]) - sum(same[1]), sum(same[1])


def _through(eqn: Any, given: list[frozenset[Any]]) -> list[frozenset[Any]]:
    everything: frozenset[Any] = frozenset().union(*given)
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if not everything or inner is None or eqn.primitive.name not in _CALLS:
        return [everything] * len(eqn.outvars)
    inner = getattr(inner, "jaxpr", inner)
    found = reached(inner, given)
    if eqn.primitive.name == "scan":
        first, num = _carry_of(eqn, inner)
        carried = [before | after for before, after in zip(given[first : first + num], found[:num], strict=True)]
        if carried != given[first : first + num]:
            return _through(eqn, [*given[:first], *carried, *given[first + num :]])
    return found
