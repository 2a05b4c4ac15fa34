"""Runs of a model in which draws of f, and expectations over f, are constants.

What still varies with q there takes moments of f as numbers. That is how ``check`` finds sites such as
``numpyro.sample("y", dist.Normal(f(X).mean, s))``, whose density is none that a bound is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jax import lax

from numpyro_orthgp.types import Array

__all__ = ["constant_if_frozen", "frozen"]

_frozen: ContextVar[bool] = ContextVar("frozen", default=False)


@contextmanager
def frozen() -> Iterator[None]:
    """Within it draws and expectations have no derivative."""
    token = _frozen.set(True)
    try:
        yield
    finally:
        _frozen.reset(token)


def constant_if_frozen(values: Array) -> Array:
    """``values``, within :func:`frozen` without a derivative."""
    return lax.stop_gradient(values) if _frozen.get() else values
