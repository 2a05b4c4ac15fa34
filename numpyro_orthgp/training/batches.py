"""Which rows of the data a step sees, and how they are read from host memory.

The rows of all steps are one endless sequence: the numbers 0..N-1 in an order drawn for epoch 0, then in one drawn for epoch 1, and
so on. Step t takes the positions B t to B (t + 1) - 1, so it may span two epochs. Every epoch sees each row exactly once, and
the row at any one position is uniformly distributed, which keeps minibatch losses unbiased. The order of an epoch depends on
nothing but the seed and its number, so any step can be read without those before it.

Orders are drawn by ``numpy.random.Philox``, so a run goes on from any step without replaying those before it, and processes
agree on rows without talking. Batches run over the ends of epochs: a short last batch would either compile again or weigh its
rows more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer

__all__ = ["Batch", "Batches", "as_arguments", "on_disk", "spread"]

# Puts rows on devices, given their shape, dtype, batch axis, and what reads the part of them at an index.
Put = Callable[[tuple[int, ...], Any, int, Callable[[tuple[slice, ...]], np.ndarray]], jax.Array]


class Batch(NamedTuple):
    """
    :param data: rows of the data, as the user gave them.
    :param rows: their numbers, shape (B,).
    """

    data: Any
    rows: jax.Array


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model: a dict is keywords, a tuple is not."""
    return ((), batch) if isinstance(batch, dict) else (tuple(batch), {})


def spread(generator: np.random.Generator, num: int, size: int) -> np.ndarray:
    """All of ``num`` items in a random order in which each ``size`` that follow each other come from as many stretches of them.

    Groups that follow each other are near, and losses of near rows are alike. A batch with one of each stretch has a mean of less
    variance than one of items drawn at random (stratified sampling), and each item still comes once.
    """
    order = generator.permutation(num)
    stretch = np.arange(num) * size // num
    order = order[np.argsort(stretch[order], kind="stable")]  # by stretches, in random order within each
    rank = np.arange(num) - np.searchsorted(stretch, stretch)
    return order[np.lexsort((stretch, rank))]


class Batches:
    """Data in host memory, cut into batches.

    :param data: a tuple or dict of arrays with a first axis of length N; memory maps are read only where rows are needed.
    :param batch_size: B; None or N for all the data at every step, in the order that they have.
    :param seed: words that the orders are drawn from.
    :param group_size: rows that follow each other and stay together, or ``None``.
    :raises TypeError: for data that are not numeric arrays in a tuple or dict.
    :raises ValueError: if first axes differ or are empty, ``batch_size`` is not one of 1..N, or numbers do not fit into the dtype
        that JAX casts them to.
    """

    def __init__(self, data: Any, batch_size: int | None, seed: tuple[int, ...], group_size: int | None = None) -> None:
        if not isinstance(data, (tuple, dict)):
            raise TypeError(
                "`data` must be a tuple of arrays, positional arguments of the model, such as (X, y), or a dict of arrays, its "
                f"keyword arguments, such as {{'X': X, 'y': y}}; got {type(data).__name__}."
            )
        if isinstance(data, dict) and not all(isinstance(key, str) for key in data):
            raise TypeError(f"Keys of `data` are names of the model's arguments; got {list(data)}.")
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(data)
        self.names = ["data" + jax.tree_util.keystr(path) for path, _ in leaves]
        self.arrays = [_as_array(name, leaf) for name, (_, leaf) in zip(self.names, leaves, strict=True)]
        self.dtypes = [jax.dtypes.canonicalize_dtype(a.dtype.newbyteorder("=")) for a in self.arrays]
        self.num_rows = _num_rows(self.names, self.arrays)
        for name, array, dtype in zip(self.names, self.arrays, self.dtypes, strict=True):
            _check_range(name, array, dtype)
        self.batch_size = self.num_rows if batch_size is None else check_integer("batch_size", batch_size)
        if self.batch_size > self.num_rows:
            raise ValueError(
                f"`batch_size` must be at most the number of rows N = {self.num_rows}; got {batch_size}. "
                "For all the data at every step leave it out."
            )
        self.is_full = self.batch_size == self.num_rows
        self.group_size = 1 if group_size is None else check_integer("group_size", group_size)
        if not self.is_full and self.batch_size % self.group_size:
            raise ValueError(
                f"`batch_size` must be a multiple of `group_size`, whole groups; got {self.batch_size} and {self.group_size}."
            )
        # Of an epoch: a short last group would not fit into batches of whole groups.
        self.epoch_rows = self.num_rows // self.group_size * self.group_size
        self.seed = seed
        self._numbers = np.arange(self.num_rows)
        self._orders: dict[int, np.ndarray] = {}

    @property
    def bytes_per_step(self) -> int:
        """Size of one batch."""
        shapes = (a.shape[1:] for a in self.arrays)
        return self.batch_size * sum(int(np.prod(s)) * d.itemsize for s, d in zip(shapes, self.dtypes, strict=True))

    def order(self, epoch: int) -> np.ndarray:
        """All row numbers in the order of an epoch, shape (N,); with groups all but those of a short one."""
        if epoch not in self._orders:
            generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(epoch,))))
            # Two are kept, since steps run over the end of an epoch.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
            self._orders[epoch] = self._groups(generator)
        return self._orders[epoch]

    def _groups(self, generator: np.random.Generator) -> np.ndarray:
        """Whole groups in random order. What is left of the rows takes the place of as many of a random group, or is left out.

        Each row is left out with the same probability, so that losses are unbiased.
        """
        G, N, num = self.group_size, self.num_rows, self.epoch_rows
        order = generator.permutation(num // G) if G == 1 else spread(generator, num // G, self.batch_size // G)
        order = order[:, None] * G + np.arange(G)
        left = N - num
        if left and generator.uniform() < num / N:
            order[generator.integers(len(order)), generator.choice(G, left, replace=False)] = np.arange(num, N)
        return order.ravel()

    def row_numbers(self, step: int, num: int) -> np.ndarray:
        """Rows of ``num`` steps from ``step`` on, shape (num, B)."""
        start, stop = step * self.batch_size, (step + num) * self.batch_size
        parts = []
        while start < stop:
            epoch, first = divmod(start, self.epoch_rows)
            last = min(first + stop - start, self.epoch_rows)
            parts.append(self.order(epoch)[first:last])
            start += last - first
        return np.concatenate(parts).reshape(num, self.batch_size)

    def stacked(self, step: int, num: int, capacity: int, put: Put) -> Batch:
        """Batches of ``num`` steps from ``step`` on, arrays of shape (capacity, B, ...) of which the rest is zeros."""
        rows = self.row_numbers(step, num)

        def read(array: np.ndarray, dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
            wanted = rows[:, index[1]]
            batches = np.zeros((capacity, wanted.shape[1], *array.shape[1:]), dtype)
            batches[:num] = np.take(array, wanted, axis=0)
            return batches

        arrays = [
            put((capacity, self.batch_size, *a.shape[1:]), d, 1, partial(read, a, d))
            for a, d in zip((*self.arrays, self._numbers), (*self.dtypes, np.int32), strict=True)
        ]
        return self._batch(arrays)

    def everything(self, put: Put) -> Batch:
        """All the data, in the order that they have."""
        arrays = [
            put(a.shape, d, 0, lambda index, a=a, d=d: np.asarray(a[index], d))  # type: ignore[misc]
            for a, d in zip((*self.arrays, self._numbers), (*self.dtypes, np.int32), strict=True)
        ]
        return self._batch(arrays)

    def _batch(self, arrays: list[jax.Array]) -> Batch:
        return Batch(jax.tree.unflatten(self.tree, arrays[:-1]), arrays[-1])

    def first(self) -> Any:
        """The data of the first step."""
        rows = slice(None) if self.is_full else self.row_numbers(0, 1)[0]
        return jax.tree.unflatten(
            self.tree, [jnp.asarray(np.asarray(a[rows], d)) for a, d in zip(self.arrays, self.dtypes, strict=True)]
        )


def _as_array(name: str, leaf: Any) -> np.ndarray:
    if not hasattr(leaf, "__array__"):
        raise TypeError(f"`{name}` must be an array; got {type(leaf).__name__}. Convert lists first: np.asarray(...).")
    if np.ma.is_masked(leaf):
        raise TypeError(
            f"`{name}` is a masked array with entries missing, which a model cannot see. Pass array.filled(...) and the mask as an "
            "array of its own, for numpyro.handlers.mask."
        )
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise TypeError(f"`{name}` must hold numbers; got an array of {array.dtype}.")
    if array.ndim == 0:
        raise ValueError(f"`{name}` must have a first axis of N rows; got a single number. Pass constants as keywords.")
    return array


def _check_range(name: str, array: np.ndarray, dtype: Any) -> None:
    """Refuse integers that JAX would wrap around when it casts them, and numbers that it would make infinite."""
    if array.dtype == dtype or array.dtype.kind not in "fiu" or not array.size or on_disk(array):
        return
    limits = jnp.iinfo(dtype) if jnp.issubdtype(dtype, np.integer) else jnp.finfo(dtype)
    extremes = [x for x in (array.min().item(), array.max().item()) if np.isfinite(x)]
    too_large = [x for x in extremes if not limits.min <= x <= limits.max]
    if too_large:
        raise ValueError(
            f"`{name}` is {array.dtype}, which JAX casts to {np.dtype(dtype)}, where {too_large[0]} does not fit. Subtract an "
            "offset or rescale before, or use 64 bits (numpyro.enable_x64())."
        )


def on_disk(array: np.ndarray) -> str | None:
    """The file that a memory map, or a view of one, reads from; None for what is in memory."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return None if array.filename is None else str(array.filename)
        array = array.base  # type: ignore[assignment]
    return None


def _num_rows(names: list[str], arrays: list[np.ndarray]) -> int:
    lengths = {name: len(a) for name, a in zip(names, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} in {name}" for name, length in lengths.items())
        raise ValueError(
            f"Arrays of `data` must have the same number of rows; got {listed}. What is no row of the data, such as inducing "
            "points, is passed as a keyword: fit(svi, rng_key, (X, y), ..., Z=Z)."
        )
    if not any(lengths.values()):
        raise ValueError("`data` must hold at least one row; got " + (f"{lengths}." if lengths else "no arrays."))
    return next(iter(lengths.values()))
