"""Compiled programs applied to any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.math.compiled import quick_jit

__all__ = ["BLOCKS", "in_blocks", "moments"]

BLOCKS = (16, 128, 1024)  # rows per block


def in_blocks(program: Callable[..., Any], given: Any, *rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Apply a compiled program to any number of rows, also none. Blocks have one of three sizes, so at most three programs are
    compiled.

    :param program: maps ``given`` and blocks of rows to a tuple of arrays, with one entry or row for each row.
    """
    parts, first, num = [], 0, len(rows[0])
    if not num:  # the program says which arrays there are
        empty = [np.zeros((BLOCKS[0], *r.shape[1:]), r.dtype) for r in rows]
        return tuple(np.asarray(a)[:0] for a in program(given, *map(jnp.asarray, empty)))
    while first < num:
        size = next((b for b in BLOCKS if num - first <= b), BLOCKS[-1])
        here = [r[first : first + size] for r in rows]
        padded = [np.concatenate([r, np.repeat(r[:1], size - len(r), axis=0)]) for r in here]
        parts.append([np.asarray(a)[: len(here[0])] for a in program(given, *map(jnp.asarray, padded))])
        first += size
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _mean_and_variance(f: Any, X: Any) -> tuple[Any, Any]:
    marginals = f(X)
    return marginals.mean, marginals.variance


_moments = quick_jit(_mean_and_variance, 1)


def moments(f: Any, X: np.ndarray) -> tuple[np.ndarray, ...]:
    """Means and variances of a function at any number of inputs."""
    return in_blocks(_moments, f, X)
