"""A function's access to its model: names for sites, and plates of its rows. For random keys see ``functions/keys.py``."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import reduce
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import Unit
from numpyro.infer import ELBO, RenyiELBO
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.functions.callers import (
    in_control_flow,
    is_calling,
    is_starting,
    transformation,
    without_randomness,
)
from numpyro_orthgp.functions.keys import in_loop
from numpyro_orthgp.functions.moved import DrawByRows, moved
from numpyro_orthgp.types import Array

__all__ = [
    "Names",
    "as_seen",
    "charge",
    "drawn_values",
    "enumerating",
    "model_running",
    "refuse_drawn_by_rows",
    "refuse_enumerated",
    "refuse_uncharged",
    "refuse_while_fitting",
    "states_may_differ",
    "told_of_enumeration",
]

_NOT_OF_PRIORS = (
    "Kernels, inducing points and CollapsedGP cannot depend on a discrete site that is enumerated; offsets, factors and parameters "
    "of likelihoods can. Declare a gp for each value z of the site, and pick: ogp.stack([f(X), g(X)]).pick(z)."
)


def model_running() -> Any:
    """The outermost handler, which identifies a run of a model; ``None`` if no model is running."""
    return _PYRO_STACK[0] if _PYRO_STACK else None


def as_seen(how: str, f: Any, X: Any, moments: Any) -> Any:
    """Moments of f(X), as handlers with a method ``how`` return them: ``diagnostics/means_alone.py`` looks at them."""
    for handler in _PYRO_STACK:
        if hasattr(handler, how):
            moments = getattr(handler, how)(f, X, moments)
    return moments


def enumerating() -> bool:
    """Whether NumPyro enumerates discrete sites of the running model. Their values then have axes to the left of all plates."""
    return any(hasattr(handler, "first_available_dim") for handler in _PYRO_STACK)


def states_may_differ() -> bool:
    """Whether enumerated sites may have one value per row: one is in a plate, or none is known."""
    traces = [found for handler in _PYRO_STACK if isinstance(found := getattr(handler, "trace", None), dict)]
    sites = [site for found in traces for site in found.values() if site["type"] == "sample"]
    states = [s for s in sites if not s["is_observed"] and s["infer"].get("enumerate") == "parallel"]
    return not states or any(site["cond_indep_stack"] for site in states)


@contextmanager
def told_of_enumeration() -> Iterator[None]:
    """Context in which errors about shapes mention enumerated sites as a possible cause, if there are any.

    :raises ValueError: the error, with this hint.
    """
    try:
        yield
    except ValueError as error:
        if not enumerating():
            raise
        raise ValueError(f"{error} {_NOT_OF_PRIORS}") from error


def refuse_enumerated(num_latents: int | None) -> None:
    """Refuse a gp whose number of functions was inferred from an axis that may come from enumeration.

    :param num_latents: the inferred number.
    :raises ValueError: while a site is enumerated.
    """
    if num_latents is not None and enumerating():
        raise ValueError(
            f"The kernel or its points have a leading axis of {num_latents}. It may stand for functions, or for "
            f"the states of a discrete site that is enumerated. If these are {num_latents} functions, say "
            f"num_latents={num_latents}. Else: {_NOT_OF_PRIORS}"
        )


def charge(name: str, cost: Array, weights: Any = None) -> None:
    """Subtract the cost of each row from the model's log density, once per row, inside of any number of plates.

    ``numpyro.factor`` would put the costs along the rightmost plate, and repeat them along others. Rows belong to the plate of
    their size, and have its scale; among several such plates it is the one that subsamples. Without such a plate each y sees
    several rows.

    :param cost: shape (B,).
    :param weights: by what ``handlers.scale`` multiplies log densities here. Those above one are taken for rows that stand for
        others; what lies below one weighs the density of y, and not what the residual costs.
    :raises ValueError: within a loop of JAX, where the cost of a step could not reach the model's log density.
    """
    if in_loop() is not None:
        refuse_uncharged("A draw within lax.scan, jax.vmap and such")
    scale = _scale_of_rows(len(cost))
    if weights is not None:
        cost = cost * jnp.maximum(weights, 1) / jnp.sum(jnp.asarray(weights))
    fn = Unit(-cost.sum())
    with numpyro.handlers.scale(scale=scale):
        numpyro.sample(name, fn, obs=fn.sample(None), infer={"block_plates": [p.name for p in _plates()]})


def _scale_of_rows(num: int) -> float:
    """How many of all rows each of ``num`` rows stands for, by the plates around."""
    plates = _plates()
    of_rows = [p for p in plates if p.subsample_size == num]
    whole = not of_rows and any(p.size == num for p in plates)
    return 1.0 if whole else max((p.size / p.subsample_size for p in of_rows or plates), default=1.0)


def refuse_uncharged(what: str) -> NoReturn:
    """
    :param what: in words, the draw of a function with tightened residual.
    :raises ValueError: always.
    """
    raise ValueError(
        f"{what} is not charged for the tightened residual of this gp, so the loss would be no bound. Call "
        "f(X).sample() at all inputs at once, outside of loops, or within numpyro.contrib.control_flow.scan. Or "
        f"do not tighten this gp: residual={{'another gp': 'tight'}}."
    )


def refuse_while_fitting(who: str, fitting: bool) -> None:
    """Refuse to put data into q of a function that a guide is fitting to data: the loss would be no bound.

    :param who: the caller, as users write it.
    :param fitting: whether the function belongs to the run of a model under a guide.
    :raises ValueError: if it does.
    """
    if fitting:
        raise ValueError(
            f"`{who}` needs a function after its fit, and this one is being fitted: within the model, data that it is given would "
            "count twice, and the loss would be no bound on the evidence. Call it outside of the model, on the fitted function: "
            f"f = posterior(model, guide, params, ...)['f'], then {who}(f, ...). Data for the fit belong to a site of the model, "
            "obs=y."
        )


def _plates() -> list[Any]:
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.plate)]


def _scales() -> list[Any]:
    return [handler for handler in _PYRO_STACK if isinstance(handler, numpyro.handlers.scale)]


def refuse_drawn_by_rows(what: str) -> None:
    """Refuse an operation on several rows in a run whose inputs may be draws that are independent between rows.

    Such draws have no joint law under q. Arrays do not show their origin, so any earlier draw of this kind counts.

    :param what: a clause that names the operation on several rows.
    :raises ValueError: if there was such a draw.
    """
    drawn = getattr(model_running(), "_drawn_by_rows", None)
    if drawn is not None:
        raise ValueError(
            f"{what}, and {drawn!r} was drawn row by row before. If the inputs depend on that draw, the loss "
            "would be no bound: draw rows jointly, f(X).sample(), or use DeepGP([inner, last]), which draws "
            "groups jointly. If they do not, move this before that draw."
        )


class Names:
    """Fresh site names for one function, the same ones each time the model runs.

    All instances are equal, so that as static data of a pytree they never cause a recompilation.
    """

    def __init__(self, prefix: str, fitting: bool = False, residual: str = "", several: bool = False) -> None:
        self.prefix, self.used, self.fitting = prefix, 0, fitting
        self._several = several  # whether the last axis of marginals with two or more is that of functions, not of rows
        self.residual = residual  # what makes q's residual another than the prior's, in words
        self.drawn = False  # whether something has been drawn given the run's inducing variables
        self.by_rows: list[DrawByRows] = []
        # Rows of each draw, and the scale of what a tightened one pays for them.
        self.weighed: list[tuple[int, Any]] = []
        self._columns: tuple[int, ...] = ()
        self.whole = self
        if (running := model_running()) is not None:
            running._numpyro_orthgp_names = {*getattr(running, "_numpyro_orthgp_names", ()), id(self)}
        self._scaled = frozenset(map(id, _scales()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names)

    def __hash__(self) -> int:
        return 0

    @property
    def in_fit(self) -> bool:
        """Whether this is the run of a fit in which the function was declared."""
        declared = id(self.whole) in getattr(model_running(), "_numpyro_orthgp_names", ())
        return declared and (self.fitting or is_calling(ELBO))

    def note_weight(self, num: int) -> None:
        """Note a draw at ``num`` rows, for ``guides/weights.py``."""
        scales = [handler.scale for handler in _scales()]
        self.whole.weighed.append((num, reduce(operator.mul, scales, _scale_of_rows(num))))

    def refuse_within(self, *kinds: str) -> None:
        """Refuse a draw from which JAX makes something else than values of the run's function.

        :param kinds: of transformations: "derivative"; "call" of ``jit``, ``checkpoint`` or ``cond`` outside of loops.
        :raises ValueError: within one of these.
        """
        if without_randomness():
            raise ValueError(
                f"`{self.prefix}` is drawn in inference that takes the log density for a function of latent sites (NUTS). It gives "
                "the same random key at each step, so the noise of this draw would never change. Use a likelihood of "
                "numpyro_orthgp, which integrates f out. Draws that no y needs belong in a model for Predictive."
            )
        if is_starting("AutoLaplaceApproximation"):
            raise ValueError(
                f"`{self.prefix}` is drawn in a model of AutoLaplaceApproximation. It takes the curvature of the log density at "
                "one random key, where the noise of this draw is constant. Use a likelihood of numpyro_orthgp, which integrates "
                "f out, or AutoSparseGP, whose loss averages over draws."
            )
        if self.residual and is_calling(RenyiELBO):
            raise ValueError(
                f"`{self.prefix}` is drawn under RenyiELBO, and has {self.residual}: its residual is drawn from q, and RenyiELBO "
                "weighs latent sites alone, so the loss would be no bound. Leave this out, or take Trace_ELBO."
            )
        kind = transformation() if in_loop() is not None else ""
        if in_control_flow("cond"):  # which seeds its branches anew
            kind = "call"
        if kind not in kinds:
            return
        if kind == "derivative":
            raise ValueError(
                f"A draw of `{self.prefix}` within jax.grad, jax.jvp and such is no function of X, as its residual is drawn anew "
                "at each X: its derivative is not the slope of f. The slope is f(Derivative(X, 0)).sample(). Or draw a path, "
                "path = f.sample_paths(numpyro.prng_key(), 1), and differentiate path(X). What does not depend on the variable of "
                "the derivative, draw before."
            )
        # JAX runs what it has traced again, at other inputs too, and does not tell us.
        raise ValueError(
            f"`{self.prefix}` is drawn within jax.jit, checkpoint or cond. Draws outside, and a second call, would not know this "
            "one and be of another function, and the loss no bound for a y that sees both. Leave jax.jit out (the whole loss is "
            "compiled anyway), or draw before it: v = f(X).sample(), or a path, which may be called within."
        )

    def drawn_by_rows(self) -> None:
        """Note that this run of a fit has drawn the function row by row, see :func:`refuse_drawn_by_rows`."""
        if _PYRO_STACK and self.fitting:
            _PYRO_STACK[0]._drawn_by_rows = self.prefix

    def moved(self, values: Array, marginals: Any, *, at_nodes: bool = False) -> Array:
        """A draw row by row, which within :func:`moved_draws` moves with its function.

        :param marginals: those that it was drawn from.
        :param at_nodes: whether values at several nodes are those of one draw, as for a rule.
        """
        if not at_nodes:
            self.refuse_within("derivative")
        number, own = len(self.by_rows), marginals.own_shape
        several = self._several and len(own) > 1  # other axes are rows, such as those of `vmap`
        columns = self._columns or tuple(range(own[-1] if several else 0))
        columns = columns if marginals.mixing is None else ()
        self.by_rows.append(DrawByRows(own if at_nodes else values.shape, columns, several))
        return moved(values, self.prefix, number)

    def weights(self) -> Any:
        """By what ``handlers.scale`` multiplies log densities here and not the divergence of q; ``None`` where that is nothing.

        Handlers that were entered before the function was declared multiply both.
        """
        scales = [handler.scale for handler in _scales() if id(handler) not in self._scaled]
        return reduce(operator.mul, scales) if scales else None

    def fresh(self) -> str:
        self.whole.used += 1
        return f"{self.prefix}.residual_cost{self.whole.used - 1}"

    def side_by_side(self) -> Names:
        """The names of functions side by side, of which this is the first."""
        stack = copy(self)
        stack._several = True
        return stack

    def of_columns(self, columns: Any) -> Names:
        """The names of the same function, for draws row by row of some of its outputs; all, if there are none."""
        part = copy(self)
        part._columns = tuple(self._columns[c] if self._columns else int(c) for c in np.atleast_1d(columns))
        return part


def drawn_values(values: tuple[Array, ...] | None, names: Names | None) -> tuple[Array, ...] | None:
    """The values of a function's inducing variables in a run, for a draw, which the function's names note."""
    if names is not None:
        names.drawn |= values is not None
    return values
