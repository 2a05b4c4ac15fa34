r"""What models must pay for tightened residuals.

**Rows that stand for others.** The cost of a draw must be scaled as the rows of a minibatch are.

**Expectations by a user's own formula.** In ``numpyro.factor`` the ``log_prob`` of a likelihood has its cost,
:math:`(v - \log v - 1)/2` for each row, and ``expected_log_density`` or a formula of ``f(X).variance`` has none: the loss would
fall as v goes to zero. Where v is tiny, the derivative of a density by log v is 1/2 for each row that pays, and zero without. So
the model is traced once more, with v as an argument of the program.

``AutoSparseGP`` refuses such models before a fit. A guide by hand does not know its model, so there ``check`` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.infer import SVI
from numpyro.primitives import Messenger

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.functions.callers import is_calling
from numpyro_orthgp.functions.frozen import frozen
from numpyro_orthgp.gaussians.family import Value
from numpyro_orthgp.guides.additive import with_stand_ins
from numpyro_orthgp.guides.handlers import OutputsByRow
from numpyro_orthgp.guides.looking import looked_at
from numpyro_orthgp.likelihoods.base import is_expected
from numpyro_orthgp.primitives.messages import MESSAGE, Belief, collected_functions, site_of
from numpyro_orthgp.types import Array

__all__ = ["refuse_weights", "unpaid"]


_TINY = -60.0  # log v
_MOST_CALLS = 1000  # of `at`
_NONE = 1e-9  # of the slope at v = 1, which no cost of a row falls below


class _Unpaid(ValueError):
    """A tightened residual of which the loss does not have the whole cost."""


def unpaid(model: Callable[..., Any], args: Any, kwargs: Any, tight: Sequence[str]) -> str | None:
    """In words, what a model does not pay of tightened residuals; ``None`` if it pays all, or cannot be traced.

    :param tight: names of the functions whose residual a guide tightens.
    """

    rng_key = jax.random.key(0)  # a known one, with which programs can be run

    def look_at() -> None:
        with looked_at() as (_, functions, _loops):
            run = partial(handlers.seed(model, rng_key), *args, **kwargs)
            sites = handlers.trace(run).get_trace()
        refuse_weights(run, None, [functions[name] for name in tight if name in functions], sites)

    try:
        jax.eval_shape(look_at)
    except _Unpaid as error:
        return str(error)
    except Exception:  # the model needs values
        return None
    return None


def refuse_weights(
    run: Callable[[], Any], num_groups: Any, tight: Sequence[Any], sites: Mapping[str, dict[str, Any]]
) -> None:
    """
    :param run: runs the model, under a key.
    :param num_groups: the option of the guide.
    :param tight: the functions with a tightened residual, after a run of the model.
    :param sites: the sites of this run.
    :raises ValueError: for groups of a minibatch where no plate picks rows, for draws outside of a plate that does, and for factors
        that do not pay.
    """
    _refuse_all_rows(num_groups, [site for site in sites.values() if site.get("is_observed")])
    _refuse_drawn_outside(tight, sites)
    factors = [n for n, s in sites.items() if s.get("is_observed") and isinstance(s["fn"], Unit)]
    if tight and factors:
        _refuse_unpaid(run, [f.names.prefix for f in tight], factors)


def _refuse_all_rows(num_groups: Any, observed: Sequence[dict[str, Any]]) -> None:
    """Refuse ``num_groups`` in a fit to all data at once: the last rows would stand for all of them at every step.

    :param observed: messages of the outputs, whose plates have a scale if they pick rows.
    :raises ValueError: if no output is scaled, and an ``SVI`` calls the guide.
    """
    scales = [message["scale"] for message in observed if is_expected(message["fn"])]
    all_rows = scales and all(s is None or (is_concrete(s) and np.all(s == 1)) for s in scales)
    if num_groups is not None and all_rows and is_calling(SVI):
        raise ValueError(
            f"`num_groups` = {num_groups} is for minibatches, in which a few groups at the end stand for all rows, but no plate of "
            "the model picks rows. Leave it out: then all rows are in groups. A minibatch needs the number of all rows, "
            "numpyro.plate('data', N, subsample_size=len(X))."
        )


def _refuse_drawn_outside(tight: Iterable[Any], sites: Mapping[str, dict[str, Any]]) -> None:
    """Refuse tightened draws outside of the plate whose rows stand for others: their cost would not be scaled as y is.

    :raises ValueError: if there is one. Draws at all rows of the plate, of which y takes some, are right.
    """
    tight = [(f.names.prefix, *draw) for f in tight for draw in f.names.weighed]
    sizes = {n: s["args"] for n, s in sites.items() if s["type"] == "plate"}  # of all rows, and of those picked
    for name, site in sites.items():
        if not tight or site["type"] != "sample" or not site["is_observed"] or not is_concrete(site["scale"]):
            continue
        weight, picked = _most(site["scale"]), [sizes[frame.name][1] for frame in site["cond_indep_stack"]]
        for gp, num, scale in tight:
            whole = num not in picked and num in (size for size, _ in sizes.values())
            if not whole and is_concrete(scale) and weight > 1.0001 * max(1.0, _most(scale)):
                raise _Unpaid(
                    f"`{gp}` has a tightened residual and is drawn at {num} inputs outside of the plate or scale of `{name}`; its "
                    f"rows count {weight:.6g} times. What the draw costs would not, and the loss would be no bound if these inputs "
                    "are those of the rows. Draw within the plate: with numpyro.plate('data', N, subsample_size=len(X)): v = "
                    "f(X).sample(). Or do not tighten this gp: residual={'another gp': 'tight'}."
                )


def _most(scale: Any) -> float:
    return 1.0 if scale is None else float(np.max(np.asarray(scale)))


class _Tightened(Messenger):
    """Context in which functions have a residual with v of one's own; the inducing variables of others have their values."""

    def __init__(self, v: Mapping[str, Array]) -> None:
        super().__init__()
        self.v = v

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if (site := site_of(msg)) is None or msg["is_observed"]:
            return
        if (gp := msg["name"].rpartition(".u")[0]) in self.v:
            value = jnp.asarray(msg["value"], site.dtype)
            v = jnp.broadcast_to(self.v[gp].astype(site.dtype), value.shape[:-1])
            msg["infer"] = msg["infer"] | {MESSAGE: Belief(Value(value), v, asked=True)}


def _refuse_unpaid(run: Callable[[], Any], gps: Sequence[str], factors: Sequence[str]) -> None:
    """
    :param gps: names of functions with a tightened residual.
    :param factors: names of ``numpyro.factor`` sites.
    :raises ValueError: if one of these depends on v and has no cost of it.
    """

    def densities(log_v: Array) -> list[Array]:
        v = dict(zip(gps, jnp.exp(log_v), strict=True))
        draws = frozen(left=frozenset(range(_MOST_CALLS)))  # which pay at sites of their own, and `at` does not
        with (
            handlers.block(),
            OutputsByRow(),
            collected_functions(),
            draws,
            handlers.trace() as messages,
            _Tightened(v),
        ):
            run()
        return [jnp.sum(messages[name]["fn"].log_prob(messages[name]["value"])) for name in factors]

    start = np.zeros(len(gps), jnp.result_type(float))
    try:
        closed = with_stand_ins(jax.make_jaxpr(jax.jacfwd(densities))(start))
        with jax.ensure_compile_time_eval():
            slopes = jax.jit(core.jaxpr_as_fun(closed))
            at_one, tiny = (np.asarray(slopes(a), float) for a in (start, start + _TINY))
    except Exception:  # the model needs values, as within a user's `jit`
        return
    for name, of_one, of_tiny in zip(factors, at_one, tiny, strict=True):
        for gp, slope, paid in zip(gps, of_one, of_tiny, strict=True):
            if abs(paid) < _NONE * abs(slope):
                raise _Unpaid(
                    f"`{name}` takes the marginals of `{gp}`, whose residual is tightened, without what that costs: the loss would "
                    "be no bound, and fall as the residual vanishes. Take the log_prob of a likelihood, which pays, instead of "
                    "its expected_log_density; subtract f(X).tightening_cost from an expectation of your own; or do not tighten "
                    "this gp: residual={'another gp': 'tight'}."
                )
