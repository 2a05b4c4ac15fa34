r"""Likelihoods that take f(X), and beside it what is computed from a draw of the same f.

.. math:: y_n \sim N(f(x_n) - f(x_0), s^2), \quad \text{written as Gaussian(f(X) - f(x0).sample()[0], s)}

A likelihood integrates over q(f) as if all else that it takes were known. But draws of a run share its inducing variables, so the
loss would be that of independent functions, and no bound. ``f(X) - f(x0).sample()`` is refused where it is written. Here is all
that is computed from draws: ``f(X).sample()``, row by row too, paths, ``f.joint(X)``, and f at inputs that f itself drew.

**How they are found.** The model is traced once more, with Gaussians that stay where values of the inducing variables are arguments
of the program. So what a likelihood takes depends on these arguments by draws alone, and the program's graph says whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_orthgp.functions.draws import drawn_functions
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import moved_draws
from numpyro_orthgp.gaussians.family import Value
from numpyro_orthgp.guides.handlers import OutputsByRow
from numpyro_orthgp.likelihoods.base import is_expected, unwrap
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, collected_functions, site_of
from numpyro_orthgp.types import Array

__all__ = ["OWN_DRAW", "own_draws", "refuse_own_draws"]

OWN_DRAW = (
    "{site} takes f(X) of {gp} and, beside it, what is computed from a draw of the same function (f(x0).sample(), a path, "
    "f.joint). Its likelihood treats both as independent, so the loss is no bound. Draw all of it, and give y a distribution of "
    "NumPyro: dist.Normal(f(X).sample() - f(x0).sample()[0], s). Sums and differences need no draw: "
    "f(Average(jnp.stack([A, B], 1), jnp.array([1.0, -1.0]))) is f(A) - f(B)."
)

# Calls, whose inner programs have the inputs and outputs of the call. In other operations each output depends on each input.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call", "scan")


def refuse_own_draws(
    model: Callable[..., Any], args: Any, kwargs: Any, sites: Mapping[str, dict[str, Any]], analytic: bool
) -> None:
    """
    :param sites: the sites of a run of the model.
    :param analytic: whether likelihoods integrate over Gaussians, and not over the residual alone.
    :raises ValueError: if a likelihood takes draws of its own function.
    """
    gps = {f.names.prefix for site in sites.values() for f in _functions_of(site) if f.names.drawn}
    if analytic and gps:
        for site, gp in own_draws(model, args, kwargs, sorted(gps)):
            raise ValueError(OWN_DRAW.format(site=f"`{site}`", gp=f"`{gp}`"))


def own_draws(model: Callable[..., Any], args: Any, kwargs: Any, gps: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of an observed site and a gp of which its likelihood takes marginals and draws.

    :param gps: the gps that may be among them.
    """
    pairs: list[tuple[str, str]] = []
    sizes: list[int] = []

    def taken(steps: list[Array]) -> list[Array]:
        by_gp = dict(zip(gps, steps, strict=True))
        moved = _Moved(handlers.seed(model, jax.random.PRNGKey(0)), by_gp)
        with handlers.block(), OutputsByRow(), collected_functions(), moved_draws(by_gp):
            messages = handlers.trace(moved).get_trace(*args, **kwargs)
        arrays: list[Array] = []
        for name, message in messages.items():
            own = {f.names.prefix for f in _functions_of(message)}
            for gp in sorted(own.intersection(gps)):
                leaves = _arrays_of(message)
                pairs.append((name, gp))
                sizes.append(len(leaves))
                arrays.extend(leaves)
        return arrays

    try:
        closed = jax.make_jaxpr(taken)([jnp.zeros(())] * len(gps))
    except Exception:  # the model needs values, or has the fault that its first run will report
        return []
    reached = iter(_reached(closed.jaxpr, [frozenset([gp]) for gp in gps]))
    reaching = [frozenset().union(*(next(reached) for _ in range(size))) for size in sizes]
    return [(site, gp) for (site, gp), of in zip(pairs, reaching, strict=True) if gp in of]


class _Moved(Messenger):
    """A model in which draws of a gp depend on its ``steps``, and its Gaussians do not."""

    def __init__(self, fn: Callable[..., Any], steps: Mapping[str, Array]) -> None:
        super().__init__(fn)
        self.steps = steps

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        step = self.steps.get(msg.get("name", "").rpartition(".u")[0])
        if step is not None and site_of(msg) is not None and not msg["is_observed"]:
            value = msg["value"]
            msg["value"] = value + step.astype(value.dtype)
            msg["infer"] = msg["infer"] | {MESSAGE: Belief(Value(jnp.zeros_like(value)), None, asked=True)}


def _functions_of(message: Mapping[str, Any]) -> Iterator[Any]:
    """The functions whose marginals an observed likelihood takes."""
    if message["type"] == "sample" and message["is_observed"] and is_expected(message["fn"]):
        for leaf in jax.tree.leaves(unwrap(message["fn"]), is_leaf=_is_marginals):
            if _is_marginals(leaf):
                yield from (f for f, _ in drawn_functions(leaf.joint) if f.names is not None)


def _arrays_of(message: Mapping[str, Any]) -> list[Array]:
    leaves = jax.tree.leaves((unwrap(message["fn"]), message["value"]), is_leaf=_is_marginals)
    return jax.tree.leaves([replace(leaf, joint=None) if _is_marginals(leaf) else leaf for leaf in leaves])


def _is_marginals(leaf: Any) -> bool:
    return isinstance(leaf, Marginals)


def _reached(jaxpr: core.Jaxpr, given: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """The marks of the inputs on which each output depends."""
    marks = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> frozenset[str]:
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


def _through(eqn: Any, given: list[frozenset[str]]) -> list[frozenset[str]]:
    everything: frozenset[str] = frozenset().union(*given)
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if not everything or inner is None or eqn.primitive.name not in _CALLS:
        return [everything] * len(eqn.outvars)
    inner = getattr(inner, "jaxpr", inner)
    found = _reached(inner, given)
    if eqn.primitive.name == "scan":
        first, num = _carry_of(eqn, inner)
        carried = [before | after for before, after in zip(given[first : first + num], found[:num], strict=True)]
        if carried != given[first : first + num]:
            return _through(eqn, [*given[:first], *carried, *given[first + num :]])
    return found
