r"""Sites that take moments of f as numbers: ``dist.Normal(f(X).mean, s)``.

A bound averages the log density of a site over q(f): by a likelihood of this package, or over draws. The density at the mean of f
is neither: the loss may lie below the negative log evidence. The site does not see how much f varies, so the data do not narrow q.

**How they are found.** The model runs once more with q of each function moved, and with draws as constants
(``functions/frozen.py``). A site that still has a derivative with respect to the move takes moments as numbers. Marginals in a
likelihood of this package may move with the functions that they are made of, and with no other. Their inputs may not move, nor what
is added to them or multiplied with them, as in ``f(X) - f(X).mean``.

``f(X).at(nodes)`` is a draw, and so a constant, unless its nodes move with the value of a latent site or a parameter. Under
the guide such nodes are not N(0, 1), so the call is only another form of the sum mean + e * sqrt(variance).

**What is not found.** ``numpyro.factor`` may hold an expectation, which is right, or a density at a mean, which is wrong. The
number does not show which. Nodes that are constants may be those of a rule. ``at`` within ``scan`` or ``vmap`` counts as a draw.
Marginals that draw row by row do not know their functions, so moments added to them are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.primitives import Messenger

from numpyro_orthgp.diagnostics.draws import density
from numpyro_orthgp.diagnostics.layout import Trace, is_marginals
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.diagnostics.words import listed
from numpyro_orthgp.functions.draws import drawn_functions, numbers_in
from numpyro_orthgp.functions.frozen import frozen
from numpyro_orthgp.guides.auto import AutoSparseGP
from numpyro_orthgp.guides.own_draws import TwoWays, own_draws
from numpyro_orthgp.guides.posterior import fitted_trace
from numpyro_orthgp.guides.weights import unpaid
from numpyro_orthgp.likelihoods.base import is_expected, unwrap
from numpyro_orthgp.likelihoods.mixture import Mixture
from numpyro_orthgp.math.dependence import reached
from numpyro_orthgp.math.kept import run_kept
from numpyro_orthgp.primitives.messages import MESSAGE, belief_of, site_of
from numpyro_orthgp.types import Array

__all__ = ["advice_on_own_draws", "advice_on_plugged", "numbers_of", "own_draws_of", "plugged_of", "unpaid_of"]


class _Taken(NamedTuple):
    """What takes a number.

    :param site: the site.
    :param own: the gps whose marginals the number is part of, by which it may move.
    """

    site: str
    own: frozenset[str]


class _Number(NamedTuple):
    """
    :param by: what takes it.
    :param value: a sum of all entries, each with a weight of its own, so that none cancel.
    """

    by: _Taken
    value: Array


def plugged_of(subject: Subject, gps: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The gps whose moments a site takes as numbers, by name of the site.

    :param gps: names of the model's gps. Those that the fit does not integrate over are never found.
    """
    if not gps:
        return {}
    looked_at, slopes, of_nodes = _slopes(subject, gps, frozenset())
    if plugged := frozenset(np.flatnonzero(of_nodes).tolist()):
        looked_at, slopes, _ = _slopes(subject, gps, plugged)
    found: dict[str, list[str]] = {}
    for taken, slope in zip(looked_at, slopes, strict=True):
        moves = [gp for gp, s in zip(gps, slope, strict=True) if s != 0 and gp not in taken.own]
        if moves:
            found.setdefault(taken.site, []).extend(moves)
    return {site: tuple(gp for gp in gps if gp in moves) for site, moves in found.items()}


def _slopes(subject: Subject, gps: Sequence[str], left: frozenset[int]) -> tuple[list[_Taken], np.ndarray, np.ndarray]:
    """What takes numbers; derivatives of these with respect to the move of each gp, and of nodes with respect to all other values.

    In most models the graph of the program shows that they are zero, or allowed. Then nothing is compiled.

    :param left: see ``functions/frozen.py``.
    """
    looked_at: list[_Taken] = []

    def numbers(steps: list[Array], step: Array) -> tuple[list[Array], list[Array]]:
        model = _Moved(subject.model, dict(zip(gps, steps, strict=True)), step, left)

        def look(sites: Trace, functions: Any) -> tuple[list[Array], list[Array]]:
            numbers = list(numbers_of(sites))
            looked_at[:] = [number.by for number in numbers]
            return [number.value for number in numbers], [_summed(nodes) for nodes in model.nodes]

        return replace(subject, model=model).measure(look)

    # Not at the fit itself: where means are zero, products of them have no derivative.
    start = [jnp.asarray(0.5)] * len(gps), jnp.zeros(())
    marks = [frozenset([mark]) for mark in (*gps, None)]
    found = reached(jax.make_jaxpr(numbers)(*start).jaxpr, marks)  # draws too, which are constants for derivatives only
    if all(by <= {*taken.own, None} for taken, by in zip(looked_at, found, strict=False)):
        return looked_at, np.zeros((len(looked_at), len(gps))), np.zeros(0)
    values, nodes = run_kept(jax.jacrev(numbers, (0, 1)), *start)
    slopes, of_nodes = [by_gp for by_gp, _ in values], [by_other for _, by_other in nodes]
    return looked_at, np.nan_to_num(slopes), np.nan_to_num(of_nodes)  # NaN tells nothing


def advice_on_plugged(plugged: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Sentences."""
    for site, gps in plugged.items():
        yield (
            f"{site} takes moments of {listed(gps)} as numbers (f(X).mean, f(X).variance, or f(X).at(e) with a latent site e), so "
            "the loss is no bound on the evidence, and the data do not narrow q. Give the site a likelihood of numpyro_orthgp: "
            "likelihoods.Gaussian(f(X), s), or HeteroskedasticGaussian(stack([f(X), g(X)])) where noise varies. Or draw f: "
            "f(X).sample(). For f less an average of f write f(centred(X, over))."
        )


def own_draws_of(subject: Subject) -> tuple[TwoWays, ...]:
    """The sites that take a function in two ways that are independent of each other; see ``guides/own_draws.py``."""
    args, kwargs = subject.arguments.join(subject.arguments.arrays)
    return tuple(own_draws(subject.model, args, kwargs))


def unpaid_of(subject: Subject) -> str | None:
    """What the loss lacks of the cost of tightened residuals, under a guide by hand; see ``guides/weights.py``."""
    if isinstance(subject.guide, AutoSparseGP):  # which has refused such a model
        return None
    args, kwargs = subject.arguments.join(subject.arguments.arrays)
    tight: list[str] = []

    def note() -> None:
        _, functions = fitted_trace(subject.model, subject.guide, subject.params, args, kwargs, subject.rng_key)
        tight.extend(name for name, f in functions.items() if f.residual_scale is not None)

    jax.eval_shape(note)
    return unpaid(subject.model, args, kwargs, tight) if tight else None


def advice_on_own_draws(own: Sequence[TwoWays]) -> Iterator[str]:
    """Sentences."""
    return (found.message.format(site=found.site, gp=found.gp) for found in own)


class _Moved(Messenger):
    """A model whose functions have other q's, as a fit would integrate over them, and in which draws are constants.

    :param steps: by name of the gp, how far its q has moved.
    :param step: how far the values of all other latent sites have, and parameters.
    :param left: see ``functions/frozen.py``.
    """

    def __init__(self, fn: Callable[..., Any], steps: Mapping[str, Array], step: Array, left: frozenset[int]) -> None:
        super().__init__(fn)
        self.steps, self.step, self.left = steps, step, left
        self.nodes: list[Array] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with frozen(self.left) as state:
            result = super().__call__(*args, **kwargs)
        self.nodes = state.nodes
        return result

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] not in ("sample", "param") or msg.get("is_observed"):
            return
        belief = belief_of(msg) if msg["type"] == "sample" else None
        if belief is None:
            if MESSAGE not in msg.get("infer", {}):
                msg["value"] = jax.tree.map(partial(_moved, step=self.step), msg["value"])
        elif belief.analytic and (step := self.steps.get(msg["name"].rpartition(".u")[0])) is not None:
            q = jax.tree.map(partial(_moved, step=step), belief.q)
            msg["infer"] = msg["infer"] | {MESSAGE: belief._replace(q=q)}


def _moved(leaf: Any, step: Array) -> Any:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return leaf
    return leaf + (step * _weights(leaf)).astype(jnp.result_type(leaf))


def numbers_of(sites: Trace) -> Iterator[_Number]:
    """All numbers that sites take: log densities of NumPyro's distributions, what likelihoods of this package have, and weights."""
    for name, site in sites.items():
        if site["type"] != "sample" or isinstance(site["fn"], dist.Unit) or site_of(site) is not None:
            continue
        if isinstance(weight := site["scale"], jax.Array):  # of `handlers.scale`
            yield _Number(_Taken(name, frozenset()), _summed(weight))
        if is_expected(site["fn"]):
            yield from _of_likelihood(name, site)
        else:
            yield _Number(_Taken(name, frozenset()), _summed(density(site)))


def _of_likelihood(name: str, site: Mapping[str, Any]) -> Iterator[_Number]:
    fn, mask = unwrap(site["fn"])
    if isinstance(fn, Mixture):  # whose weights are those of draws
        fn = fn.components
    leaves = jax.tree.leaves((fn, mask, site["value"] if site["is_observed"] else None), is_leaf=is_marginals)
    numbers = [leaf for leaf in leaves if not is_marginals(leaf)]
    marginals = [leaf for leaf in leaves if is_marginals(leaf)]
    for leaf in jax.tree.leaves((numbers, [list(numbers_in(m.joint)) for m in marginals])):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            yield _Number(_Taken(name, frozenset()), _summed(leaf))
    for leaf in marginals:
        if own := frozenset(f.names.prefix for f, _ in drawn_functions(leaf.joint) if f.names is not None):
            yield _Number(_Taken(name, own), _summed(leaf.mean) + _summed(leaf.variance))


def _summed(values: Any) -> Array:
    values = jnp.asarray(values)
    return jnp.sum(values * _weights(values))


def _weights(values: Any) -> Array:
    return jax.random.uniform(jax.random.key(0), jnp.shape(values), jnp.result_type(float), 0.5, 1.5)
