"""Checks of the arguments of likelihoods, and conversions of labels and counts to real numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_orthgp.errors import Unobserved, inspect
from numpyro_orthgp.functions.arithmetic import broadcasts
from numpyro_orthgp.functions.callers import is_latent_of_guide, who_asks
from numpyro_orthgp.functions.plates import refuse_other_rows
from numpyro_orthgp.likelihoods.wrapped import no_cdf
from numpyro_orthgp.types import Array, PRNGKey

__all__ = [
    "FRACTION", "INCREASING", "OPEN_FRACTION", "POSITIVE", "WHOLE", "Allowed", "ToldOfCallers", "check_allowed",
    "check_broadcasts", "check_censored", "check_variances", "draw_given", "moment_of", "real", "refused_as_latent", "signs",
]  # fmt: skip


class Allowed(NamedTuple):
    """A set of values: its description, and a test of which entries of an array lie in it."""

    words: str
    holds: Callable[[np.ndarray], np.ndarray]


POSITIVE = Allowed("positive", lambda x: x > 0)
FRACTION = Allowed("at least 0 and less than 1", lambda x: (x >= 0) & (x < 1))
OPEN_FRACTION = Allowed("between 0 and 1", lambda x: (x > 0) & (x < 1))
WHOLE = Allowed("whole and not negative", lambda x: (x >= 0) & (x == np.floor(x)))
INCREASING = Allowed("finite and increasing", lambda x: np.isfinite(x) & _above_previous(x))


def _above_previous(x: np.ndarray) -> np.ndarray:
    return np.append(True, x[1:] > x[:-1]) if x.size and x.ndim == 1 else np.ones(x.shape, bool)


def check_allowed(name: str, value: Array, allowed: Allowed) -> Array:
    """Return ``value``. If it is concrete, all entries must be allowed (NaN never is).

    :raises ValueError: if an entry is not allowed. The message shows the first one.
    """
    inspect(partial(_refuse_others, name, allowed), value)
    return value


def _refuse_others(name: str, allowed: Allowed, value: Array) -> None:
    values = np.asarray(value)
    bad = ~allowed.holds(values)
    if bad.any():
        raise ValueError(f"`{name}` must be {allowed.words}; got a value of {values[bad].flat[0]}.")


def check_variances(m: Any) -> None:
    """Check that marginals, which a user may have made, have variances of the shape of their means.

    :raises ValueError: if they have another shape, with which a loss would count each row many times, or are no arrays.
    """
    for name in ("mean", "explained", "residual"):
        shape = getattr(value := getattr(m, name), "shape", None)
        if shape is None:
            raise ValueError(f"`{name}` of Marginals must be an array; got a {type(value).__name__}.")
        if m.mixing is None and not broadcasts(shape, m.own_shape, m.lead):
            raise ValueError(f"`{name}` of Marginals must have the shape of `mean`, {m.own_shape}; got {shape}.")


def check_censored(censored: Any, shape: tuple[int, ...], lead: int = 0) -> Array | None:
    """Return which outputs are censored, as a boolean array.

    :raises TypeError: if ``censored`` is not boolean. Event indicators, which mean the opposite, usually are not.
    :raises ValueError: if ``censored`` does not broadcast to the ``shape`` of f(X).
    """
    if censored is None:
        return None
    censored = jnp.asarray(censored)
    if censored.dtype != bool:
        raise TypeError(
            f"`censored` must be boolean, True where only y > value is known; got {censored.dtype}. If it holds 1 for an "
            "event that was seen, give `event == 0`."
        )
    return check_broadcasts("censored", censored, shape, lead)


def check_broadcasts(name: str, value: Array, shape: tuple[int, ...], lead: int = 0) -> Array:
    """Return ``value`` if it broadcasts to the ``shape`` of f(X), apart from leading enumeration axes.

    :raises ValueError: otherwise.
    """
    if not broadcasts(value.shape, shape, lead):
        hint = f" One for each point has shape {(shape[0], 1)}." if value.shape == shape[:1] else ""
        raise ValueError(f"`{name}` must broadcast to the shape {shape} of f(X); got {value.shape}.{hint}")
    return value


def real(y: Array, dtype: Any) -> Array:
    """Integer labels or counts as real numbers. Unsigned ones would wrap around, and results would have the default dtype."""
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(dtype)


def signs(y: Array, dtype: Any) -> Array:
    """Labels 0 and 1 to -1 and 1."""
    return 2 * real(y, dtype) - 1


def moment_of(given: dist.Distribution, which: str) -> Array:
    """The mean or variance of y given f.

    :raises ValueError: if NumPyro does not know it.
    """
    message = (
        f"{type(given).__name__}, the distribution of y given f, has no {which} that NumPyro knows. Average draws of y, "
        "fn.sample(rng_key, (1000,)), or take their quantiles; of classes average probabilities."
    )

    def refuse(values: Any) -> None:
        if np.isnan(values).all():
            raise ValueError(message)

    try:
        values = getattr(given, which)
    except NotImplementedError as error:
        raise ValueError(message) from error
    inspect(refuse, values)
    return values


def draw_given(given: dist.Distribution, key: PRNGKey) -> Array:
    """A draw of y given f.

    :raises ValueError: if NumPyro knows only its density.
    """
    try:
        return given.sample(key)
    except NotImplementedError as error:
        raise ValueError(
            f"{type(given).__name__}, the distribution of y given f, has no draws that NumPyro knows. Predictive, to_arviz and "
            "check(held_out=) need them. Define its `sample(key, sample_shape)`. Without it to_arviz takes "
            "posterior_predictive=False, and log_predictive gives densities of y."
        ) from error


def refused_as_latent(support: Callable[[Any], Any]) -> property:
    """The support of a likelihood, which is refused to guides of NumPyro that would draw its y.

    :param support: the method of a class.
    """

    @wraps(support)
    def refused(self: Any) -> Any:
        if is_latent_of_guide():
            raise Unobserved(
                f"A site with the likelihood {type(self).__name__} of numpyro_orthgp is not observed, so this guide of NumPyro "
                "would draw its values. But its log density is an expectation, and no prior of a latent site. Pass observations, "
                "obs=y, with handlers.mask where some are missing; obs_mask= needs AutoSparseGP. A latent site between f and y "
                "needs a distribution of NumPyro: numpyro.sample('z', dist.Normal(f(X).sample(), s))."
            )
        return support(self)

    return property(refused)


class ToldOfCallers(dist.Distribution):
    """A distribution of rows that knows who asks for its batch shape: what follows would fail in words of JAX."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        asking = who_asks()
        if asking == "plate":
            refuse_other_rows(self._batch_shape)
        if asking == "censored":
            no_cdf(self, 0.0)
        return self._batch_shape
