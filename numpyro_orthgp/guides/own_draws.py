r"""Sites that take one f in two ways that are independent of each other.

.. math:: y_n \sim N(f(x_n) - f(x_0), s^2), \quad \text{written as Gaussian(f(X) - f(x0).sample()[0], s)}

A likelihood integrates over q(f) as if all else that it takes were known. But draws of a run share its inducing variables, so the
loss would be that of independent functions, and no bound. ``f(X) - f(x0).sample()`` is refused where it is written. Here is all
that is computed from draws: ``f(X).sample()``, row by row too, paths, ``f.joint(X)``, and f at inputs that f itself drew. Draws row
by row, ``f(X).independent().sample()``, are of another function each time, so a site must not take two of them either.

**How they are found.** The model is traced once more, with Gaussians that stay where values of the inducing variables, and draws
row by row, are moved by arguments of the program. The program's graph says on which of these arguments a site depends. Latent
sites have a distribution of their own under the guide, so what was drawn before ends there. A site that depends on draws row by
row, or ``numpyro.factor``, may still be a sum of terms that see one of them each: there the program is run at several steps
(:mod:`numpyro_orthgp.guides.additive`). Within a user's ``jit`` random numbers stand for its data. Integers, of which some may be
indices, have nothing that stands for them: there two draws are refused, and rows of one draw are not looked at.

Marginals do not always know their function: behind a user's ``jit``, as ``f(X).independent()``, made by hand, or in the
``log_prob`` of a likelihood in ``numpyro.factor``. So the Gaussians move, too, by arguments of their own, and draws row by row stay
where they are. A density that is no sum of a term of the Gaussian and a term of the draws needs both jointly. (Not looked at if
draws row by row are in a loop, where they cannot be told to stay.)

**What is not found.** Functions side by side, once drawn row by row, count as the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend import core
from numpyro import handlers
from numpyro.distributions import Unit, constraints
from numpyro.primitives import Messenger

from numpyro_orthgp.functions.draws import drawn_columns
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.functions.moved import DrawByRows, Noted, moved_draws
from numpyro_orthgp.gaussians.family import Value
from numpyro_orthgp.guides.additive import GAUSSIAN, interactions, moves_of, with_stand_ins
from numpyro_orthgp.guides.handlers import OutputsByRow
from numpyro_orthgp.likelihoods.base import is_expected, unwrap
from numpyro_orthgp.math.dependence import reached
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, collected_functions, site_of
from numpyro_orthgp.types import Array

__all__ = ["OWN_DRAW", "SEVERAL_ROWS", "TWO_DRAWS", "TwoWays", "own_draws", "refuse_own_draws"]

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
SEVERAL_ROWS = (
    "{site} takes several rows of one draw of {gp} row by row, v = f(X).independent().sample() or f(X).at(nodes), such as "
    "their mean, a difference or a running sum. These rows are independent of each other, and values of one function are not, so "
    "the loss is no bound. Leave .independent() out: rows of f(X).sample() are of one function."
)


class TwoWays(NamedTuple):
    """
    :param site: the site that takes the function in two ways.
    :param gp: the function.
    :param message: :data:`OWN_DRAW`, :data:`TWO_DRAWS` or :data:`SEVERAL_ROWS`.
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
    takes = any(_may_take_marginals(site) for site in sites.values())
    if any(f.names.by_rows or (f.names.drawn and takes) for f in functions):
        for site, gp, message in own_draws(model, args, kwargs):
            raise ValueError(message.format(site=f"`{site}`", gp=f"`{gp}`"))


class _Function(NamedTuple):
    """What is remembered of a function, which has arrays of the program that is traced: its outputs, its draws row by row."""

    num_latents: int | None
    by_rows: tuple[DrawByRows, ...]


class _Looked(NamedTuple):
    """
    :param site: name of a site.
    :param own: names of the functions whose marginals it takes, each with the outputs; none, if these are all or not known.
    :param num: number of its arrays among the program's results.
    :param has_density: whether its log density follows them.
    :param may_take: whether marginals of other functions may be in it, or of these.
    """

    site: str
    own: Mapping[str, tuple[int, ...]]
    num: int
    has_density: bool
    may_take: bool


def own_draws(model: Callable[..., Any], args: Any, kwargs: Any) -> list[TwoWays]:
    """The sites that take one function in two ways."""
    functions: dict[str, _Function] = {}
    looked_at: list[_Looked] = []
    in_loops: set[str] = set()  # functions that are drawn row by row there

    def run(steps: Mapping[Any, Array]) -> list[Array]:
        if not any(f.by_rows for f in functions.values()):
            return run_given(steps, {})
        # Draws are those of Gaussians, and not to move with them.
        still: Noted = {}
        run_given({mark: step for mark, step in steps.items() if mark[1:] != (GAUSSIAN,)}, {}, still)
        in_loops.update(gp for (gp, _), values in still.items() if values is None)
        return run_given(steps, still)

    def run_given(steps: Mapping[Any, Array], instead: Noted, drawn: Noted | None = None) -> list[Array]:
        seeded = handlers.trace(handlers.seed(model, jax.random.key(0)))
        functions.clear()
        looked_at.clear()
        arrays: list[Array] = []
        moving = moved_draws(steps, instead)
        with handlers.block(), OutputsByRow(), collected_functions() as found, moving as noted, _Moved(steps):
            messages = seeded.get_trace(*args, **kwargs)
            if drawn is not None:
                drawn.update(noted)
            functions.update(_remembered(found))
            for name, message in messages.items():
                if message["type"] == "sample" and site_of(message) is None:
                    leaves, density = _arrays_of(message), _density(message)
                    may_take = _may_take_marginals(message)
                    looked_at.append(_Looked(name, _taken_by(message), len(leaves), density is not None, may_take))
                    arrays.extend(leaves if density is None else [*leaves, density])
        return arrays

    try:
        jax.eval_shape(lambda: run({}))
        shapes = _shapes(functions)
        zeros = [jnp.zeros(shape) for shape in shapes.values()]
        closed = jax.make_jaxpr(lambda steps: run(dict(zip(shapes, steps, strict=True))))(zeros)
    except Exception:  # the model needs values, or has the fault that its first run will report
        return []
    looked_at = [site._replace(may_take=site.may_take and not in_loops) for site in looked_at]
    marks = iter(reached(closed.jaxpr, [frozenset([mark]) for mark in shapes]))
    of_arrays = [[next(marks) for _ in range(site.num + site.has_density)] for site in looked_at]
    reaches = [frozenset().union(*marks) for marks in of_arrays]
    program = closed, shapes, functions, looked_at
    return list(_pairs(functions, looked_at, reaches, partial(_needed_jointly, *program), partial(_is_apart, *program)))


def _remembered(found: Mapping[str, Any]) -> dict[str, _Function]:
    return {gp: _Function(f.num_latents, tuple(f.names.by_rows)) for gp, f in found.items()}


def _shapes(functions: Mapping[str, _Function]) -> dict[Any, tuple[int, ...]]:
    """The arguments that move draws given the inducing variables, the Gaussians of marginals, and each draw row by row, and
    their shapes."""
    latents = {gp: () if f.num_latents is None else (f.num_latents, 1) for gp, f in functions.items()}
    gaussians = {(gp, GAUSSIAN): shape for gp, shape in latents.items()}
    draws = {(gp, k): draw.shape for gp, f in functions.items() for k, draw in enumerate(f.by_rows)}
    return {**latents, **gaussians, **draws}


def _pairs(
    functions: Mapping[str, _Function],
    looked_at: Sequence[_Looked],
    reaches: Sequence[frozenset[Any]],
    needed_jointly: Callable[[str], list[set[str]] | None],
    is_apart: Callable[[str, int, list[int]], bool],
) -> Iterator[TwoWays]:
    """The sites that take a function in two ways, function by function.

    :param reaches: the arguments on which each site depends.
    :param needed_jointly: by name of a function, what each site needs jointly of what is independent.
    :param is_apart: by name of a function, number of a site and numbers of draws, whether these are of outputs of their own.
    """
    for gp, f in functions.items():
        draws = [(gp, k) for k in range(len(f.by_rows))]
        rows = [[k for _, k in of.intersection(draws)] for of in reaches]
        both = [
            s.may_take and (gp, GAUSSIAN) in of and bool(k or gp in of)
            for s, of, k in zip(looked_at, reaches, rows, strict=True)
        ]
        jointly = needed_jointly(gp) if any(rows) or any(both) else [set()] * len(looked_at)
        for i, site in enumerate(looked_at):
            if gp in site.own and (rows[i] or gp in reaches[i]) and not is_apart(gp, i, rows[i]):
                yield TwoWays(site.site, gp, OWN_DRAW)
            elif both[i] and gp not in site.own and jointly is not None and OWN_DRAW in jointly[i]:
                yield TwoWays(site.site, gp, OWN_DRAW)
            elif jointly is None or not site.has_density:
                several = [f.by_rows[k].columns for k in rows[i]]
                if (several and gp in reaches[i]) or any(_overlap(a, b) for a, b in combinations(several, 2)):
                    yield TwoWays(site.site, gp, TWO_DRAWS)
            elif found := [message for message in (TWO_DRAWS, SEVERAL_ROWS) if message in jointly[i]]:
                yield TwoWays(site.site, gp, found[0])


def _needed_jointly(
    closed: core.ClosedJaxpr,
    shapes: Mapping[Any, tuple[int, ...]],
    functions: Mapping[str, _Function],
    looked_at: Sequence[_Looked],
    gp: str,
) -> list[set[str]] | None:
    """What each site needs jointly of one function; ``None`` if the program's data are not known."""
    if (closed := with_stand_ins(closed)) is None:
        return None
    f = functions[gp]
    moves = list(moves_of(gp, f.num_latents, f.by_rows, (OWN_DRAW, TWO_DRAWS, SEVERAL_ROWS)))
    ends = np.cumsum([site.num + site.has_density for site in looked_at])
    evaluate = core.jaxpr_as_fun(closed)

    def densities(steps: list[Array]) -> list[Array]:
        found = evaluate(*steps)
        return [found[end - 1] for end, site in zip(ends, looked_at, strict=True) if site.has_density]

    try:
        found = iter(interactions(densities, moves, shapes))
    except Exception:  # the program is not one that can be run by itself
        return None
    return [next(found) if site.has_density else set() for site in looked_at]


def _is_apart(
    closed: core.ClosedJaxpr,
    shapes: Mapping[Any, tuple[int, ...]],
    functions: Mapping[str, _Function],
    looked_at: Sequence[_Looked],
    gp: str,
    which: int,
    draws: Sequence[int],
) -> bool:
    """Whether a site takes marginals of some outputs, and draws of others: outputs are independent.

    The graph follows whole arrays, not their columns. So the program is run with the inducing variables of these outputs moved, by
    so much that a comparison with a number sees it.
    """
    own, f = looked_at[which].own[gp], functions[gp]
    if not own or any(_overlap(own, f.by_rows[k].columns) for k in draws) or (closed := with_stand_ins(closed)) is None:
        return False
    first = sum(site.num + site.has_density for site in looked_at[:which])
    moved = np.isin(np.arange(f.num_latents or 0), own).astype(float)[:, None]

    def at(step: float) -> list[Array]:
        steps = [jnp.asarray(step * moved) if mark == gp else jnp.zeros(shape) for mark, shape in shapes.items()]
        return core.jaxpr_as_fun(closed)(*steps)[first : first + looked_at[which].num]

    try:
        with jax.ensure_compile_time_eval():
            start = at(0.0)
            return all(
                np.allclose(a, b) for step in (1.0, -1.0, 100.0, -100.0) for a, b in zip(start, at(step), strict=True)
            )
    except Exception:  # the program is not one that can be run by itself
        return False


def _overlap(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return not a or not b or not set(a).isdisjoint(b)


def _density(message: Mapping[str, Any]) -> Array | None:
    """The log density of a site at its value, by entry of the batch; ``None`` if it has none."""
    fn, value = message["fn"], message["value"]
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    try:
        return jnp.asarray(fn.log_prob(value))
    except Exception:
        return None


class _Moved(Messenger):
    """Context in which draws of a gp depend on ``steps``, its Gaussians on others of these, and latent sites do not."""

    def __init__(self, steps: Mapping[Any, Array]) -> None:
        super().__init__()
        self.steps = steps

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        value, gp = msg["value"], msg["name"].rpartition(".u")[0]
        if site_of(msg) is None:
            msg["value"] = _constant(msg["fn"].support, value)
        elif gp in self.steps:
            msg["value"] = value + self.steps[gp].astype(value.dtype)
            loc = jax.random.normal(jax.random.key(1), value.shape, value.dtype)
            if (step := self.steps.get((gp, GAUSSIAN))) is not None:
                loc = loc + step.astype(value.dtype)
            msg["infer"] = msg["infer"] | {MESSAGE: Belief(Value(loc), None, asked=True)}


def _constant(support: Any, value: Any) -> Array:
    """A value of a latent site that depends on nothing, and is no zero where others may be."""
    ones = jnp.ones(jnp.shape(value), jnp.result_type(value))
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if support is constraints.real or support.is_discrete:
        return ones
    return jnp.asarray(support.feasible_like(ones), ones.dtype)


def _taken_by(message: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The functions whose marginals an observed likelihood takes, and which outputs; none, if these are all or not known."""
    found: dict[str, list[tuple[int, ...]]] = {}
    if message["type"] == "sample" and message["is_observed"] and is_expected(message["fn"]):
        for leaf in jax.tree.leaves(unwrap(message["fn"]), is_leaf=_is_marginals):
            for f, _, columns in drawn_columns(leaf.joint) if _is_marginals(leaf) else ():
                if f.names is not None:
                    found.setdefault(f.names.prefix, []).append(columns)
    return {gp: sum(columns, ()) if all(columns) else () for gp, columns in found.items()}


def _may_take_marginals(message: Mapping[str, Any]) -> bool:
    """Whether a site is a likelihood of observations, or ``numpyro.factor``, which may hold one's log density."""
    observed = message["type"] == "sample" and message["is_observed"]
    return observed and (isinstance(message["fn"], Unit) or is_expected(message["fn"]))


def _arrays_of(message: Mapping[str, Any]) -> list[Array]:
    if isinstance(message["fn"], Unit):
        return []
    leaves = jax.tree.leaves((unwrap(message["fn"]), message["value"]), is_leaf=_is_marginals)
    return jax.tree.leaves([replace(leaf, joint=None) if _is_marginals(leaf) else leaf for leaf in leaves])


def _is_marginals(leaf: Any) -> bool:
    return isinstance(leaf, Marginals)
