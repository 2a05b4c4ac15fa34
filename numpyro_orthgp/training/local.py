"""Rows that each of several processes has for itself: :class:`Local`, and the batches that are made of them.

A step takes of each process as many rows as its turn is (:class:`~numpyro_orthgp.training.orders.Turns`), which all know without
talking; which rows these are only their owner knows. Every row then weighs the same, so a batch is one of the whole data, and
models, plates and optimizers need not know of it. Devices share a batch evenly, whoever read it, so rows move from where there are
too many: each process puts its own at their places among zeros, and the sum over processes is the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.training.batches import MAX_ROWS, Batch, Batches, Put, read_rows
from numpyro_orthgp.training.devices import Devices, gathered, to_host, together
from numpyro_orthgp.training.digest import digest_of_data
from numpyro_orthgp.training.kept import compiled
from numpyro_orthgp.training.orders import Blocks, Turns
from numpyro_orthgp.training.streamed import Streamed
from numpyro_orthgp.training.streams import Source

__all__ = ["Feed", "Local", "Shards"]


class Local:
    """Rows of this process alone, as the ``data`` of a fit by several: the data are those of all processes together.

    ::

        jax.distributed.initialize()
        data = training.Local((X, y))  # of this host; others have other rows, and another number of them
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        result = ogp.fit(svi, rng_key, data, batch_size=8192, num_epochs=10, mesh=mesh, N=data.num_rows)

    Every row weighs the same, however many a process has, and every epoch has each row once: a batch takes of a process its share
    of all rows, up to one. Without ``batch_size`` every step sees all rows, those of the first process first. One process alone
    fits as without ``Local``.

    All processes must make it at once, as it asks them for their number of rows.

    :param data: what ``fit`` takes: a tuple or dict of arrays, in memory or read lazily, or a :class:`Stream` or other
        :class:`Source`, whose ``num_rows`` are those of this process. Each process has the same arguments, dtypes and shapes of
        rows.
    :raises TypeError: for what is no such data.
    :raises ValueError: for arrays of different lengths, or without rows.
    :raises RuntimeError: if another process has raised.

    .. attribute:: lengths

        Rows of each process.

    .. attribute:: num_rows

        N: rows of all processes, which the model's plate has.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.lengths = [int(text) for text in gathered(str(together(lambda: _length(data))))]
        self.num_rows = sum(self.lengths)


def _length(data: Any) -> int:
    is_source = not isinstance(data, (tuple, dict)) and isinstance(data, Source)
    return check_integer("num_rows", data.num_rows) if is_source else Batches(data, None, ()).num_rows


class Shards:
    """Batches of rows that processes have for themselves: the same interface as :class:`~numpyro_orthgp.training.batches.Batches`.

    :param local: the rows.
    :param batch_size: rows of a step, of all processes together; None for all rows.
    :param seed: words that orders are drawn from.
    :param shuffle: how blocks are shuffled.
    :param devices: of all processes.
    :raises ValueError: for a ``batch_size`` that does not fit.
    :raises RuntimeError: if another process has raised.
    """

    group_size = 1
    blocks = None

    def __init__(
        self, local: Local, batch_size: int | None, seed: tuple[int, ...], shuffle: Blocks | None, devices: Devices
    ) -> None:
        self.local, self.seed, self.devices, self.num_rows = local, seed, devices, local.num_rows
        self.process = jax.process_index()
        self.own = devices.together(partial(self._of_process, batch_size, shuffle))
        self.is_stream, self.is_full = isinstance(self.own, Streamed), batch_size in (None, self.num_rows)
        self.is_part = not self.is_full
        self.batch_size = batch_size or self.num_rows
        self.names, self.arrays, self.dtypes, self.tree = (
            self.own.names, self.own.arrays, self.own.dtypes, self.own.tree,
        )  # fmt: skip
        self.row_shapes = self.own.row_shapes
        self.turns = Turns(local.lengths, seed)
        self.recent: dict[int, Batch] = {}  # to which a fit may return, and not every source can
        self._first: list[np.ndarray] = []

    def begin(self) -> None:
        """Put together the first batch, in all processes; before, they must have been found to agree on shapes and dtypes."""
        found = self.all_rows(True) if self.is_full else self.steps(0, 1, 1, True)
        self._first = [to_host(a) if self.is_full else to_host(a)[0] for a in found[: len(self.arrays)]]

    def _of_process(self, batch_size: int | None, shuffle: Blocks | None) -> Batches | Streamed:
        data, seed = self.local.data, (*self.seed, self.process)
        is_source = not isinstance(data, (tuple, dict)) and isinstance(data, Source)
        if batch_size is not None and check_integer("batch_size", batch_size) > self.num_rows:
            raise ValueError(
                f"`batch_size` must be at most the number of rows of all processes, {self.num_rows}; got {batch_size}."
            )
        if is_source:
            if batch_size is None or shuffle is not None:
                raise ValueError(
                    "Sources of several processes are put together to batches: say `batch_size`, rows of a step of all of them; "
                    "`shuffle` is of arrays."
                )
            return Streamed(data, None, seed)
        if self.num_rows > MAX_ROWS:
            raise ValueError(
                f"Numbers of rows go up to {MAX_ROWS}; processes have {self.num_rows}. Pass training.Stream."
            )
        return Batches(data, 1, seed, None, shuffle)

    @property
    def bytes_per_step(self) -> int:
        """Size of one batch."""
        return self.batch_size // self.own.batch_size * self.own.bytes_per_step

    def first(self) -> Any:
        """The data of the first step."""
        return jax.tree.map(jnp.asarray, self.kept())

    def kept(self) -> Any:
        """The same in host memory, as the data that a result is asked about."""
        return jax.tree.unflatten(self.tree, self._first)

    def until(self, step: int) -> None:
        """As for :class:`Batches`."""
        self.own.until(int(self.turns.before([step * self.batch_size])[0, self.process]) // self.own.batch_size)

    def values(self) -> dict[str, str]:
        """Digests of the rows of each process, with the blocks that they are read in."""
        arrays = zip(self.names, self.arrays, self.dtypes, strict=True)
        own = {name: digest_of_data(array, dtype) for name, array, dtype in arrays} | {"blocks": str(self.own.blocks)}
        return {
            f"{name} of process {process}": found
            for name, text in own.items()
            for process, found in enumerate(gathered(text))
        }

    def mark(self, step: int) -> list[str] | None:
        """Of a stream, for each process a digest of a row of the last batch that it read before a step."""
        if not isinstance(self.own, Streamed):
            return None
        return gathered(self.own.mark(self._batches_before(step)) or "")

    def expect(self, step: int, marks: list[str], name: str) -> None:
        """As for :class:`Streamed`, each process for itself."""
        if isinstance(self.own, Streamed):
            self.own.expect(self._batches_before(step), marks[self.process] or None, name)

    def _batches_before(self, step: int) -> int:
        rows = self.turns.before([step * self.batch_size])[0, self.process]
        return int(-(-rows // self.own.batch_size))

    def stacked(self, step: int, num: int, capacity: int, put: Put) -> Batch:
        """Batches of ``num`` steps from ``step`` on, arrays of shape (capacity, B, ...) of which the rest is zeros."""
        if step not in self.recent:
            found = self.steps(step, num, capacity)
            self.recent = dict(list(self.recent.items())[-2:])
            self.recent[step] = self._batch(found)
        return self.recent[step]

    def everything(self, put: Put) -> Batch:
        """All rows, those of the first process first."""
        return self._batch(self.all_rows())

    def _batch(self, arrays: list[jax.Array]) -> Batch:
        num = len(self.arrays)
        return Batch(jax.tree.unflatten(self.tree, arrays[:num]), None if self.is_stream else arrays[num])

    def steps(self, step: int, num: int, capacity: int, everywhere: bool = False) -> list[jax.Array]:
        """Rows of steps and, if they have any, their numbers, as :meth:`exchanged` them."""
        return self.exchanged(self.devices.together(partial(self._read, step, num, capacity)), 1, everywhere)

    def _read(self, step: int, num: int, capacity: int) -> list[np.ndarray]:
        """Of each array (capacity, B, ...), zero but for rows of this process at their places."""
        me, size = self.process, self.batch_size
        before = self.turns.before([(step + i) * size for i in range(num + 1)])
        start, counts = int(before[0, me]), np.diff(before, axis=0).astype(int)
        arrays, numbers = self.own.between(start, int(before[-1, me]))
        if numbers is not None:
            arrays = [*arrays, (numbers + sum(self.local.lengths[:me])).astype(np.int32)]
        of_step = np.repeat(np.arange(num), counts[:, me])
        begins = (counts[:, :me].sum(1) - (before[:-1, me] - start)).astype(int)  # places of owners follow each other
        place = np.arange(len(of_step)) + np.repeat(begins, counts[:, me])
        found = [np.zeros((capacity, size, *a.shape[1:]), a.dtype) for a in arrays]
        for out, array in zip(found, arrays, strict=True):
            out[of_step, place] = array
        return found

    def all_rows(self, everywhere: bool = False) -> list[jax.Array]:
        return self.exchanged(self.devices.together(self._read_all), 0, everywhere)

    def _read_all(self) -> list[np.ndarray]:
        start = sum(self.local.lengths[: self.process])
        stop = start + self.local.lengths[self.process]
        found = [np.zeros((self.num_rows, *s), d) for s, d in zip(self.row_shapes, self.dtypes, strict=True)]
        for out, name, array, dtype in zip(found, self.names, self.arrays, self.dtypes, strict=True):
            out[start:stop] = read_rows(name, array, dtype, slice(None))
        return [*found, np.arange(self.num_rows, dtype=np.int32) * (self.process == 0)]

    def exchanged(self, arrays: list[np.ndarray], axis: int, everywhere: bool) -> list[jax.Array]:
        """Sums over processes, shared out along ``axis``, or whole for each device."""
        mesh = self.devices.mesh
        assert mesh is not None
        axes = [None] * axis
        given = NamedSharding(mesh, PartitionSpec("process", *axes, "device"))
        wanted = NamedSharding(mesh, PartitionSpec() if everywhere else PartitionSpec(*axes, mesh.axis_names))
        processes = len(self.local.lengths)

        def part(array: np.ndarray, index: Any) -> np.ndarray:
            return array[None][(slice(None), *index[1:])]

        owned = [
            jax.make_array_from_callback((processes, *array.shape), given, partial(part, array)) for array in arrays
        ]
        return compiled(("exchange", wanted), lambda: jax.jit(_added, out_shardings=wanted))(owned)


def _added(arrays: list[jax.Array]) -> list[jax.Array]:
    return [a.any(0) if a.dtype == bool else a.sum(0, dtype=a.dtype) for a in arrays]


Feed = Batches | Streamed | Shards  # what gives a fit the rows of its steps
