"""Work on many rows, done block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["MAX_ENTRIES", "map_blocks"]

# Kernel values held at once. Blocks that stay in a processor's cache are written and read again faster than large ones;
# accelerators, for which each block is a launch, like them large. 2^20 serves both.
MAX_ENTRIES = 2**20


def map_blocks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """``function(rows)``, computed for ``size`` rows at a time, and again for the gradient, so that memory is that of a block.

    :param function: takes rows (b, ...) to arrays (b, ...), each row for itself.
    :param rows: an array of shape (B, ...), or several in a pytree.
    """
    B = jax.tree.leaves(rows)[0].shape[0]
    if size >= B:
        return function(rows)
    num = -(-B // max(size, 1))
    size = -(-B // num)
    blocks = jax.tree.map(lambda X: jnp.concatenate([X, X[: num * size - B]]).reshape(num, size, *X.shape[1:]), rows)
    values = lax.map(jax.checkpoint(function, prevent_cse=False), blocks)
    return jax.tree.map(lambda v: v.reshape(num * size, *v.shape[2:])[:B], values)
