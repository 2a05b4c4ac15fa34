"""Finds likelihoods inside NumPyro's wrappers: masks, ``to_event``, expansions by plates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.handlers import block
from numpyro.infer import ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.errors import Unobserved, check_key, is_concrete, refuse_rounded
from numpyro_orthgp.foreign import as_outputs
from numpyro_orthgp.functions.callers import is_calling
from numpyro_orthgp.functions.plates import at_another_axis
from numpyro_orthgp.types import Array, ArrayLike, PRNGKey

# Advice about masked arrays.
MASK = (
    "Pass y.filled(0.0) and say which are there: numpyro.sample(..., obs=y, obs_mask=mask), or numpyro.handlers.mask."
)

# How a distribution of NumPyro's around a likelihood is read as a likelihood of this package, by its type.
READ_AS: dict[type, Callable[[Any], Any]] = {}

__all__ = [
    "MASK", "READ_AS", "check_observed", "hint_of_mixture", "hint_of_shape", "is_expected", "key_of_draw", "log_predictive",
    "no_cdf", "refuse_outer_product", "refuse_outside", "unwrap",
]  # fmt: skip


def no_cdf(self: Any, value: ArrayLike) -> Array:
    """
    :raises NotImplementedError: always. The log of an average of probabilities, which NumPyro would make of it, is no bound.
    """
    raise NotImplementedError(
        f"{type(unwrap(self)[0]).__name__} has no cdf: f is integrated out of log densities. For censored or truncated outputs "
        "integrate over the whole: numpyro_orthgp.Likelihood(f(X), lambda f: dist.RightCensoredDistribution(dist.Normal(f, scale), "
        "censored)); Weibull, Gamma, LogNormal and Exponential take `censored`."
    )


def hint_of_mixture() -> str:
    """A sentence for errors about shapes, if a mixture of NumPyro's asks a likelihood for log densities; else nothing."""
    return (
        (
            " A mixture of NumPyro's asks for this density. Let one likelihood average over the mixture: "
            "numpyro_orthgp.Likelihood(f(X), lambda f: dist.MixtureSameFamily(weights, dist.Normal(f, scale))), with f of shape "
            "(B, P) for P components of their own, or f[..., None] for a function that they share."
        )
        if is_calling("_MixtureBase", "log_prob")
        else ""
    )


def hint_of_shape(y: tuple[int, ...], rows: tuple[int, ...]) -> str:
    """A sentence for errors about a y whose shape is not that of its likelihood; nothing, if there is none to say.

    :param y: the shape of y.
    :param rows: that of the likelihood's batch and event.
    """
    if y == (*rows, 1):
        return " Did you mean y[:, 0]?"
    if len(rows) == 1 and y[:-1] == rows:
        return (
            f" Several y for each row of one function have an axis in front, y.T of shape {(y[-1], *rows)}, and a plate of "
            f"{y[-1]} with dim=-2; {y[-1]} functions are gp(..., num_latents={y[-1]})."
        )
    return ""


def is_expected(fn: Any) -> bool:
    """Whether a site's distribution, without masks and other wrappers, is a likelihood of this package."""
    return getattr(unwrap(fn)[0], "integrates_function", False)


def log_predictive(fn: Any, y: ArrayLike) -> Array:
    """``log_predictive`` of a site's likelihood, with any wrappers; for other distributions ``log_prob``.

    :return: shape of the batch; zero where masked.
    :raises TypeError: for a distribution of NumPyro's that combines likelihoods of this package, such as a mixture.
    """
    fn = _read(fn)
    if not is_expected(fn):
        _refuse_averages(fn)
        return fn.log_prob(y)
    if isinstance(fn, dist.MaskedDistribution):
        return _log_predictive_masked(fn, jnp.asarray(y))
    if isinstance(fn, dist.Independent):
        values = log_predictive(fn.base_dist, y)
        return values.sum(tuple(range(values.ndim - fn.reinterpreted_batch_ndims, values.ndim)))
    if isinstance(fn, dist.ExpandedDistribution):
        values = log_predictive(fn.base_dist, y)
        return jnp.broadcast_to(values, jnp.broadcast_shapes(values.shape, fn.batch_shape))
    return fn.log_predictive(y)


def _refuse_averages(fn: Any) -> None:
    leaves = jax.tree.leaves(fn, is_leaf=is_expected)
    inner = next((type(unwrap(leaf)[0]).__name__ for leaf in leaves if is_expected(leaf)), None)
    if inner is not None:
        raise TypeError(
            f"The predictive density of {type(fn).__name__} around {inner} is not known: the likelihood averages over f before "
            f"{type(fn).__name__} combines densities. Let ogp.Likelihood average the whole: Likelihood(f(X), lambda f: "
            f"dist.{type(fn).__name__}(...)), with a distribution of numpyro given f in the place of {inner}."
        )


def _log_predictive_masked(fn: dist.MaskedDistribution, y: Array) -> Array:
    if isinstance(fn._mask, bool):
        values = log_predictive(fn.base_dist, y) if fn._mask else jnp.zeros(y.shape[: y.ndim - fn.event_dim])
        return jnp.broadcast_to(values, jnp.broadcast_shapes(values.shape, fn.batch_shape))
    # As NumPyro does for `log_prob`: a masked entry may be no valid output, and its derivatives may be NaN.
    with suppress(NotImplementedError):
        allowed = fn.support.feasible_like(y)
        y = jnp.where(fn._mask.reshape(fn._mask.shape + (1,) * fn.event_dim), y, allowed)
    return jnp.where(fn._mask, log_predictive(fn.base_dist, y), 0.0)


def check_observed(name: str, fn: Any, value: Any) -> bool:
    """:meth:`~numpyro_orthgp.likelihoods.ExpectedLikelihood.check` for an observed site, with any wrappers.

    :return: whether its values, and masks, were known.
    """
    likelihood, mask = unwrap(fn)
    if not (is_expected(likelihood) and hasattr(likelihood, "check")):
        return is_concrete(value)
    y = as_outputs(name, value, MASK)
    likelihood.check(y, name, mask)
    return all(map(is_concrete, jax.tree.leaves((y, mask, likelihood.support))))


def key_of_draw(key: PRNGKey | None) -> PRNGKey:
    """The random key of a draw of y.

    :raises ValueError: if there is none; and in the model of a fit, whose sites are observed or drawn by the guide.
    """
    hidden = any(isinstance(handler, block) for handler in _PYRO_STACK)  # a model within the model, as of `posterior`
    if is_calling(ELBO) and not (hidden or is_calling(AutoGuide)):  # guides draw outputs that are hidden by `obs_mask`
        raise Unobserved(
            "A site with a likelihood of numpyro_orthgp is neither observed nor drawn by the guide, and this is a fit: its log "
            "density is an expectation, so it is no prior of a latent site. Pass its observations, obs=y, with obs_mask= or "
            "handlers.mask where some are missing. A latent site between f and y needs a distribution of NumPyro: "
            "numpyro.sample('z', dist.Normal(f(X).sample(), s))."
        )
    return check_key(key, "likelihoods")


def refuse_outer_product(name: str, message: Mapping[str, Any]) -> None:
    """Refuse observations whose distribution, values and masks broadcast to more entries than those have, outside of plates.

    :param message: the message of an observed site.
    :raises ValueError: for a y of shape (N, 1) beside a distribution of batch shape (N,), for example; for shapes that do not
        broadcast.
    """
    _refuse_other_shape(name, message["fn"], np.shape(message["value"]))
    inner, masks, fn = message["fn"], [], message["fn"]
    while isinstance(inner, (dist.MaskedDistribution, dist.ExpandedDistribution, dist.Independent)):
        if isinstance(inner, dist.MaskedDistribution) and inner.event_dim == fn.event_dim:
            masks.append(np.shape(inner._mask))
        inner = inner.base_dist
    made = fn.event_dim - inner.event_dim  # axes of rows that `to_event` has made axes of an event
    value = np.shape(message["value"])
    shapes = [("its distribution", inner.batch_shape), ("its value", value[: len(value) - inner.event_dim])]
    shapes += [("a mask", (*mask, *(1,) * made)) for mask in masks]
    together = np.broadcast_shapes(*(shape for _, shape in shapes))
    plates = {frame.dim - made for frame in message["cond_indep_stack"]}
    outside = {dim: n for dim, n in enumerate(together, -len(together)) if n > 1 and dim not in plates}
    rows = {size: dim + made for dim, size in outside.items() if dim < -made}
    for frame in message["cond_indep_stack"]:
        dim = frame.dim - made
        if frame.size in rows and (dim < -len(together) or together[dim] == 1):
            words = at_another_axis(frame.size, rows[frame.size], frame.dim, frame.name)
            raise ValueError(f"`{name}` counts each of its observations {words}")
    if outside and math.prod(together) > max(math.prod(shape) for _, shape in shapes[:2]):
        listed = ", ".join(f"{what} {shape}" for what, shape in shapes)
        raise ValueError(
            f"`{name}` counts each of its observations with each of the rows: {listed} broadcast to {together}. Give them one "
            "shape: y[:, 0] for a y of shape (N, 1)."
        )


def _refuse_other_shape(name: str, fn: Any, value: tuple[int, ...]) -> None:
    try:
        np.broadcast_shapes(fn.batch_shape, value[: len(value) - fn.event_dim])
    except ValueError as error:
        raise ValueError(
            f"`{name}` has shape {value}, and its distribution batch shape {fn.batch_shape} and event shape {fn.event_shape}. Each "
            "plate is an axis of the batch; rows that to_event has made an event have no plate of their own."
        ) from error


def unwrap(fn: Any) -> tuple[Any, Any]:
    """The distribution inside masks, expansions and ``to_event``, and the combined mask, True without masks."""
    masks: list[tuple[Any, int]] = []
    while isinstance(fn := _read(fn), (dist.MaskedDistribution, dist.Independent, dist.ExpandedDistribution)):
        if isinstance(fn, dist.MaskedDistribution):
            masks.append((fn._mask, fn.event_dim))
        fn = fn.base_dist
    mask: Any = True
    for each, event_dim in masks:
        if np.ndim(each):  # a mask of events covers all their entries
            each = each.reshape(each.shape + (1,) * (event_dim - fn.event_dim))
        mask = each if mask is True else mask & each
    return fn, mask


def _read(fn: Any) -> Any:
    read = READ_AS.get(type(fn))
    return fn if read is None else read(fn)


def refuse_outside(likelihood: str, name: str, support: Any, y: Any, mask: Any) -> None:
    """
    :raises ValueError: if unmasked observations are outside the support, or whole numbers that stand for real ones and would be
        rounded. The message shows the first one.
    """
    y = np.asarray(y)
    inside = np.asarray(support(y))
    mask = np.asarray(mask).reshape(
        np.shape(mask) + (1,) * max(inside.ndim - np.ndim(mask), 0) if np.ndim(mask) else ()
    )
    if y.dtype.kind in "iu" and not support.is_discrete:
        refuse_rounded(name, np.where(mask, y, 0))
    bad = ~inside & mask
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        example = y[first]
        hint = " Labels are 0 and 1: use (y + 1) / 2 for labels -1 and 1." if likelihood == "Bernoulli" else ""
        hint = (
            " Mask missing outputs: numpyro.handlers.mask, with any allowed value in their place."
            if np.isnan(example).any()
            else hint
        )
        raise ValueError(
            f"`{name}` must lie in the support of {likelihood} ({support}); got {example} at {first}, "
            f"{int(bad.sum())} in all.{hint}"
        )
