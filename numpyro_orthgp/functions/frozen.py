"""Runs of a model in which draws of f are constants.

If a site's density still varies with q, the site takes moments of f as numbers. So ``check`` finds sites such as
``numpyro.sample("y", dist.Normal(f(X).mean, s))``, whose density gives no bound.
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
    """Context in which draws have no derivative."""
    token = _frozen.set(True)
    try:
        yield
    finally:
        _frozen.reset(token)


def constant_if_frozen(values: Array) -> Array:
    """``values``, without a derivative inside of :func:`frozen`."""
    return lax.stop_gradient(values) if _frozen.get() else values
