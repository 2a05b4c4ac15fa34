r"""Sites that take one f in two ways that are independent of each other.

.. math:: y_n \sim N(f(x_n) - f(x_0), s^2), \quad \text{written as Gaussian(f(X) - f(x0).sample()[0], s)}

A likelihood integrates over q(f) as if all else that it takes were known. But draws of a run share its inducing variables, so the
loss would be that of independent functions, and no bound. ``f(X) - f(x0).sample()`` is refused where it is written. Here is all
that is computed from draws: ``f(X).sample()``, row by row too, paths, ``f.joint(X)``, and f at inputs that f itself drew. Draws row
by row, ``f(X).independent().sample()``, are of another function each time, so a site must not take two of them either.

**How they are found.** The model is traced once more, with Gaussians that stay where values of the inducing variables, and draws
row by row, are moved by arguments of the program. The program's graph says on which of these arguments a site depends. Latent
sites have a distribution of their own under the guide, so what was drawn before ends there.

**What is not found.** ``numpyro.factor`` may sum the densities of several sites, which may each take another draw. Functions side
by side, once drawn row by row, count as the first one. A site may depend on several rows of one draw, as on their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.primitives import Messenger

from numpyro_orthgp.functions.draws import drawn_functions
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.sites import moved_draws
from numpyro_orthgp.gaussians.family import Value
from numpyro_orthgp.guides.handlers import OutputsByRow
from numpyro_orthgp.likelihoods.base import is_expected, unwrap
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, collected_functions, site_of
from numpyro_orthgp.types import Array

__all__ = ["OWN_DRAW", "TWO_DRAWS", "TwoWays", "own_draws", "refuse_own_draws"]

OWN_DRAW = (
    "{site} takes f(X) of {gp} and, beside it, what is computed from a draw of the same function (f(x0).sample(), a path, "
    "f.joint). Its likelihood treats both as independent, so the loss is no bound. Draw all of it, and give y a distribution of "
    "NumPyro: dist.Normal(f(X).sample() - f(x0).sample()[0], s). Sums and differences need no draw: "
    "f(Average(jnp.stack([A, B], 1), jnp.array([1.0, -1.0]))) is f(A) - f(B)."
)
TWO_DRAWS = (
    "{site} takes several draws of {gp}, and at least one row by row, f(X).independent().sample(): each of these is of another "
    "function, so the loss is no bound. Draw once, and use the values twice: v = f(X).independent().sample(). Where one y needs f "
    "at several inputs, leave .independent() out: draws f(A).sample() and f(B).sample() are of one function. Where each y needs "
    "one input, draw all inputs at once: f(jnp.concatenate([A, B])).independent().sample()."
)

# Calls, whose inner programs have the inputs and outputs of the call. In other operations each output depends on each input.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call", "scan")


class TwoWays(NamedTuple):
    """
    :param site: the site that takes the function in two ways.
    :param gp: the function.
    :param message: :data:`OWN_DRAW` or :data:`TWO_DRAWS`.
    """

    site: str
    gp: str
    message: str


def refuse_own_draws(
    model: Callable[..., Any], args: Any, kwargs: Any, sites: Mapping[str, dict[str, Any]], functions: Iterable[Any]
) -> None:
    """
    :param sites: the sites of a run of the model.
    :param functions: its functions.
    :raises ValueError: if a site takes one of them in two ways.
    """
    taken = {f.names.prefix for site in sites.values() for f in _functions_of(site)}
    if any((f.names.prefix in taken) + f.names.drawn + len(f.names.by_rows) > 1 for f in functions):
        for site, gp, message in own_draws(model, args, kwargs):
            raise ValueError(message.format(site=f"`{site}`", gp=f"`{gp}`"))


def own_draws(model: Callable[..., Any], args: Any, kwargs: Any) -> list[TwoWays]:
    """The sites that take one function in two ways."""
    functions: dict[str, Any] = {}
    looked_at: list[tuple[str, frozenset[Any], int]] = []

    def run(steps: Mapping[Any, Array]) -> list[Array]:
        moved = _Moved(handlers.seed(model, jax.random.PRNGKey(0)), steps)
        functions.clear()
        looked_at.clear()
        with handlers.block(), OutputsByRow(), collected_functions() as found, moved_draws(steps):
            messages = handlers.trace(moved).get_trace(*args, **kwargs)
        functions.update(found)
        arrays: list[Array] = []
        for name, message in messages.items():
            if message["type"] == "sample" and site_of(message) is None and not isinstance(message["fn"], Unit):
                leaves = _arrays_of(message)
                looked_at.append((name, frozenset(f.names.prefix for f in _functions_of(message)), len(leaves)))
                arrays.extend(leaves)
        return arrays

    try:
        jax.eval_shape(lambda: run({}))
        marks: list[Any] = [*functions, *((gp, k) for gp, f in functions.items() for k in range(len(f.names.by_rows)))]
        closed = jax.make_jaxpr(lambda steps: run(dict(zip(marks, steps, strict=True))))([jnp.zeros(())] * len(marks))
    except Exception:  # the model needs values, or has the fault that its first run will report
        return []
    reached = iter(_reached(closed.jaxpr, [frozenset([mark]) for mark in marks]))
    pairs = []
    for site, own, size in looked_at:
        of: frozenset[Any] = frozenset().union(*(next(reached) for _ in range(size)))
        for gp, f in functions.items():
            rows = [columns for k, columns in enumerate(f.names.by_rows) if (gp, k) in of]
            if gp in own and (gp in of or rows):
                pairs.append(TwoWays(site, gp, OWN_DRAW))
            elif (rows and gp in of) or any(_overlap(a, b) for a, b in combinations(rows, 2)):
                pairs.append(TwoWays(site, gp, TWO_DRAWS))
    return pairs


def _overlap(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return not a or not b or not set(a).isdisjoint(b)


class _Moved(Messenger):
    """A model in which draws of a gp depend on ``steps``, and its Gaussians and latent sites do not."""

    def __init__(self, fn: Callable[..., Any], steps: Mapping[Any, Array]) -> None:
        super().__init__(fn)
        self.steps = steps

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        value, step = msg["value"], self.steps.get(msg["name"].rpartition(".u")[0])
        if site_of(msg) is None:
            msg["value"] = jnp.ones(jnp.shape(value), jnp.result_type(value))
        elif step is not None:
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


def _reached(jaxpr: core.Jaxpr, given: Sequence[frozenset[Any]]) -> list[frozenset[Any]]:
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
    found = _reached(inner, given)
    if eqn.primitive.name == "scan":
        first, num = _carry_of(eqn, inner)
        carried = [before | after for before, after in zip(given[first : first + num], found[:num], strict=True)]
        if carried != given[first : first + num]:
            return _through(eqn, [*given[:first], *carried, *given[first + num :]])
    return found
