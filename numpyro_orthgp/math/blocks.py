"""Work on many rows, done block by block.

Predictions at many inputs are worked on in blocks of ``MAX_ENTRIES`` values of A, and covariances with mean-only points in
blocks of as many. Each block is computed again for the gradient: on CPUs arrays that leave the caches cost more than computing
them twice. While fitting, ``f(X)`` takes a batch at once, since it may be divided among devices. What costs more to compute
than to hold is kept (:func:`keep`): sums of a block, and the projections of a collapsed bound where all rows have no more than
``MAX_KEPT`` values of them (``collapsed/sums.py``).

A block is not a stretch of rows but every so many-th one. So it has rows of all devices where rows are divided among these: each
works on its own, and only sums travel. Stretches would be gathered, as all devices work on the same block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from numpyro_orthgp.types import Array

__all__ = ["MAX_ENTRIES", "keep", "map_blocks", "sum_blocks"]

# Kernel values held at once. Blocks that stay in a processor's cache are written and read again faster than large ones;
# accelerators, for which each block is a launch, like them large. 2^20 serves both.
MAX_ENTRIES = 2**20

_SMALL, _LARGE = "numpyro_orthgp.small", "numpyro_orthgp.large"


def keep(value: Array, *, large: bool = False) -> Array:
    """Say in a function of blocks that this value is to be kept for the gradient rather than computed again.

    :param large: as large as the blocks themselves: kept only if :func:`sum_blocks` is told so.
    """
    return checkpoint_name(value, _LARGE if large else _SMALL)


def _checkpoint(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    policy = jax.checkpoint_policies.save_only_these_names(_SMALL, *names)
    return jax.checkpoint(function, prevent_cse=False, policy=policy)


def map_blocks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """``function(rows)``, computed for ``size`` rows at a time, and again for the gradient, so that memory is that of a block.

    :param function: takes rows (b, ...) to arrays (b, ...), each row for itself.
    :param rows: an array of shape (B, ...), or several in a pytree.
    """
    B = _num_rows(rows)
    if _fit(B, size):
        return function(rows)
    values = lax.map(_checkpoint(function), _blocks(rows, size))
    return jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1).reshape(-1, *v.shape[2:])[:B], values)


def sum_blocks(
    function: Callable[[Any, Array], Any], rows: Any, weights: Array, size: int, *, keep_large: bool = False
) -> Any:
    """``function(rows, weights)``, a sum over rows, computed for ``size`` rows at a time like :func:`map_blocks`.

    :param function: takes rows (b, ...) and their weights to arrays to which rows with weights of zero add nothing.
    :param rows: an array of shape (B, ...), or several in a pytree.
    :param weights: shape (B, ...).
    :param keep_large: keep for the gradient what the function says is large, too; memory is then that of all blocks.
    """
    B = _num_rows(rows)
    if _fit(B, size):
        return function(rows, weights)
    blocks = _blocks(rows, size), _blocks(weights, size, weigh_nothing=True)
    # The sum stays outside of what is checkpointed, or every block's running total would be kept for the gradient.
    one = _checkpoint(function, *([_LARGE] if keep_large else []))
    shapes = jax.eval_shape(function, *jax.tree.map(lambda block: block[0], blocks))

    def add(sums: tuple[Any, Any], block: tuple[Any, Array]) -> tuple[tuple[Any, Any], None]:
        pairs = jax.tree.map(_add, *sums, one(*block))
        return jax.tree.transpose(jax.tree.structure(shapes), jax.tree.structure((0, 0)), pairs), None

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.scan(add, (zeros, zeros), blocks)[0][0]


def _add(total: Array, lost: Array, value: Array) -> tuple[Array, Array]:
    """A step of a compensated sum (Kahan 1965): the total, and what rounding has added to it too much."""
    value = value - lost
    new = total + value
    return new, lax.stop_gradient((new - total) - value)


def _num_rows(rows: Any) -> int:
    return jax.tree.leaves(rows)[0].shape[0]


def _fit(B: Any, size: int) -> bool:
    """Whether all rows are one block; so they are if their number is a symbol (``jax.export``)."""
    return not isinstance(B, int) or B <= size


def _blocks(rows: Any, size: int, *, weigh_nothing: bool = False) -> Any:
    """Rows cut into blocks as equal as can be, (number, size, ...), filled up with real rows, or with zeros."""
    B = _num_rows(rows)
    num = -(-B // max(size, 1))
    missing = -(-B // num) * num - B

    def cut(X: Array) -> Array:
        fill = jnp.zeros_like(X[:missing]) if weigh_nothing else X[:missing]
        filled = jnp.concatenate([X, fill]) if missing else X
        return jnp.swapaxes(filled.reshape(-1, num, *X.shape[1:]), 0, 1)

    return jax.tree.map(cut, rows)
