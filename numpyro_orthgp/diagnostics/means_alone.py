"""Sites that take the mean of f given the inducing variables as a function: ``dist.Normal(f.joint(X).mean, s)``.

In a running model ``f.joint(X)`` is p(f | u), and so is ``f(X)`` where a fit draws u, as under guides of NumPyro, with
``analytic=False`` and in MCMC. Its mean moves with the draw of u, so q learns from y. But the function of this model
has no variance beside that of u: where inducing points are few, the loss may lie below the negative log evidence, and noise
takes the place of what the points miss. A density that has the covariance too, such as
``dist.MultivariateNormal(j.mean, j.covariance_matrix + s**2 * I)`` with ``j = f.joint(X)``, is that of f.

**How they are found.** The model is traced once more, with mean and covariance moved by arguments of the program, whose graph says
which of them a site depends on. One that depends on the mean alone is named if u leaves more than a little of the prior variance.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from numpyro.primitives import Messenger

from numpyro_orthgp.diagnostics.layout import Trace
from numpyro_orthgp.diagnostics.plugged import numbers_of
from numpyro_orthgp.diagnostics.subject import Drawn, Subject
from numpyro_orthgp.diagnostics.words import percent
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.functions.marginals import Marginals
from numpyro_orthgp.inducing.rows import Rows, variance_of_rows
from numpyro_orthgp.math.dependence import reached
from numpyro_orthgp.primitives.messages import MESSAGE, belief_of
from numpyro_orthgp.types import Array

__all__ = ["advice_on_means_alone", "means_alone_of", "warn_of_means_alone"]

_LITTLE = 0.01  # share of the prior variance that the inducing variables may leave


class _Steps(NamedTuple):
    """By how much the moments of one function move: the mean, and the variance or the root of the covariance."""

    mean: Array
    spread: Array


def means_alone_of(subject: Subject | Drawn, gps: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each site that takes means given the inducing variables alone, by name of the gp, the largest share of the prior variance
    that is left there; NaN, if that is not known.

    :param gps: names of the model's gps.
    """
    sites: list[str] = []

    def traced(steps: Mapping[str, _Steps]) -> tuple[list[Array], dict[str, list[Array]]]:
        model = _Moved(subject.model, steps)

        def look(found: Trace, functions: Any) -> tuple[list[Array], dict[str, list[Array]]]:
            numbers = list(numbers_of(found))
            sites[:] = [number.by.site for number in numbers]
            return [number.value for number in numbers], model.left

        return replace(subject, model=model).measure(look)

    zero = jnp.zeros(())
    start = {gp: _Steps(zero, zero) for gp in gps}
    jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)(start)
    if not shapes[1]:
        return {}
    keys, _ = jax.tree.flatten({gp: _Steps(f"mean {gp}", f"spread {gp}") for gp in gps})  # type: ignore[arg-type]
    marks = reached(jaxpr.jaxpr, [frozenset([key]) for key in keys])
    reaches: dict[str, frozenset[Any]] = {}
    for site, of in zip(sites, marks, strict=False):
        reaches[site] = reaches.get(site, frozenset()) | of
    alone = {
        site: [gp for gp in gps if f"mean {gp}" in of and f"spread {gp}" not in of] for site, of in reaches.items()
    }
    if not any(alone.values()):
        return {}
    left = {gp: max(map(float, shares), default=math.nan) for gp, shares in traced(start)[1].items()}
    found = {site: {gp: left[gp] for gp in of if not left[gp] <= _LITTLE} for site, of in alone.items()}
    return {site: of for site, of in found.items() if of}


class _Moved(Messenger):
    """A model in which moments of f given the inducing variables u have moved: those of ``f.joint(X)``, and of ``f(X)`` if the fit
    draws u. ``functions/sites.py`` calls the methods.

    ``left`` has, by name of each gp that was asked, the largest share of the prior variance that is left, for each call. Those of
    calls within a loop of JAX are left out: its arrays are not valid outside.
    """

    def __init__(self, fn: Callable[..., Any], steps: Mapping[str, _Steps]) -> None:
        super().__init__(fn)
        self.steps = steps
        self.drawn: set[str] = set()
        self.left: dict[str, list[Array]] = {}
        self.trace: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left.clear()  # a model may run more than once
        self.trace = get_opaque_trace_state()
        return super().__call__(*args, **kwargs)

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and MESSAGE in msg.get("infer", {}):
            belief = belief_of(msg)
            if belief is None or not belief.analytic:
                self.drawn.add(msg["name"].rpartition(".u")[0])

    def see_joint(self, f: GPFunction, X: Rows, moments: tuple[Array, Array]) -> tuple[Array, Array]:
        mean, root = moments
        if (steps := self._steps(f, mean.dtype)) is None:
            return moments
        self._note(f, X, jnp.sum(root**2, -1))
        return mean + steps.mean, root + steps.spread

    def see_marginals(self, f: GPFunction, X: Rows, m: Marginals) -> Marginals:
        steps = self._steps(f, m.mean.dtype)
        if steps is None or f.names is None or f.names.prefix not in self.drawn:
            return m
        self._note(f, X, m.residual.T)
        total = None if m.total is None else m.total + steps.spread
        return replace(m, mean=m.mean + steps.mean, residual=m.residual + steps.spread, total=total)

    def _steps(self, f: GPFunction, dtype: Any) -> _Steps | None:
        if f.names is None or f.names.prefix not in self.steps:
            return None
        return _Steps(*(step.astype(dtype) for step in self.steps[f.names.prefix]))

    def _note(self, f: GPFunction, X: Rows, left: Array) -> None:
        """
        :param left: variances at X, shape (B,), or (P, B) of several functions, of which the largest counts.
        """
        assert f.names is not None
        shares = self.left.setdefault(f.names.prefix, [])
        if get_opaque_trace_state() == self.trace:
            of_rows, prior = (a.reshape(-1, a.shape[-1]).max(0) for a in (left, variance_of_rows(f.kernel, X)))
            shares.append(jnp.max(of_rows / jnp.maximum(prior, jnp.finfo(left.dtype).tiny)))


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


def warn_of_means_alone(subject: Drawn, gps: Sequence[str]) -> None:
    """Say it of a model that MCMC has sampled."""
    for site, of in means_alone_of(subject, gps).items():
        for gp, share in of.items():
            most = "" if math.isnan(share) else f", up to {percent(share)} of the prior variance,"
            warnings.warn(
                f"{site} takes the mean of {gp} given its inducing variables, f(X).mean, so what these leave{most} "
                "is missing in the model that was sampled. Give the site a likelihood of numpyro_orthgp: likelihoods.Gaussian("
                "f(X), s). Or give it the variance too, as a latent site needs: with m = f(X), dist.Normal(m.mean, "
                "jnp.sqrt(m.variance + s**2)).",
                RuntimeWarning,
                stacklevel=4,
            )
