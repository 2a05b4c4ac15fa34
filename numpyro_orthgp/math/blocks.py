"""Work on many rows, done block by block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_orthgp.types import Array

__all__ = ["CACHED_ENTRIES", "MAX_ENTRIES", "map_blocks", "sum_blocks"]

# Kernel values held at once. Blocks that stay in a processor's cache are written and read again faster than large ones;
# accelerators, for which each block is a launch, like them large. 2^20 serves both.
MAX_ENTRIES = 2**20

# Where elementwise work is nearly all there is, blocks that the caches nearest to a processor hold are four times as fast.
CACHED_ENTRIES = 2**18


def map_blocks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """``function(rows)``, computed for ``size`` rows at a time, and again for the gradient, so that memory is that of a block.

    :param function: takes rows (b, ...) to arrays (b, ...), each row for itself.
    :param rows: an array of shape (B, ...), or several in a pytree.
    """
    B = _num_rows(rows)
    if size >= B:
        return function(rows)
    num, size = _split(B, size)
    fill = jax.tree.map(lambda X: X[: num * size - B], rows)
    values = lax.map(jax.checkpoint(function, prevent_cse=False), _blocks(rows, fill, num))
    return jax.tree.map(lambda v: v.reshape(num * size, *v.shape[2:])[:B], values)


def sum_blocks(function: Callable[[Any], Array], rows: Any, size: int) -> Array:
    """``function(rows)``, a sum over rows to which rows of zeros add nothing, ``size`` rows at a time like :func:`map_blocks`."""
    B = _num_rows(rows)
    if size >= B:
        return function(rows)
    num, size = _split(B, size)
    fill = jax.tree.map(lambda X: jnp.zeros((num * size - B, *X.shape[1:]), X.dtype), rows)
    blocks = _blocks(rows, fill, num)

    @partial(jax.checkpoint, prevent_cse=False)
    def add(total: Array, block: Any) -> tuple[Array, None]:
        return total + function(block), None

    first = jax.eval_shape(function, jax.tree.map(lambda X: X[0], blocks))
    return lax.scan(add, jnp.zeros(first.shape, first.dtype), blocks)[0]


def _num_rows(rows: Any) -> int:
    return jax.tree.leaves(rows)[0].shape[0]


def _split(num_rows: int, size: int) -> tuple[int, int]:
    """Number and size of blocks, as equal as can be."""
    num = -(-num_rows // max(size, 1))
    return num, -(-num_rows // num)


def _blocks(rows: Any, fill: Any, num: int) -> Any:
    """Rows, and what fills the last block, cut into blocks: (num, size, ...)."""
    return jax.tree.map(lambda X, Y: jnp.concatenate([X, Y]).reshape(num, -1, *X.shape[1:]), rows, fill)
