"""Data whose rows are divided among several processes: :class:`Local`, and batches of these rows.

How many rows a step takes from each process follows from :class:`~numpyro_orthgp.training.orders.Turns`, without communication.
Which rows they are, only their owner knows. Every row has the same weight, so a batch is a batch of the whole data, and models,
plates and optimizers need no changes. Devices share a batch evenly, whichever process read it, so rows must move between
processes: each process puts its rows at their places among zeros, and the sum over processes is the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.math.digest import to_host
from numpyro_orthgp.math.kept import compiled
from numpyro_orthgp.training.arrays import MAX_ROWS, read_rows
from numpyro_orthgp.training.batches import Batch, Batches, Put
from numpyro_orthgp.training.devices import Devices, gathered, together
from numpyro_orthgp.training.digest import digest_of_data
from numpyro_orthgp.training.orders import Blocks, Turns
from numpyro_orthgp.training.streamed import Streamed
from numpyro_orthgp.training.streams import Source

__all__ = ["Feed", "Local", "Shards"]


class Local:
    """This process's own rows, as ``data`` for a fit by several processes. The data are the rows of all processes together.

    ::

        jax.distributed.initialize()
        data = training.Local((X, y))  # of this host; others have other rows, and another number of them
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        result = ogp.fit(svi, rng_key, data, batch_size=8192, num_epochs=10, mesh=mesh, N=data.num_rows)

    Every row has the same weight, however many rows a process has, and every epoch has each row once. Each process contributes its
    share of all rows to a batch. Both hold to within one row, or with ``group_size`` one group, of each process. Without
    ``batch_size`` every step sees all rows, those of the first process first. A single process fits as without ``Local``.

    All processes must create it at the same time, because they exchange their numbers of rows.

    :param data: as for ``fit``: a tuple or dict of arrays, in memory or lazy, or a :class:`Stream` or other
        :class:`Source`, whose ``num_rows`` counts the rows of this process. All processes have the same arguments, dtypes and row
        shapes.
    :raises TypeError: for other data.
    :raises ValueError: for arrays of different lengths, or without rows.
    :raises RuntimeError: if another process has raised.

    .. attribute:: lengths

        Number of rows of each process.

    .. attribute:: num_rows

        N: number of rows of all processes, the size of the model's plate.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.lengths = [int(text) for text in gathered(str(together(lambda: _length(data))))]
        self.num_rows = sum(self.lengths)


def _length(data: Any) -> int:
    is_source = not isinstance(data, (tuple, dict)) and isinstance(data, Source)
    return check_integer("num_rows", data.num_rows) if is_source else Batches(data, None, ()).num_rows


class Shards:
    """Batches of :class:`Local` rows, with the same interface as :class:`~numpyro_orthgp.training.batches.Batches`.

    :param local: the rows.
    :param batch_size: rows of a step, of all processes together; ``None`` for all rows.
    :param seed: words that seed the orders.
    :param group_size: rows that stay together, or ``None``. Then whole groups take turns.
    :param shuffle: how blocks are shuffled.
    :param devices: devices of all processes.
    :raises ValueError: for a ``batch_size`` that does not fit.
    :raises RuntimeError: if another process has raised.
    """

    blocks = num_groups = None

    def __init__(
        self,
        local: Local,
        batch_size: int | None,
        seed: tuple[int, ...],
        group_size: int | None,
        shuffle: Blocks | None,
        devices: Devices,
    ) -> None:
        self.group_size = 1 if group_size is None else check_integer("group_size", group_size)
        self.local, self.seed, self.devices, self.num_rows = local, seed, devices, local.num_rows
        self.process = jax.process_index()
        self.own = devices.together(partial(self._of_process, batch_size, shuffle))
        self.is_stream, self.is_full = isinstance(self.own, Streamed), batch_size in (None, self.num_rows)
        self.is_part = not self.is_full
        self.batch_size = batch_size or self.num_rows
        self.names, self.arrays, self.dtypes, self.tree = (
            self.own.names, self.own.arrays, self.own.dtypes, self.own.tree,
        )  # fmt: skip
        self.row_shapes, self.tables = self.own.row_shapes, self.own.tables
        self.turns = Turns(local.lengths, seed)
        self.recent: dict[int, Batch] = {}  # a fit may return to these, and not every source can
        self._first: list[np.ndarray] = []

    def begin(self) -> None:
        """Assemble the first batch, in all processes. Call it only once they are known to agree on shapes and dtypes."""
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
            if batch_size is None or shuffle is not None or self.group_size > 1:
                raise ValueError(
                    "Sources of several processes are joined to batches, so `batch_size` must be given, the "
                    "number of rows in a step of all processes; `shuffle` and `group_size` are for arrays only."
                )
            return Streamed(data, None, seed)
        if self.num_rows > MAX_ROWS:
            raise ValueError(
                f"At most {MAX_ROWS} rows are possible; processes have {self.num_rows}. Pass training.Stream."
            )
        return Batches(data, self._own_batch(batch_size), seed, self.group_size, shuffle)

    def _own_batch(self, batch_size: int | None) -> int:
        """About how many rows of this process a step takes, if there are groups."""
        G, own = self.group_size, self.local.lengths[self.process]
        if G == 1 or batch_size is None or batch_size == self.num_rows:
            return 1
        if own < G or batch_size % G:
            raise ValueError(
                f"`batch_size` must be a multiple of `group_size`, whole groups, and each process needs at least {G} rows; got a "
                f"batch of {batch_size}, and {own} rows of this process."
            )
        return max(1, batch_size * own // self.num_rows // G) * G

    @property
    def bytes_per_step(self) -> int:
        """Size of one batch."""
        return self.batch_size // self.own.batch_size * self.own.bytes_per_step

    def first(self) -> Any:
        """The data of the first step."""
        return jax.tree.map(jnp.asarray, self.kept())

    def kept(self) -> Any:
        """The data of the first step in host memory, as the data of the result."""
        return jax.tree.unflatten(self.tree, self._first)

    def until(self, step: int) -> None:
        """As for :class:`Batches`."""
        self.own.until(-(-int(self._before([step * self.batch_size])[0, self.process]) // self.own.batch_size))

    def _before(self, positions: list[int]) -> np.ndarray:
        """How many rows of each process come before these positions. Groups take turns: of N of them, each process has as many as
        it has rows, so that rows of all processes have the same weight even where some are left out of whole groups.
        """
        return self.turns.before([p // self.group_size for p in positions]) * self.group_size

    def values(self) -> dict[str, str]:
        """How many rows each process has, digests of them, and the blocks in which they are read."""
        arrays = zip(self.names, self.arrays, self.dtypes, strict=True)
        own = {name: digest_of_data(array, dtype) for name, array, dtype in arrays} | {"blocks": str(self.own.blocks)}
        return {"lengths, rows of each process": str(self.local.lengths)} | {
            f"{name} of process {process}": found
            for name, text in own.items()
            for process, found in enumerate(gathered(text))
        }

    def mark(self, step: int) -> list[str] | None:
        """For a stream, for each process a digest of rows of the last batch that it read before a step."""
        if not isinstance(self.own, Streamed):
            return None
        return gathered(self.own.mark(self._batches_before(step)) or "")

    def expect(self, step: int, marks: list[str], name: str) -> None:
        """As for :class:`Streamed`, in each process separately."""
        if isinstance(self.own, Streamed):
            self.own.expect(self._batches_before(step), marks[self.process] or None, name)

    def _batches_before(self, step: int) -> int:
        rows = self._before([step * self.batch_size])[0, self.process]
        return int(-(-rows // self.own.batch_size))

    def stacked(self, step: int, num: int, capacity: int, put: Put) -> Batch:
        """Batches of ``num`` steps from ``step`` on, in arrays of shape (capacity, B, ...) filled up with zeros."""
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
        """Rows of steps after :meth:`exchanged`, and their row numbers if they have any."""
        return self.exchanged(self.devices.together(partial(self._read, step, num, capacity)), 1, everywhere)

    def _read(self, step: int, num: int, capacity: int) -> list[np.ndarray]:
        """Each array with shape (capacity, B, ...): rows of this process at their places, zeros elsewhere."""
        me, size = self.process, self.batch_size
        before = self._before([(step + i) * size for i in range(num + 1)])
        start, counts = int(before[0, me]), np.diff(before, axis=0).astype(int)
        arrays, numbers = self.own.between(start, int(before[-1, me]))
        if numbers is not None:
            arrays = [*arrays, (numbers + sum(self.local.lengths[:me])).astype(np.int32)]
        of_step = np.repeat(np.arange(num), counts[:, me])
        begins = (counts[:, :me].sum(1) - (before[:-1, me] - start)).astype(int)  # the owners' places are consecutive
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
        """Sums over processes, sharded along ``axis``, or copied to each device (``everywhere``)."""
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


Feed = Batches | Streamed | Shards  # the rows of a fit's steps come from one of these
