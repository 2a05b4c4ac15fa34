"""Sites that take the mean of f given the inducing variables as a function: ``dist.Normal(f.joint(X).mean, s)``.

In a running model ``f.joint(X)`` is p(f | u), and so is ``f(X)`` where a fit draws u, as under guides of NumPyro
and with ``analytic=False``. Its mean moves with the draw of u, so q learns from y. But the function of this model
has no variance beside that of u: where inducing points are few, the loss may lie below the negative log evidence, and noise
takes the place of what the points miss. A density that has the covariance too, such as
``dist.MultivariateNormal(j.mean, j.covariance_matrix + s**2 * I)`` with ``j = f.joint(X)``, is that of f.

**How they are found.** The model is traced once more, with mean and covariance moved by arguments of the program, whose graph says
which of them a site depends on. One that depends on the mean alone is named if u leaves more than a little of the prior variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.primitives import Messenger

from numpyro_orthgp.diagnostics.layout import Trace
from numpyro_orthgp.diagnostics.plugged import numbers_of
from numpyro_orthgp.diagnostics.subject import Subject
from numpyro_orthgp.diagnostics.words import percent
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.joint_moments import Moved, Steps, moved_moments
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.inducing.rows import Rows, variance_of_rows
from numpyro_orthgp.math.dependence import reached
from numpyro_orthgp.primitives.messages import MESSAGE, belief_of
from numpyro_orthgp.types import Array

__all__ = ["advice_on_means_alone", "means_alone_of"]

_LITTLE = 0.01  # share of the prior variance that the inducing variables may leave


def means_alone_of(subject: Subject, gps: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each site that takes means given the inducing variables alone, by name of the gp, the largest share of the prior variance
    that is left there; NaN, if that is not known.

    :param gps: names of the model's gps.
    """
    sites: list[str] = []

    def traced(steps: Mapping[str, Steps]) -> tuple[list[Array], dict[str, list[Array]]]:
        last: list[Moved] = []

        def model(*args: Any, **kwargs: Any) -> Any:
            with moved_moments(steps) as state:
                last[:] = [state]
                return _Drawn(subject.model, state)(*args, **kwargs)

        def look(found: Trace, functions: Any) -> tuple[list[Array], dict[str, list[Array]]]:
            numbers = list(numbers_of(found))
            sites[:] = [number.site for number in numbers]
            return [number.value for number in numbers], last[0].left

        return replace(subject, model=model).measure(look)

    zero = jnp.zeros(())
    start = {gp: Steps(zero, zero) for gp in gps}
    jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)(start)
    if not shapes[1]:
        return {}
    keys, _ = jax.tree.flatten({gp: Steps(f"mean {gp}", f"root {gp}") for gp in gps})  # type: ignore[arg-type]
    marks = reached(jaxpr.jaxpr, [frozenset([key]) for key in keys])
    reaches: dict[str, frozenset[Any]] = {}
    for site, of in zip(sites, marks, strict=False):
        reaches[site] = reaches.get(site, frozenset()) | of
    alone = {site: [gp for gp in gps if f"mean {gp}" in of and f"root {gp}" not in of] for site, of in reaches.items()}
    if not any(alone.values()):
        return {}
    left = {gp: max(map(float, shares), default=math.nan) for gp, shares in traced(start)[1].items()}
    found = {site: {gp: left[gp] for gp in of if not left[gp] <= _LITTLE} for site, of in alone.items()}
    return {site: of for site, of in found.items() if of}


class _Drawn(Messenger):
    """A model in which marginals of the gps whose inducing variables a fit draws have moved."""

    def __init__(self, fn: Callable[..., Any], state: Moved) -> None:
        super().__init__(fn)
        self.state = state
        self.drawn: set[str] = set()

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and MESSAGE in msg.get("infer", {}):
            belief = belief_of(msg)
            if belief is None or not belief.analytic:
                self.drawn.add(msg["name"].rpartition(".u")[0])

    def see_marginals(self, m: Marginals, f: GPFunction, X: Rows) -> Marginals:
        """Called by ``functions/sites.py``."""
        gp = f.names.prefix if f.names else ""
        if gp not in self.drawn or gp not in self.state.steps:
            return m
        # Of several functions the largest: rows of tasks see some of them.
        left, prior = (a if a.ndim == 1 else a.max(-1) for a in (m.residual, f._columns(variance_of_rows(f.kernel, X))))
        self.state.note(gp, left, prior)
        steps = jax.tree.map(lambda step: step.astype(m.mean.dtype), self.state.steps[gp])
        total = None if m.total is None else m.total + steps.root
        return replace(m, mean=m.mean + steps.mean, residual=m.residual + steps.root, total=total)


def advice_on_means_alone(alone: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Sentences."""
    for site, of in alone.items():
        for gp, share in of.items():
            most = "" if math.isnan(share) else f", up to {percent(share)} of the prior variance"
            yield (
                f"{site} takes the mean of {gp} given its inducing variables, f.joint(X).mean, without the covariance, "
                f"or f(X).mean, if the guide draws these. So the loss is that of a function without what they leave{most}. "
                "Draw f: f(X).sample(). Or give the density both, as in dist.MultivariateNormal(j.mean, j.covariance_matrix + "
                "s**2 * jnp.eye(len(X))) with j = f.joint(X)."
            )
