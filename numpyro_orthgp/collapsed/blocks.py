r"""Regression on rows that come block by block: q(u) given all of them, in one pass.

With Gaussian noise the best q(u) depends on the rows only by the sums :math:`A S^{-1} A^\top` and :math:`A S^{-1} y`. They are
added up block by block, so memory does not grow with the number of rows. The result is that of ``CollapsedGP.posterior``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.collapsed.bounds import Statistics
from numpyro_orthgp.collapsed.distribution import CollapsedGP
from numpyro_orthgp.errors import check_floating, check_integer, no_function
from numpyro_orthgp.foreign import KnownTables, check_labels_of_tables, refuse_other_order, without_mask
from numpyro_orthgp.functions.function import GPFunction
from numpyro_orthgp.inducing import Feature
from numpyro_orthgp.types import Array, ArrayLike, KernelLike

__all__ = ["RowSums", "from_blocks", "sums_of_blocks"]

BLOCK = 16_384  # rows that are computed at once


def from_blocks(
    kernel: KernelLike,
    inducing: ArrayLike | Feature,
    noise_scale: ArrayLike,
    blocks: Iterable[tuple[ArrayLike, ArrayLike]],
    *,
    jitter: float | None = None,
    block_size: int = BLOCK,
) -> GPFunction:
    r"""Regression on data that do not fit in memory, with given hyperparameters: the function given all rows, in one pass.

    ::

        blocks = ((file["X"][i : i + size], file["y"][i : i + size]) for i in range(0, N, size))
        f = online.from_blocks(kernel, Z, noise, blocks)

    The function is that of ``CollapsedGP(kernel, X, inducing, noise_scale).posterior(y)`` for all rows together. Each block adds
    to two sums, of M x M and M numbers for each output (Titsias 2025, Eqs. 29-30), which are kept in float64. The cost is
    O(N M^2). Find the hyperparameters before, on a random part of the rows: twenty rows for each inducing point are enough.

    >>> import jax.numpy as jnp
    >>> from numpyro_orthgp import kernels, online
    >>> X = jnp.linspace(0.0, 1.0, 1000)[:, None]
    >>> blocks = ((X[i : i + 100], jnp.sin(6 * X[i : i + 100, 0])) for i in range(0, 1000, 100))
    >>> f = online.from_blocks(kernels.RBF(0.3), X[::100], 0.1, blocks)
    >>> print(f(jnp.array([[0.25]])).mean.round(2))
    [1.]

    :param kernel: covariance function, with fixed hyperparameters.
    :param inducing: inducing points, shape (M, D), or other inducing variables; one set or several.
    :param noise_scale: standard deviation of the noise, a scalar, or shape (1, D) for D outputs.
    :param blocks: pairs of inputs, shape (B, D), and outputs, shape (B,) or (B, number of outputs). B may differ.
    :param jitter: relative jitter, as for :func:`~numpyro_orthgp.gp`.
    :param block_size: number of rows that are computed at once. Blocks are cut, or put together, to this size.
    :raises TypeError: if a block is no pair, or its dtype is not that of ``inducing``.
    :raises ValueError: if there are no rows, for NaN or infinite numbers, if shapes do not match, or if tables have their rows or
        columns in different orders.
    """
    make = partial(CollapsedGP, kernel, inducing=inducing, noise_scale=noise_scale, jitter=jitter)
    tables = KnownTables.of(inducing)
    return replace(sums_of_blocks(make, blocks, block_size, tables).function(), tables=tables)


@dataclass(frozen=True)
class RowSums:
    """The sums over all rows that came.

    :param one: the distribution of one block; it holds the hyperparameters.
    :param y: outputs of that block.
    :param sums: the sums, float64; those of y minus a mean in ``sums.offset``, if there is one.
    :param num_rows: number of rows.
    """

    one: CollapsedGP
    y: Array
    sums: Statistics
    num_rows: int

    def function(self, noise_factor: float = 1.0) -> GPFunction:
        """The function given all rows.

        :param noise_factor: factor of the standard deviation of the noise. The sums scale with it, so no further pass is needed.
        """
        if self.sums.offset is not None and noise_factor != 1:
            raise ValueError("`noise_factor` needs sums of float64.")
        scale, dtype = noise_factor**-2, self.y.dtype
        sums = self.sums._replace(gram=scale * self.sums.gram, product=scale * self.sums.product)
        return self.one._posterior(self.y, jax.tree.map(lambda a: jnp.asarray(a, dtype), sums))


def sums_of_blocks(
    make: Callable[..., CollapsedGP],
    blocks: Iterable[tuple[ArrayLike, ArrayLike]],
    block_size: int = BLOCK,
    tables: KnownTables | None = None,
) -> RowSums:
    """The sums that :func:`from_blocks` needs.

    :param make: from inputs ``X`` and a mask ``observed`` of rows to the distribution of a block.
    :param tables: columns of tables that blocks should have in the same order; those of blocks are added.
    """
    check_integer("block_size", block_size)
    if not isinstance(blocks, Iterable):
        raise TypeError(f"`blocks` must be an iterable of pairs (X, y), such as a generator; got {no_function(blocks)}")
    num_rows, last, total, offset = 0, None, None, None
    for X, y in _cut(blocks, block_size, KnownTables() if tables is None else tables):
        seen, padding = np.arange(block_size) < len(y), [(0, block_size - len(y))]
        rows = jnp.asarray(np.pad(X, [*padding, (0, 0)], mode="edge"))
        outputs = jnp.asarray(np.pad(y, padding + [(0, 0)] * (y.ndim - 1)))
        last = make(X=rows, observed=seen), outputs
        sums = last[0]._sums(outputs, offset)
        offset = sums.offset
        here = jax.tree.map(lambda a: np.asarray(a, np.float64), sums._replace(offset=None))
        total = here if total is None else jax.tree.map(np.add, total, here)
        num_rows += len(y)
    if last is None or total is None:
        raise ValueError("`blocks` had no rows. It must yield pairs of inputs, shape (B, D), and outputs, shape (B,).")
    return RowSums(*last, total._replace(offset=offset), num_rows)


def _cut(blocks: Iterable[Any], size: int, tables: KnownTables) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same rows in blocks of one size; the last one may be shorter."""
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    num = 0
    for block in blocks:
        X, y = _pair(block, tables)
        if waiting and (X.shape[1:], y.shape[1:]) != (waiting[0][0].shape[1:], waiting[0][1].shape[1:]):
            raise ValueError(
                f"All blocks must have the same columns; one has X {X.shape} and y {y.shape} after X {waiting[0][0].shape} and y "
                f"{waiting[0][1].shape}."
            )
        num += len(y)
        if num >= size:
            X, y = (np.concatenate(parts) for parts in zip(*waiting, (X, y), strict=True))
            whole = num - num % size
            yield from ((X[i : i + size], y[i : i + size]) for i in range(0, whole, size))
            X, y, waiting, num = X[whole:], y[whole:], [], num - whole
        waiting.append((X.copy(), y.copy()))  # a reader may fill the same arrays again
    if num:
        X, y = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        yield X, y


def _pair(block: Any, tables: KnownTables) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(block, tuple | list) or len(block) != 2:
        raise TypeError(f"`blocks` must yield pairs (X, y) of arrays; got {type(block).__name__}.")
    check_labels_of_tables(("X", "y"), block)
    refuse_other_order(block[0], tables)
    remedy = "Leave out such rows: blocks may have any number of rows."
    named = zip(("X", "y"), block, strict=True)
    X, y = (_real(name, np.asarray(without_mask(f"{name} of a block", array, remedy))) for name, array in named)
    if X.ndim != 2 or y.ndim not in (1, 2) or len(X) != len(y):
        raise ValueError(
            f"A block must have X of shape (B, D) and y of shape (B,) or (B, number of outputs); got {X.shape} and {y.shape}."
        )
    for name, array in (("X", X), ("y", y)):
        if not np.isfinite(array).all():
            raise ValueError(
                f"`{name}` of a block holds NaN or infinite numbers. Leave out such rows: blocks may have any number of rows."
            )
    return X, y


def _real(name: str, array: np.ndarray) -> np.ndarray:
    is_real = array.dtype.kind == "f" and array.dtype.itemsize <= 8
    return array if is_real else np.asarray(check_floating(f"{name} of a block", array))
