"""Argument checks for all initial values: counts in range, and no more rows than can be handled."""

from __future__ import annotations

import operator
from typing import Any

from jax import random

from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["check_count", "subset"]


def check_count(name: str, value: Any, N: int | None) -> None:
    """Raise an error unless ``value`` is an integer from 1 to ``N`` (no upper limit if ``None``)."""
    try:
        count = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"`{name}` must be an integer; got {value!r} of type {kind}.") from None
    if N is None and count < 1:
        raise ValueError(f"`{name}` must be at least 1; got {count}.")
    if N is not None and not 1 <= count <= N:
        raise ValueError(f"`{name}` must be between 1 and N = {N}, the number of rows of `X`; got {count}.")


def subset(X: Array, size: int, rng_key: PRNGKey | None) -> Array:
    """``X``, or, if it has more than ``size`` rows, ``size`` of them drawn without replacement."""
    if X.shape[0] <= size:
        return X
    key = random.key(0) if rng_key is None else rng_key
    return X[random.choice(key, X.shape[0], (size,), replace=False)]
