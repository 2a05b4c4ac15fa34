"""Axes that we add on purpose, for those who let JAX refuse to add any: ``jax_numpy_rank_promotion="raise"``.

Parameters of a likelihood go along its points, and points along nodes of an integral; hyperparameters go along inputs. Where that
is so the setting is off, and the user's code around it keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

from numpyro_orthgp.processes import refuse_fork

__all__ = ["broadcasting"]

_F = TypeVar("_F", bound=Callable[..., Any])


def broadcasting(function: _F) -> _F:
    """``function``, within which arrays may get axes in front."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_fork()
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
