"""Argument checks for all initial values: counts in range, and no more rows than can be handled."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from jax import random

from numpyro_orthgp.errors import is_concrete
from numpyro_orthgp.training.arrays import on_disk
from numpyro_orthgp.training.columns import is_lazy, rows_of
from numpyro_orthgp.training.orders import ROUNDS, generator_of, permuted
from numpyro_orthgp.types import Array, PRNGKey

__all__ = ["check_count", "few_rows", "subset"]

MOST_SORTED = 2**18  # rows; JAX sorts them several times


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
    return X if X.shape[0] <= size else X[_drawn(X.shape[0], size, rng_key)]


def few_rows(X: Any, size: int, rng_key: PRNGKey | None) -> Any:
    """Of an array on disk with more than ``size`` rows those that :func:`subset` draws, and no others are read; else ``X``."""
    if not (on_disk(X) or (hasattr(X, "chunks") and is_lazy(X))) or len(X.shape) != 2 or X.shape[0] <= size:
        return X
    rows = np.asarray(_drawn(X.shape[0], size, rng_key))
    order = np.argsort(rows)
    return rows_of(X, rows[order])[np.argsort(order)]


def _drawn(N: int, size: int, rng_key: PRNGKey | None) -> Any:
    """Row numbers, without replacement. Of many rows JAX would sort all; a pseudo-random permutation is asked for these alone."""
    rng_key = random.key(0) if rng_key is None else rng_key
    if N <= MOST_SORTED or not is_concrete(rng_key):
        return random.choice(rng_key, N, (size,), replace=False)
    generator = generator_of(tuple(np.asarray(random.key_data(rng_key)).ravel().tolist()))
    return permuted(np.arange(size), N, generator.integers(0, 2**64, ROUNDS, np.uint64))
