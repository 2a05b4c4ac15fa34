"""Two problems of fits of hierarchical models: random effects as point estimates, and starts that end at different optima."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_orthgp.diagnostics.convergence import SHARE, convergence_of
from numpyro_orthgp.diagnostics.replay import Replay
from numpyro_orthgp.guides.handlers import EvenRows, WithoutGPs
from numpyro_orthgp.guides.hyper import effects_of

__all__ = ["Point", "Starts", "advice_on_points", "advice_on_starts", "points_of", "starts_of"]

MANY = 5  # values of a vector that may be made of effects
APART = 1.0  # nats between the ends of two starts that are not the same optimum
CLEAR = 3.0  # standard errors


class Point(NamedTuple):
    """A latent site that is a point estimate: all draws of the guide are equal.

    :param name: name of the site.
    :param num: number of its values.
    :param known: whether its prior or its plate says that these are random effects. If not, it is a vector that may hold some.
    :param of_rows: whether it has values for each row of an output, such as true inputs that were measured with errors.
    """

    name: str
    num: int
    known: bool
    of_rows: bool = False


class Starts(NamedTuple):
    """Mean losses over the last tenth of the steps, of this fit and of fits from other starts.

    :param own: mean of this fit.
    :param others: means of the others.
    :param standard_error: the largest standard error of these means.
    """

    own: float
    others: tuple[float, ...]
    standard_error: float

    @property
    def spread(self) -> float:
        """The highest mean minus the lowest."""
        return float(np.ptp([self.own, *self.others]))

    @property
    def differ(self) -> bool:
        """Whether they are clearly more than a nat apart."""
        return not self.spread <= max(APART, CLEAR * self.standard_error)

    def __str__(self) -> str:
        others = ", ".join(f"{loss:.6g}" for loss in self.others)
        return f"starts: this one ends at a loss of {self.own:.6g}, others at {others}"


def points_of(replay: Replay) -> tuple[Point, ...]:
    """Point estimates that are random effects, or may be."""
    latents = [n for n in replay.layout.latents if n not in replay.layout.inducing]
    values = {n: np.asarray(replay.draws.values[n]) for n in latents}
    points = [n for n, v in values.items() if v[0].size > 1 and len(v) > 1 and (v == v[:1]).all()]
    if not points:
        return ()
    args, kwargs = replay.arguments.join(replay.arguments.arrays)
    known = replay.draws.params | replay.draws.first()
    bare = WithoutGPs(handlers.substitute(replay.model, known))
    model = WithoutGPs(replay.model)
    with handlers.block(), EvenRows(None):
        trace = handlers.trace(handlers.seed(bare, jax.random.key(0))).get_trace(*args, **kwargs)
        effects = set(effects_of(model, trace, args, kwargs, bare.after_functions))
    rows = {np.shape(s["value"])[0] for s in trace.values() if s.get("is_observed") and np.ndim(s["value"])}
    found = [Point(n, values[n][0].size, n in effects, values[n].shape[1] in rows) for n in points]
    return tuple(p for p in found if p.known or (p.num >= MANY and (p.of_rows or _is_vector(trace[p.name]))))


def starts_of(losses: Any, starts: Sequence[Any]) -> Starts:
    """
    :param losses: losses of this fit.
    :param starts: losses of the others, each of shape (num_steps,).
    :raises ValueError: if losses of this fit are missing, or there are too few.
    """
    if losses is None or not isinstance(starts, Sequence) or not starts:
        raise ValueError(
            "`starts` must be a list of losses of other fits, beside `losses` of this one: losses=a.losses, starts=[b.losses, "
            "c.losses]."
        )
    ends, errors = [], []
    for one in (losses, *starts):
        errors.append(convergence_of(one).standard_error)
        values = np.asarray(one, float)
        ends.append(float(values[-(len(values) // SHARE) :].mean()))
    return Starts(ends[0], tuple(ends[1:]), max(errors))


def advice_on_points(points: Sequence[Point], has_nuts: bool) -> Iterator[str]:
    """Sentences."""
    ask = "" if has_nuts else " To see how much, compare with NUTS (nuts=200)."
    for p in points:
        if p.known:
            yield (
                f"The {p.num} random effects {p.name} are point estimates in this guide, so their scale is estimated too large, or "
                f"zero: leave `hyper` at its default, which gives effects a Gaussian, or take hyper=AutoNormal.{ask}"
            )
        elif p.of_rows:
            yield (
                f"{p.name} has a point estimate for each row, {p.num} in all, so it follows the outputs too closely, and the loss "
                "is no bound on their evidence. Take hyper=AutoNormal, which integrates over it. Inputs of a function may be "
                f"latent_inputs.{ask}"
            )
        else:
            yield (
                f"{p.name} is a vector of {p.num} point estimates. If they are random effects multiplied by a scale, "
                f"the scale is too large: declare them inside a plate, which gives them a Gaussian, or take hyper=AutoNormal.{ask}"
            )


def advice_on_starts(starts: Starts | None) -> Iterator[str]:
    """Sentences."""
    if starts is None or not starts.differ:
        return
    best = min(starts.others)
    if starts.own - best > APART:
        yield f"Another start ends {starts.own - best:.3g} nats lower ({best:.6g}): use that fit."
    else:
        yield (
            f"Other starts end up to {starts.spread:.3g} nats higher: there are several optima, of which this is the lowest that "
            "was seen. Begin at values that are likely (init_params=), or try more starts."
        )


def _is_vector(site: dict[str, Any]) -> bool:
    """Whether it is one axis of real numbers, outside of plates."""
    support = site["fn"].support
    base = support.base_constraint if isinstance(support, constraints.independent) else support
    return isinstance(base, type(constraints.real)) and jnp.ndim(site["value"]) == 1
