"""Batches of a source, with the interface that the loop needs."""

from __future__ import annotations

import hashlib
import itertools
import logging
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.foreign import KnownTables
from numpyro_orthgp.training.arrays import as_array, check_range
from numpyro_orthgp.training.batches import Batch, Put
from numpyro_orthgp.training.columns import rows_of
from numpyro_orthgp.training.streams import Cut, Source, Stream, batches_at, batches_from, check_tables, plain, size_of

__all__ = ["Streamed"]

logger = logging.getLogger(__name__)

MARKS = 4096  # digests are kept for this many steps, more than in two calls to the device
MARKED = 2**16  # bytes of an array of a batch in its digest; of larger ones rows spread over it


class Streamed:
    """Batches of a source, with the same interface as :class:`~numpyro_orthgp.training.batches.Batches`.

    :param source: a :class:`Source`.
    :param batch_size: the user's; ``None`` for the source's.
    :param seed: words of the run's key, which do not affect the rows.
    :raises TypeError: for batches that are not numeric arrays in a tuple or dict.
    :raises ValueError: if ``batch_size`` is not the source's, or the source has no batches.
    """

    is_full = False
    is_stream = is_part = True
    group_size = 1
    num_groups = None
    blocks = None

    def __init__(self, source: Source, batch_size: int | None, seed: tuple[int, ...]) -> None:
        if isinstance(source, type):
            raise TypeError(f"`data` must be a source, not its class {source.__name__}.")
        self.source, self.seed = source, seed
        self.num_rows = check_integer("num_rows", source.num_rows)
        self.counts: list[int] = getattr(source, "counts", [])
        self.counts.clear()
        self.tables = source.tables if isinstance(source, Stream) else KnownTables()
        self.reader = self.steps = batches_from(source, 0)
        self.at = 0
        self.recent: dict[int, Batch] = {}
        self.held: dict[int, list[np.ndarray]] = {}  # batches, for calls of `between`
        self.marks: dict[int, str] = {}
        self.places: dict[int, str] = {}  # of the loader, before the last batch of a call
        self.expected: tuple[int, str, str] | None = None
        # The first batch is inspected before its step, and not every source can give it twice.
        first = next(self.steps, None)
        if first is None:
            raise ValueError("The source of `data` gave no batch.")
        self.steps = itertools.chain([first], self.steps)
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(plain(first))
        self.names = ["data" + jax.tree_util.keystr(path) for path, _ in leaves]
        self.batch_size = size_of(first)
        self.arrays = [np.array(rows_of(leaf)) for _, leaf in leaves]
        self.dtypes = [jax.dtypes.canonicalize_dtype(a.dtype.newbyteorder("=")) for a in self.arrays]
        self.row_shapes = [a.shape[1:] for a in self.arrays]
        if batch_size not in (None, self.batch_size):
            how = f"Stream(loader, batch_size={batch_size})" if isinstance(source, Stream) else "the source"
            raise ValueError(
                f"`batch_size` is the source's, {self.batch_size}; got {batch_size}. Leave it out, or say it in {how}."
            )
        if self.batch_size > self.num_rows:
            raise ValueError(f"A batch has {self.batch_size} rows, and the source has N = {self.num_rows}.")

    @property
    def bytes_per_step(self) -> int:
        """Size of one batch."""
        shapes = zip(self.row_shapes, self.dtypes, strict=True)
        return self.batch_size * sum(int(np.prod(s)) * d.itemsize for s, d in shapes)

    def first(self) -> Any:
        """The data of the first step."""
        cast = [np.asarray(a, d) for a, d in zip(self.arrays, self.dtypes, strict=True)]
        return jax.tree.unflatten(self.tree, [jnp.asarray(a) for a in cast])

    def kept(self) -> Any:
        """The first batch, as the data of the result."""
        return jax.tree.unflatten(self.tree, self.arrays)

    def everything(self, put: Put) -> Batch:
        raise ValueError("A source of `data` gives batches, not all rows at once.")

    def go_to(self, step: int, place: str = "") -> None:
        """Go to a step, by the source itself. If it has begun and a new start may differ, drop the batches before the step.

        :param place: the loader's place before this step, if it is known.
        """
        if step == self.at:
            return
        if place and isinstance(self.source, Stream):
            self.reader = self.steps = batches_at(self.source, step, place, self.batch_size)
        elif step > self.at and isinstance(self.source, Stream) and not self.source.is_even():
            next(itertools.islice(self.steps, step - self.at - 1, None), None)
        else:
            self.reader = self.steps = batches_from(self.source, step)
        self.at = step

    def until(self, step: int) -> None:
        """Does nothing: the loader reads ahead."""

    def mark(self, step: int) -> str | None:
        """A digest of rows of the batch before a step, and the loader's place before this batch, if there is one.

        ``None`` if the batch was not read here.
        """
        mark, place = self.marks.get(step), self.places.get(step - 1)
        return mark if mark is None or place is None else f"{mark} {place}"

    def expect(self, step: int, mark: str | None, name: str) -> None:
        """When a run continues, the batch before its next step must be the same as before. Checked only if a step is taken.

        :param mark: mark of that batch when the file was written.
        :param name: name of the file.
        """
        if step and mark is not None:
            self.expected = step, mark, name

    def _check_expected(self) -> None:
        """
        :raises ValueError: if the batch differs.
        """
        if self.expected is None:
            return
        (step, mark, name), self.expected = self.expected, None
        rows, _, place = mark.partition(" ")
        try:
            self.go_to(step - 1, place)
            batch = next(self.steps, None)
        except Exception as error:
            if not place:
                raise
            # grain compares descriptions of data, which may have addresses in them; the batch itself is compared below.
            logger.warning(
                "The loader does not take the state in %s, so earlier batches are read again: %s", name, error
            )
            self.reader = self.steps = batches_from(self.source, step - 1)
            batch = next(self.steps, None)
        self.at = step
        if batch is not None:
            self.held = {step - 1: [np.array(np.asarray(leaf)) for leaf in jax.tree.leaves(plain(batch))]}
        if batch is None or _mark(jax.tree.leaves(plain(batch))) != rows:
            raise ValueError(
                f"`checkpoint` {name}: the source of `data` gives another batch of step {step} than when the file was written, so "
                "it cannot go on exactly. Shuffle by a seed of its own, and make the loader anew for each call of `fit`: "
                "Stream(lambda: make_loader(), N). Or pass resume='anyway' to go on with what it gives."
            )

    def stacked(self, step: int, num: int, capacity: int, put: Put) -> Batch:
        """Batches of ``num`` steps from ``step`` on, in arrays of shape (capacity, B, ...) filled up with zeros.

        Batches of the last calls are kept, because a fit may return to them, and not every source can.

        :raises ValueError: if the source ends, or its batches change their shapes.
        """
        if step in self.recent:
            return self.recent[step]
        shapes = [(capacity, self.batch_size, *shape) for shape in self.row_shapes]
        stacks = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]
        self._fill(step, num, stacks)
        arrays = [
            put(shape, dtype, 1, lambda index, a=stack: a[index])  # type: ignore[misc]
            for shape, dtype, stack in zip(shapes, self.dtypes, stacks, strict=True)
        ]
        self.recent = dict(list(self.recent.items())[-2:])
        self.recent[step] = Batch(jax.tree.unflatten(self.tree, arrays), None)
        return self.recent[step]

    def between(self, start: int, stop: int) -> tuple[list[np.ndarray], None]:
        """The rows at these positions of the source's whole sequence, shape (stop - start, ...) for each array."""
        self._check_expected()
        first, last = start // self.batch_size, -(-stop // self.batch_size)
        shapes = [(last - first, self.batch_size, *shape) for shape in self.row_shapes]
        stacks = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]
        num = 0
        while first + num in self.held and first + num < last:
            for stack, array in zip(stacks, self.held[first + num], strict=True):
                stack[num] = array
            num += 1
        if first + num < last:
            self._fill(first + num, last - first - num, [stack[num:] for stack in stacks])
        # A batch may end in the next call, and not every source can give it twice.
        self.held = {first + i: [stack[i] for stack in stacks] for i in range(last - first)} or self.held
        cut = slice(start - first * self.batch_size, stop - first * self.batch_size)
        return [s.reshape(-1, *s.shape[2:])[cut] for s in stacks], None

    def _fill(self, step: int, num: int, stacks: list[np.ndarray]) -> None:
        """Read ``num`` batches from ``step`` on."""
        self._check_expected()
        self.go_to(step)
        for i in range(num):
            if i == num - 1 and isinstance(self.reader, Cut) and self.reader.step == step + i and self.reader.place:
                self.places = dict(list(self.places.items())[-3:]) | {step + i: self.reader.place}
            batch = next(self.steps, None)
            if batch is None:
                raise ValueError(
                    f"The source of `data` ended after {self.at + i} batches, but the fit needs more. Ask for "
                    "fewer steps, or pass a source that can start again: a loader, or a function that makes the "
                    "iterator."
                )
            self._put_batch(plain(batch), [stack[i] for stack in stacks], self.at + i)
        self.at += num
        self._warn_of_counts()

    def _warn_of_counts(self) -> None:
        """Warn only once: some loaders leave out a short last batch, and some generators span several epochs, on purpose."""
        N = self.num_rows
        wrong = [count for count in self.counts if count % N and not N - self.batch_size < count < N]
        if wrong:
            self.counts = []
            warnings.warn(
                f"`num_rows` says {self.num_rows}, but an epoch of the loader gave {wrong[0]} rows: batches are weighed by the "
                f"first number. Say the second, and N in the model, if it is the right one: Stream(loader, {wrong[0]}).",
                UserWarning,
                stacklevel=2,
            )

    def _put_batch(self, batch: Any, places: list[np.ndarray], step: int) -> None:
        check_tables(batch, self.tables)
        leaves, tree = jax.tree.flatten(batch)
        for name, leaf in zip(self.names, leaves, strict=False):
            as_array(name, leaf)  # checks it
        arrays = [rows_of(leaf) for leaf in leaves]
        found, wanted = [a.shape for a in arrays], [p.shape for p in places]
        if tree != self.tree or found != wanted:  # type: ignore[operator]
            raise ValueError(
                f"Batches must all be of one shape: the first had arrays of {wanted}, that of step {step + 1} has {found}. "
                "A training.Stream cuts batches of any size anew."
            )
        for name, array, place in zip(self.names, arrays, places, strict=True):
            check_range(name, array, place.dtype)
            place[...] = array
        self.marks[step + 1] = _mark(arrays)
        self.marks.pop(step - MARKS, None)


def _mark(arrays: list[Any]) -> str:
    """A digest of rows spread over a batch. One row would not do: another order may begin with the same one."""
    content = b"".join(a[:: max(1, -(-a.nbytes // MARKED))].tobytes() for a in map(np.asarray, arrays))
    return hashlib.blake2b(content, digest_size=8).hexdigest()
