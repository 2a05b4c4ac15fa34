"""Settings of JAX within calls for tables, which choose model, optimizer and precision themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from numpyro_orthgp.processes import refuse_fork
from numpyro_orthgp.training.start import one_thread

__all__ = ["fitting", "own_settings"]


@contextmanager
def own_settings() -> Iterator[None]:
    """A context in float64, in which JAX refuses nothing that it is asked to refuse in the caller's code: axes that are added,
    dtypes that are promoted (optax does so), arrays of NumPy that go to a device."""
    refuse_fork()
    with (
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
    ):
        yield


@contextmanager
def fitting() -> Iterator[None]:
    """The same context, for one thread at a time."""
    with one_thread(), own_settings():
        yield
