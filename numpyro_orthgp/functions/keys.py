"""Random keys of draws within a model, also in loops of JAX."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import lax
from jax.extend.core import get_opaque_trace_state
from numpyro.primitives import _PYRO_STACK

from numpyro_orthgp.errors import check_is_key
from numpyro_orthgp.functions.callers import without_randomness
from numpyro_orthgp.functions.moved import moving
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["in_loop", "key_in_run", "note_where_seeded", "prng_key"]


def prng_key(*arrays: Any) -> PRNGKey | None:
    """A key from the model's ``seed`` handler; ``None``, without a warning, if there is none, or it is the same each time.

    Within ``lax.scan``, ``jax.vmap`` and similar, all steps or rows would get the same key, and the handler's next key would be an
    array of the loop. There the handler's key stays unchanged, and ``arrays`` distinguish steps and rows.

    :param arrays: arrays, or pytrees of them, that differ between steps and rows, such as inputs.
    """
    within = in_loop()
    if without_randomness():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if within is None:
            return numpyro.prng_key()
        kept = [(h, h.rng_key) for h in _PYRO_STACK if isinstance(h, numpyro.handlers.seed)]
        rng_key = numpyro.prng_key()
        for h, key in kept:
            h.rng_key = key
    within.calls += 1
    return (
        rng_key if rng_key is None else jax.random.fold_in(jax.random.fold_in(rng_key, within.calls), _digest(arrays))
    )


def key_in_run(names: Any, rng_key: PRNGKey | None, *arrays: Any) -> PRNGKey:
    """The key of a draw, the model's where none is given. In fits a given one is joined with the model's: it may be the same at
    each step, or in two draws, and then noise of the one function would be constant, or the same twice.

    :param names: those of the function that is drawn, if it is known.
    :param arrays: see :func:`prng_key`.
    :raises ValueError: if neither has a key.
    """
    if rng_key is not None:
        check_is_key(rng_key)
        if names is None or not names.in_fit:
            return rng_key
    own = prng_key(*arrays)
    if rng_key is not None:
        return rng_key if own is None else jax.random.fold_in(own, jax.random.bits(rng_key, dtype=jnp.uint32))
    if own is None:
        raise ValueError(
            "`sample()` needs a random key: give `rng_key`, or run the model under numpyro.handlers.seed. Inference that "
            "has no randomness (NUTS) cannot sample f; use a likelihood of numpyro_orthgp, which integrates it out."
        )
    return own


class _Within:
    """The transformations that were active when a ``seed`` handler was entered, and the number of keys made in later ones."""

    def __init__(self, state: Any) -> None:
        self.state, self.calls = state, 0


def in_loop() -> _Within | None:
    """The note of the model's ``seed`` handler, if transformations of JAX have begun since; else ``None``."""
    handler = next((h for h in reversed(_PYRO_STACK) if isinstance(h, numpyro.handlers.seed)), None)
    within: _Within | None = getattr(handler, "_numpyro_orthgp", None)
    return None if within is None or within.state == get_opaque_trace_state() else within


def note_where_seeded() -> None:
    """Note for :func:`prng_key` which transformations of JAX the running model is in."""
    for handler in _PYRO_STACK:
        if isinstance(handler, numpyro.handlers.seed):
            handler._numpyro_orthgp = _Within(get_opaque_trace_state())


def _digest(arrays: Any) -> Array:
    """A number that depends on all bits of all arrays."""
    digest = jnp.zeros((), jnp.uint32)
    if moving():  # where the noise of a row does not depend on the others
        return digest
    for array in map(lax.stop_gradient, jax.tree.leaves(arrays)):
        bits = lax.bitcast_convert_type(array, jnp.uint32) if array.dtype.itemsize > 2 else array.astype(jnp.uint32)
        odd = 2 * lax.iota(jnp.uint32, bits.size) + 1
        digest = 31 * digest + jnp.sum(bits.reshape(-1) * (odd * jnp.uint32(0x9E3779B1)), dtype=jnp.uint32)
    return digest
