"""Predictions of data that were not fitted: probability integral transforms, coverage, log densities.

Held-out predictions are draws, for any likelihood. The transform of an observation is the share of draws below it, plus a uniform
random share of the draws equal to it. So discrete outputs need no extra code. Classes have no order and get log densities only.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_orthgp.diagnostics.draws import Arguments, GuideDraws
from numpyro_orthgp.diagnostics.layout import Layout, Trace, output_key
from numpyro_orthgp.diagnostics.replay import Replay, look
from numpyro_orthgp.diagnostics.resolution import arguments_of
from numpyro_orthgp.diagnostics.sites import are_classes, censored_of, mask_of, predictive_draw
from numpyro_orthgp.likelihoods.base import log_predictive
from numpyro_orthgp.training.columns import in_memory
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["LEVELS", "Calibration", "calibrate", "with_held_out"]

LEVELS = (0.5, 0.8, 0.95)  # of the intervals whose coverage is looked at
BEYOND = 0.1  # of the range of a column
FEW = 20  # rows that say no range
MANY = 2**25  # predictive draws from which on there is a warning: half a gigabyte, and a minute on a CPU


@dataclass(frozen=True)
class Calibration:
    """Predictions of one output at held-out points.

    :param log_density: log p(y_i | data) of each point that is not masked, flat. The average over draws is inside the logarithm. If
        y_i has several entries, it is the joint density of those that are not masked. For a censored time it is
        log P(y_new > y_i | data).
    :param pit: probability integral transforms P(y_new <= y_i | data) of each entry that is not masked, flat. They are uniform on
        [0, 1] if predictions are calibrated. For discrete outputs they have a uniform random share of P(y_new = y_i) [1]. A
        censored time is longer than y_i, so its transform is drawn uniformly between P(y_new <= y_i) and 1 [2]; this is right if
        the censoring does not depend on the time. ``None`` for classes, which have no order.
    :param outside: share of the rows with an input beyond those that were fitted, by more than a tenth of their range.

    **References:**

    1. Czado, Gneiting, Held. Predictive Model Assessment for Count Data. 2009.
    2. Li, Wu, Feng. Model Diagnostics for Censored Regression via Randomized Survival Probabilities. 2021.
    """

    log_density: np.ndarray
    pit: np.ndarray | None
    outside: float = 0.0

    def coverage(self, level: float) -> float:
        """Share of the points inside their central predictive interval of this probability."""
        assert self.pit is not None
        return float((np.abs(self.pit - 0.5) <= level / 2).mean())

    def standard_error(self, level: float) -> float:
        """Standard error of :meth:`coverage` if predictions were calibrated and points independent."""
        assert self.pit is not None
        return float(np.sqrt(level * (1 - level) / len(self.pit)))


def with_held_out(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], held_out: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model with those of held-out data in the place of the fitted ones.

    :param held_out: a tuple of positional arguments, or a dict of arguments by name.
    :raises TypeError: if it is neither, or the model has no such arguments.
    """
    held_out = in_memory(held_out)
    if isinstance(held_out, tuple):
        return held_out + args[len(held_out) :], kwargs
    if not isinstance(held_out, Mapping):
        raise TypeError(
            "`held_out` must be a tuple of the model's positional arguments, such as (X_test, y_test), or a dict of arguments by "
            f"name; got {type(held_out).__name__}."
        )
    bound = inspect.signature(model).bind(*args, **kwargs)
    own = {name for name, p in bound.signature.parameters.items() if p.kind is p.VAR_KEYWORD}
    unknown = set(held_out) - set(bound.signature.parameters) if not own else set()
    if unknown:
        raise TypeError(f"`held_out` has {sorted(unknown)}, which the model does not take: it has {bound.signature}.")
    named = set(bound.signature.parameters) - own
    bound.arguments.update({name: value for name, value in held_out.items() if name in named})
    others = {name: value for name, value in held_out.items() if name not in named}
    return bound.args, bound.kwargs | others


def calibrate(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    params: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_samples: int,
    rng_key: PRNGKey,
    fitted: Mapping[str, Any],
) -> dict[str, Calibration]:
    """Compare predictions and observations of each output that is not wholly masked.

    :param args: arguments of the model: the held-out data, with observations. A plate may be larger than they are.
    :param fitted: arrays among the arguments of the fit, by name.
    :raises ValueError: if a plate picks rows of them at random, or all of them are masked.
    """
    _warn_of_many((args, kwargs), num_samples)
    draw_key, model_key, tie_key = jax.random.split(rng_key, 3)
    arguments = Arguments(args, kwargs)
    source = GuideDraws(guide, params, arguments, draw_key)
    layout = look(model, arguments, source, fitted=True, whole=False)
    replay = Replay(model, arguments, source.draw(num_samples), layout)
    drawn = replay.map(lambda sites, functions, key: _predict(sites, key, layout), model_key)
    observed, again = replay.ends(lambda sites, functions, key: _observed(sites, layout), model_key)
    for name, (y, _) in observed.items():
        if not np.array_equal(y, again[name][0], equal_nan=True):
            raise ValueError(
                f"The observations of `{name}` differ from one run of the model to the next: a plate picks rows at random. Give it "
                "the number of held-out rows as its size: held_out={'X': X_test, 'y': y_test, 'N': len(X_test)}."
            )
    seen = {name for name, (_, mask) in observed.items() if np.any(mask)}
    if not seen:
        raise ValueError(
            f"`held_out` must hold observations; got masks that hide all of {', '.join(map(repr, observed))}. Held-out data have a "
            "mask of their own: held_out={'X': X_test, 'y': y_test, 'mask': mask_test}."
        )
    outside = _outside(fitted, arguments_of(model, args, kwargs))
    return {
        name: replace(
            _calibration(below, equal, log_density, observed[name][1], jax.random.fold_in(tie_key, i)), outside=outside
        )
        for i, (name, (below, equal, log_density)) in enumerate(drawn.items())
        if name in seen
    }


def _outside(fitted: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    """The share of new rows with an input beyond the range of those fitted.

    :param fitted, new: arrays among the model's arguments, by name; inputs are those with columns.
    """
    beyond: list[np.ndarray] = []
    for name in fitted.keys() & new.keys():
        known, rows = (np.asarray(a[name]) for a in (fitted, new))
        if known.ndim == 2 and rows.shape[1:] == known.shape[1:] and known.dtype.kind == "f" and len(known) >= FEW:
            low, high = known.min(0), known.max(0)
            room = BEYOND * (high - low)
            beyond.append(((rows < low - room) | (rows > high + room)).any(1))
    together = [b for b in beyond if len(b) == max(map(len, beyond))]
    return float(np.any(together, axis=0).mean()) if together else 0.0


def _warn_of_many(arguments: Any, num_samples: int) -> None:
    rows = max([np.shape(a)[0] for a in jax.tree.leaves(arguments) if np.ndim(a)], default=0)
    if rows * num_samples > MANY:
        warnings.warn(
            f"`held_out` has {rows} rows, for each of which {num_samples} outputs are drawn, in about "
            f"{rows * num_samples * 16 / 2**30:.1f} GB. Some thousand rows, spread over the data, tell the same: "
            f"held_out=(X_test[::{max(2, rows // 5000)}], y_test[::{max(2, rows // 5000)}]).",
            UserWarning,
            stacklevel=4,
        )


def _predict(sites: Trace, rng_key: PRNGKey, layout: Layout) -> dict[str, tuple[Array | None, Array | None, Array]]:
    """For each output whether a draw of y lies below the one observed or may be it (``None`` for classes), and log densities."""
    found: dict[str, tuple[Array | None, Array | None, Array]] = {}
    for i, output in enumerate(layout.outputs):
        fn, y = sites[output.site]["fn"], sites[output.site]["value"]
        if are_classes(fn):
            below, equal = None, None
        else:
            new = predictive_draw(fn, output_key(rng_key, i))
            below, equal = new < y, new == y
            if (censored := censored_of(fn)) is not None:
                equal = jnp.where(censored, new >= y, equal)  # any longer time may have been the one that was cut off
        found[output.name] = below, equal, log_predictive(fn, y)
    return found


def _observed(sites: Trace, layout: Layout) -> dict[str, tuple[Array, Array]]:
    """Observations, and which of their entries are not masked."""
    observed = {o.name: (sites[o.site]["value"], mask_of(sites[o.site]["fn"])) for o in layout.outputs}
    return {
        name: (y, jnp.broadcast_to(True if mask is None else mask, jnp.shape(y)))
        for name, (y, mask) in observed.items()
    }


def _calibration(
    below: Array | None, equal: Array | None, log_density: Array, mask: Array, rng_key: PRNGKey
) -> Calibration:
    kept = np.asarray(mask, bool)
    average = np.asarray(logsumexp(log_density, axis=0) - np.log(len(log_density)), float)
    average = average[kept.any(tuple(range(average.ndim, kept.ndim)))]  # axes of the event, if any, are the last
    if below is None or equal is None:
        return Calibration(average, None)
    tie = jax.random.uniform(rng_key, below.shape[1:])
    pit = np.asarray(below.mean(0) + tie * equal.mean(0), float)
    return Calibration(average, pit[kept])
