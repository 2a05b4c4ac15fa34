"""Which rows of the data a step sees, and how they are read from host memory.

The rows of all steps are one endless sequence: the numbers 0..N-1 in a random order for epoch 0, then in another for epoch 1, and
so on. Step t takes positions B t to B (t + 1) - 1, so it may span two epochs. Every epoch has each row exactly once, and the row
at any one position is uniformly distributed, which keeps minibatch losses unbiased. The order of an epoch depends only on the
seed and the epoch number.

Orders are drawn by ``numpy.random.Philox`` (``training/orders.py``), so a run can continue from any step without replaying earlier
ones, and processes agree on rows without communication. Batches cross the ends of epochs, because a short last batch would
either need another compilation or give its rows more weight.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.foreign import KnownTables, check_labels_of_tables
from numpyro_orthgp.training.arrays import as_array, check_range, num_rows, on_disk, read_rows
from numpyro_orthgp.training.columns import Column, default_blocks
from numpyro_orthgp.training.groups import MixedOrder
from numpyro_orthgp.training.orders import BlockOrder, Blocks, RowOrder, parts_of, rows_between

__all__ = ["Batch", "Batches", "as_arguments"]

# Puts rows on devices, given their shape, dtype, batch axis, and a function that reads the rows at an index.
Put = Callable[[tuple[int, ...], Any, int, Callable[[tuple[slice, ...]], np.ndarray]], jax.Array]


class Batch(NamedTuple):
    """
    :param data: rows of the data, in the structure that the user gave.
    :param rows: row numbers, shape (B,); ``None`` for a stream, whose row numbers are not known.
    """

    data: Any
    rows: jax.Array | None


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model. A dict becomes keyword arguments, a tuple positional ones."""
    return ((), batch) if isinstance(batch, dict) else (tuple(batch), {})


def _check_kind(data: Any) -> None:
    """
    :raises TypeError: for data that are not arrays in a tuple or dict.
    """
    if hasattr(data, "lengths") and not isinstance(data, (tuple, dict)):
        raise TypeError("`data` must be all rows here; training.Local, rows of several processes, is for ogp.fit.")
    if hasattr(data, "batches") and not isinstance(data, (tuple, dict)):
        if not hasattr(data, "num_rows"):
            raise TypeError(
                "A source has `batches(step)` and `num_rows`, the rows of an epoch, by which batches are weighed; "
                f"{type(data).__name__} has no `num_rows`."
            )
        raise TypeError(
            f"`data` must be arrays here, since every step uses all rows; a {type(data).__name__} only gives "
            "batches. Use ogp.fit, and pass an object with `num_rows` and `batches(step)`."
        )
    if not isinstance(data, (tuple, dict)):
        raise TypeError(
            "`data` must be a tuple of arrays, positional arguments of the model, such as (X, y), or a dict of arrays, its "
            f"keyword arguments, such as {{'X': X, 'y': y}}; got {type(data).__name__}. Columns of a table become data by "
            "training.columns(table, X=[...], y=...), and a loader or iterator by training.Stream(loader, num_rows=N)."
        )
    if isinstance(data, dict) and not all(isinstance(key, str) for key in data):
        raise TypeError(f"Keys of `data` are names of the model's arguments; got {list(data)}.")


class Batches:
    """Data in host memory or on disk, cut into batches.

    :param data: a tuple or dict of arrays with a first axis of length N. Memory maps, and arrays with ``chunks`` (as in h5py and
        zarr), are read only where rows are needed.
    :param batch_size: B; ``None`` or N for all data at every step, in their own order.
    :param seed: words that seed the orders.
    :param group_size: number of consecutive rows that stay together, or ``None``.
    :param num_groups: number of such groups at the end of each batch, if rows before them are single ones; or ``None``.
    :param shuffle: how blocks are shuffled; ``None`` shuffles single rows if arrays are in memory or mapped.
    :raises TypeError: for data that are not numeric arrays in a tuple or dict.
    :raises ValueError: if first axes differ or are empty, tables have their rows in different orders by their labels,
        ``batch_size`` is not in 1..N, or numbers do not fit into the dtype to which JAX casts them.
    """

    is_stream = is_part = False

    def __init__(
        self,
        data: Any,
        batch_size: int | None,
        seed: tuple[int, ...],
        group_size: int | None = None,
        shuffle: Blocks | None = None,
        num_groups: int | None = None,
    ) -> None:
        _check_kind(data)
        self._given = data
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(data)
        self.names = ["data" + jax.tree_util.keystr(path) for path, _ in leaves]
        self.arrays = [as_array(name, leaf) for name, (_, leaf) in zip(self.names, leaves, strict=True)]
        self.dtypes = [jax.dtypes.canonicalize_dtype(a.dtype.newbyteorder("=")) for a in self.arrays]
        self.num_rows = num_rows(self.names, self.arrays)
        check_labels_of_tables(self.names, [leaf for _, leaf in leaves])
        self.tables = KnownTables.of(*(leaf for _, leaf in leaves))
        for name, array, dtype in zip(self.names, self.arrays, self.dtypes, strict=True):
            if not (isinstance(array, Column) or on_disk(array)):  # `read_rows` checks these
                check_range(name, array, dtype)
        self.batch_size = self.num_rows if batch_size is None else check_integer("batch_size", batch_size)
        if self.batch_size > self.num_rows:
            raise ValueError(
                f"`batch_size` must be at most the number of rows N = {self.num_rows}; got {batch_size}. "
                "For all the data at every step leave it out."
            )
        self.is_full = self.batch_size == self.num_rows
        self.group_size = 1 if group_size is None else check_integer("group_size", group_size)
        if not self.is_full and num_groups is None and self.batch_size % self.group_size:
            raise ValueError(
                f"`batch_size` must be a multiple of `group_size`, whole groups; got {self.batch_size} and {self.group_size}."
            )
        self.num_groups = None if num_groups is None else self._checked_groups(num_groups)
        self.seed = seed
        self.order = self._order(shuffle)
        self.end = 0  # of the positions needed; nothing is read ahead until it is set
        self._windows: dict[tuple[int, int], list[np.ndarray]] = {}
        self._pool = ThreadPoolExecutor(1)  # starts its thread on first use, and ends with this object
        self._ahead: dict[tuple[int, int], Future[list[np.ndarray]]] = {}  # the window being read

    def _checked_groups(self, num_groups: int) -> int:
        rows = check_integer("num_groups", num_groups) * self.group_size
        if self.is_full or rows >= self.batch_size or self.group_size == 1:
            raise ValueError(
                "`num_groups` is how many groups of `group_size` rows each minibatch ends with, after single rows: there must be "
                f"fewer rows in groups than in a batch, and fewer in a batch than in the data; got {num_groups} groups of "
                f"{self.group_size} rows, `batch_size` {self.batch_size} and N = {self.num_rows}. If all rows are in groups, "
                "leave it out, also for the guide."
            )
        return num_groups

    def _order(self, shuffle: Blocks | None) -> RowOrder | BlockOrder | MixedOrder:
        if not (shuffle is None or isinstance(shuffle, Blocks)):
            raise TypeError(f"`shuffle` must be a numpyro_orthgp.training.Blocks; got {type(shuffle).__name__}.")
        lazy = any(isinstance(a, Column) for a in self.arrays)
        if self.num_groups is not None:
            if lazy or shuffle:
                raise ValueError(
                    "`num_groups` needs rows from anywhere, so arrays in memory or memory maps, and no `shuffle`. For data on disk "
                    "leave it out, also for the guide: then batches consist of groups."
                )
            return MixedOrder(self.num_rows, self.batch_size, self.seed, self.group_size, self.num_groups)
        if self.is_full or not (lazy or shuffle):
            return RowOrder(self.num_rows, self.batch_size, self.seed, self.group_size)
        shuffle = shuffle or Blocks()
        size, held = default_blocks(self.arrays, shuffle.size, shuffle.held, self.group_size)
        return BlockOrder(self.num_rows, size, held, self.seed, self.group_size, self.batch_size)

    @property
    def bytes_per_step(self) -> int:
        """Size of one batch."""
        shapes = (a.shape[1:] for a in self.arrays)
        return self.batch_size * sum(int(np.prod(s)) * d.itemsize for s, d in zip(shapes, self.dtypes, strict=True))

    @property
    def blocks(self) -> tuple[int, int] | None:
        """Rows of a block, and blocks that are shuffled together."""
        return (self.order.size, self.order.held) if isinstance(self.order, BlockOrder) else None

    @property
    def row_shapes(self) -> list[tuple[int, ...]]:
        """Shape of each array without the axis of rows."""
        return [a.shape[1:] for a in self.arrays]

    def row_numbers(self, step: int, num: int) -> np.ndarray:
        """Row numbers of ``num`` steps from ``step`` on, shape (num, B)."""
        rows = rows_between(self.order, step * self.batch_size, (step + num) * self.batch_size)
        return rows.reshape(num, self.batch_size)

    def between(self, start: int, stop: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Rows of each array at these positions of the endless sequence, and row numbers, shape (stop - start,)."""
        numbers = rows_between(self.order, start, stop)
        if isinstance(self.order, BlockOrder) and numbers.size:
            return self._from_blocks(start, stop), numbers
        each = zip(self.names, self.arrays, self.dtypes, strict=True)
        # Columns are here only if every step sees all rows.
        return [
            read_rows(n, a, d, slice(None))[numbers] if isinstance(a, Column) else read_rows(n, a, d, numbers)
            for n, a, d in each
        ], numbers

    def stacked(self, step: int, num: int, capacity: int, put: Put) -> Batch:
        """Batches of ``num`` steps from ``step`` on, in arrays of shape (capacity, B, ...) filled up with zeros."""
        rows = self.row_numbers(step, num)
        gathered = None
        if isinstance(self.order, BlockOrder):
            found = self._from_blocks(step * self.batch_size, (step + num) * self.batch_size)
            gathered = [a.reshape(num, self.batch_size, *a.shape[1:]) for a in found]

        def read(i: int, array: np.ndarray, dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
            wanted = rows[:, index[1]]
            batches = np.zeros((capacity, wanted.shape[1], *array.shape[1:]), dtype)
            batches[:num] = (
                read_rows(self.names[i], array, dtype, wanted) if gathered is None else gathered[i][:, index[1]]
            )
            return batches

        arrays = [
            put((capacity, self.batch_size, *a.shape[1:]), d, 1, partial(read, i, a, d))
            for i, (a, d) in enumerate(zip(self.arrays, self.dtypes, strict=True))
        ]

        def numbers(index: tuple[slice, ...]) -> np.ndarray:
            wanted = rows[:, index[1]]
            return np.concatenate([wanted, np.zeros((capacity - num, wanted.shape[1]), wanted.dtype)]).astype(np.int32)

        return self._batch([*arrays, put((capacity, self.batch_size), np.int32, 1, numbers)])

    def _from_blocks(self, start: int, stop: int) -> list[np.ndarray]:
        """Rows of each array at these positions, shape (stop - start, ...)."""
        found = [
            [np.take(a, places, axis=0) for a in self._window(epoch, window)]
            for part in parts_of(start, stop, self.order.length)
            for epoch, window, places in self.order.slots(part)  # type: ignore[union-attr]
        ]
        self._read_ahead(stop)
        return [np.concatenate(p) if len(p) > 1 else p[0] for p in zip(*found, strict=True)]

    def _window(self, epoch: int, window: int) -> list[np.ndarray]:
        """The blocks of a window. An error in the reading thread is raised here."""
        key = (epoch, window)
        if key not in self._windows:
            self._windows.clear()  # one window is held, and one more may be read ahead
            ahead, self._ahead = self._ahead, {}
            wait(ahead.values())  # files are read by one thread at a time
            blocks = self.order.blocks(epoch, window)  # type: ignore[union-attr]
            self._windows[key] = ahead[key].result() if key in ahead else self._read_blocks(blocks)
        return self._windows[key]

    def _read_ahead(self, position: int) -> None:
        """Let a thread read the window after a position, unless no step needs it."""
        key, end = self.order.window_at(position)  # type: ignore[union-attr]
        if key in self._windows:
            position = end
            key, _ = self.order.window_at(position)  # type: ignore[union-attr]
        if position < self.end and not self._ahead and key not in self._windows:
            self._ahead[key] = self._pool.submit(self._read_blocks, self.order.blocks(*key))  # type: ignore[union-attr]

    def _read_blocks(self, blocks: list[slice]) -> list[np.ndarray]:
        """Read the blocks one after the other, all arrays of each."""
        num = sum(block.stop - block.start for block in blocks)
        held = [np.empty((num, *a.shape[1:]), d) for a, d in zip(self.arrays, self.dtypes, strict=True)]
        start = 0
        for block in blocks:
            stop = start + block.stop - block.start
            for name, array, dtype, out in zip(self.names, self.arrays, self.dtypes, held, strict=True):
                out[start:stop] = read_rows(name, array, dtype, block)
            start = stop
        return held

    def kept(self) -> Any:
        """The user's data, for the result: references, no copies."""
        return self._given

    def until(self, step: int) -> None:
        """Set the number of steps, so that their rows can be read ahead."""
        self.end = step * self.batch_size

    def everything(self, put: Put) -> Batch:
        """All data, in their own order."""
        arrays = [
            put(a.shape, d, 0, lambda index, n=n, a=a, d=d: read_rows(n, a, d, index[0]))  # type: ignore[misc]
            for n, a, d in zip(self.names, self.arrays, self.dtypes, strict=True)
        ]
        numbers = put(
            (self.num_rows,), np.int32, 0, lambda index: np.arange(*index[0].indices(self.num_rows), dtype=np.int32)
        )
        return self._batch([*arrays, numbers])

    def _batch(self, arrays: list[jax.Array]) -> Batch:
        return Batch(jax.tree.unflatten(self.tree, arrays[:-1]), arrays[-1])

    def first(self) -> Any:
        """The data of the first step."""
        if isinstance(self.order, BlockOrder):
            arrays: list[Any] = self._from_blocks(0, self.batch_size)
        else:
            rows = slice(None) if self.is_full else self.row_numbers(0, 1)[0]
            arrays = [read_rows(*each, rows) for each in zip(self.names, self.arrays, self.dtypes, strict=True)]
        return jax.tree.unflatten(self.tree, [jnp.asarray(a) for a in arrays])
