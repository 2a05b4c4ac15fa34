"""Data from loaders, batch by batch: the protocol :class:`Source`, and :class:`Stream`, which turns a loader into a source.

The loader does the shuffling, decoding, workers and reading ahead. This module adds what else a fit needs: batches of one size, the
number of rows, and the same batches again when a run continues.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.foreign import KnownTables, check_labels_of_tables, refuse_other_order
from numpyro_orthgp.training.arrays import as_array, is_plain
from numpyro_orthgp.training.columns import rows_of

__all__ = ["Cut", "Source", "Stream", "batches_at", "batches_from", "check_tables", "plain", "size_of"]


@runtime_checkable
class Source(Protocol):
    """The protocol for ``data`` of a fit other than arrays. It has two members.

    A source need not derive from this class. To resume exactly, ``batches`` must give the same batches for the same step, in any
    process. If a source cannot do so, set its ``is_resumable = False``; ``checkpoint=`` then raises an error.
    """

    num_rows: int
    """N: rows of the data, which the model's plate has."""

    def batches(self, step: int) -> Iterator[Any]:
        """The batches of steps ``step``, ``step + 1``, ...: tuples or dicts of arrays, all of one size B, without end."""
        ...


def batches_from(source: Source, step: int) -> Iterator[Any]:
    """The batches of a source from a step on.

    :raises TypeError: if it gives something else than an iterator of batches.
    """
    found = source.batches(step) if callable(source.batches) else source.batches
    if not callable(source.batches) or not isinstance(found, Iterable):
        raise TypeError(
            "`batches` of a source must be a method that gives an iterator from a step on, without end: def batches(self, step) "
            f"with `yield`. That of {type(source).__name__} is, or gives, a {type(found).__name__}."
        )
    return iter(found)


class Stream:
    """A loader as a :class:`Source`.

    ::

        loader = grain.MapDataset.source(rows).shuffle(seed=0).to_iter_dataset().batch(1024)
        result = ogp.fit(svi, rng_key, ogp.training.Stream(loader, len(rows)), num_epochs=10, N=len(rows))

    ========================================  ========================================================================
    loader                                    how a resumed run continues
    ========================================  ========================================================================
    indexed: ``grain.MapDataset``, a list     by the index
    of batches
    iterators with a state that can be set:   by the state, which the checkpoint holds
    ``grain.IterDataset``, ``DataLoader``
    other iterables: torch ``DataLoader``,    by reading and dropping earlier batches; exact if a new loader
    ``tf.data.Dataset``                       gives the same batches (seed it: ``generator=``, ``seed=``)
    function without arguments that makes     the same, and each fit in a process makes a new loader
    one of these, or a generator
    iterator                                  it cannot: ``checkpoint=`` raises an error
    ========================================  ========================================================================

    When a loader ends, an epoch ends, and the loader starts again. Its batches may have any size, and the last may be short: they
    are cut into batches of one size, across the ends of epochs. When a generator ends, its function is called again. It gives the
    same order, unless it keeps the state of its random numbers. If an epoch has fewer or more rows than ``num_rows``, a fit warns.

    :param loader: see the table. Its batches are tuples, lists or dicts of arrays (NumPy, torch, TensorFlow, JAX).
    :param num_rows: N; by default ``len(loader.dataset)``, which torch loaders have.
    :param batch_size: rows of a step; by default those of the loader's first batch.
    :raises TypeError: for objects that are not loaders.
    :raises ValueError: if the number of rows is not given and not known.
    """

    def __init__(self, loader: Any, num_rows: int | None = None, batch_size: int | None = None) -> None:
        if not (callable(loader) or isinstance(loader, Iterable) or _is_indexed(loader)):
            raise TypeError(
                "`loader` must be an iterable of batches, something indexed by their number, or a function that makes one; got "
                f"{type(loader).__name__}."
            )
        if num_rows is None:
            dataset = getattr(loader, "dataset", None)
            if not hasattr(dataset, "__len__"):
                raise ValueError(
                    f"How many rows a {type(loader).__name__} gives in an epoch is not known, and batches are weighed by it: say "
                    "Stream(loader, num_rows=N). Count them once if need be: sum(len(batch[0]) for batch in loader)."
                )
            num_rows = len(dataset)  # type: ignore[arg-type]
        if _is_indexed(loader) and not len(loader):
            raise ValueError(f"`loader` is a {type(loader).__name__} without batches.")
        self.loader, self.num_rows = loader, check_integer("num_rows", num_rows)
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size)
        self.is_resumable = not isinstance(loader, Iterator)
        self.counts: list[int] = []  # rows of the epochs that ended
        self.tables = KnownTables()  # that were batches

    def batches(self, step: int) -> Iterator[Any]:
        """The batches from a step on. Earlier ones are read and dropped, unless the loader is indexed by steps."""
        if step and self.is_even():
            return Cut(lambda note: self._checked(note, step), self.batch_size, step)
        found = Cut(self._checked, self.batch_size)
        next(itertools.islice(found, step - 1, None), None) if step else None
        return found

    def is_even(self) -> bool:
        """Whether the loader is indexed by batches, all of the size of a step."""
        if callable(self.loader) or not _is_indexed(self.loader):
            return False
        sizes = {size_of(plain(self.loader[i]), 0) for i in (0, len(self.loader) - 1)}
        return len(sizes) == 1 and self.batch_size in (None, *sizes)

    def _checked(self, note: Callable[[Any], None], first: int = 0, state: Any = None) -> Iterator[Any]:
        """:meth:`_pieces`, while they still are tables: batches of one size are cut from their arrays."""
        for piece in self._pieces(note, first, state):
            check_tables(piece, self.tables)
            yield piece

    def _pieces(self, note: Callable[[Any], None], first: int = 0, state: Any = None) -> Iterator[Any]:
        """The loader's batches, epoch after epoch.

        :param note: called with the iterator before each batch.
        :param first: index of the first batch.
        :param state: of the loader's iterator, from which it goes on.
        """
        loader = self.loader() if callable(self.loader) and not _is_loader(self.loader) else self.loader
        if _is_indexed(loader) and type(loader).__module__.partition(".")[0] == "grain":
            # For an index beyond its length the loader draws the order of the next epoch.
            yield from (plain(loader[i]) for i in itertools.count(first))
        if _is_indexed(loader):
            yield from (plain(loader[i]) for i in range(first % len(loader), len(loader)))
        while True:
            rows, iterator, is_whole = 0, _once(loader), state is None
            if state is not None:
                iterator.set_state(state)  # type: ignore[attr-defined]
                state = None
            note(iterator)
            for batch in iterator:
                piece = plain(batch)
                rows += size_of(piece, 0)
                yield piece
                note(iterator)
            if not rows or isinstance(self.loader, Iterator):
                return
            if is_whole:
                self.counts.append(rows)
            if isinstance(loader, Iterator):
                loader = self.loader()


def _is_indexed(loader: Any) -> bool:
    return hasattr(loader, "__getitem__") and hasattr(loader, "__len__") and not isinstance(loader, (Mapping, str))


def _once(loader: Any) -> Iterator[Any]:
    """The batches of an epoch."""
    if _is_indexed(loader):
        return (loader[i] for i in range(len(loader)))
    return iter(loader.as_numpy_iterator() if hasattr(loader, "as_numpy_iterator") else loader)


def _is_loader(loader: Any) -> bool:
    return isinstance(loader, Iterable) or _is_indexed(loader)


def plain(batch: Any) -> Any:
    """A batch as a tuple or dict."""
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, (tuple, dict)):
        raise TypeError(
            "A batch must be a tuple of arrays, positional arguments of the model, such as (X, y), or a dict of them; the "
            f"loader gave a {type(batch).__name__}."
        )
    if hasattr(batch, "_fields"):
        batch = tuple(batch)
    return batch


def size_of(batch: Any, least: int = 1) -> int:
    """Rows of a batch.

    :param least: the least number allowed.
    :raises TypeError: for what is no array of numbers.
    :raises ValueError: if its arrays have different numbers of rows.
    """
    leaves = jax.tree.leaves(batch)
    if all(map(is_plain, leaves)):  # names take longer than all else
        lengths = {len(leaf) for leaf in leaves}
    else:
        named, _ = jax.tree_util.tree_flatten_with_path(batch)
        lengths = {as_array("data" + jax.tree_util.keystr(path), leaf).shape[0] for path, leaf in named}
    if len(lengths) != 1 or min(lengths) < least:
        raise ValueError(f"Arrays of a batch must have the same number of rows, at least one; got {sorted(lengths)}.")
    return lengths.pop()


def check_tables(batch: Any, tables: KnownTables) -> None:
    """Check that rows of a batch belong together by their labels, and that columns are in the order of earlier batches.

    :param tables: columns of earlier batches; those of this one are added.
    :raises ValueError: if not.
    """
    if all(map(is_plain, jax.tree.leaves(batch))):  # names take longer than all else
        return
    named, _ = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [leaf for _, leaf in named]
    check_labels_of_tables(["data" + jax.tree_util.keystr(path) for path, _ in named], leaves)
    for leaf in leaves:
        refuse_other_order(leaf, tables)


class Cut(Iterator[Any]):
    """Batches of one size, cut from pieces of any size.

    :param pieces: makes the iterator of pieces; it calls its argument with the loader's iterator before each piece.
    :param size: rows of a batch, by default those of the first piece.
    :param step: number of the first batch.
    :param skip: rows of the first piece that earlier batches had.

    .. attribute:: step

        Number of the next batch.

    .. attribute:: place

        Where the next batch begins, as text: rows of a piece that are used, and the state of the loader before this piece; ``None``
        if the loader has no state that can be set, or it is not known as JSON or bytes.
    """

    def __init__(
        self, pieces: Callable[[Callable[[Any], None]], Iterator[Any]], size: int | None, step: int = 0, skip: int = 0
    ) -> None:
        self.step, self._size, self._skip, self._used = step, size, skip, skip
        self._state: Any = None  # before the next piece
        self._before: Any = None  # before the last piece
        self._batches = self._cut(pieces(self._note))

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.step += 1
        return batch

    @property
    def place(self) -> str | None:
        state = _encoded(self._before)
        return None if state is None else f"{self._used} {state}"

    def _note(self, iterator: Any) -> None:
        has_state = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        self._state = iterator.get_state() if has_state else None

    def _cut(self, pieces: Iterator[Any]) -> Iterator[Any]:
        held: list[list[np.ndarray]] = []
        size, count, tree, row_shapes = self._size, 0, None, []
        for piece in pieces:
            num = size_of(piece, 0)
            if not num:  # as a filter leaves it
                continue
            # The generator of pieces has not gone on: the state is still that before this piece.
            self._before = self._state
            leaves, found = jax.tree.flatten(piece)
            if tree is not None and found != tree:
                raise ValueError(f"Batches must have the same structure; the loader gave {tree} and then {found}.")
            shapes = [np.shape(leaf)[1:] for leaf in leaves]
            if tree is not None and shapes != row_shapes:
                raise ValueError(
                    f"Rows of batches must have one shape; the loader gave {row_shapes} and then {shapes}."
                )
            size, tree, row_shapes = size or num, found, shapes
            if not held and num == size and not self._skip:
                self._used = num
                yield piece
                continue
            # Copies, as a loader may reuse its arrays. Two calls, as torch tensors do not support a copy argument.
            held.append([np.array(rows_of(leaf))[self._skip :] for leaf in leaves])
            count, self._skip = count + num - self._skip, 0
            if count >= size:
                whole = [np.concatenate(parts) for parts in zip(*held, strict=True)]
                for start in range(0, count - size + 1, size):
                    self._used = num - (count - start - size)  # what is left are rows of this piece alone
                    yield jax.tree.unflatten(tree, [a[start : start + size] for a in whole])
                rest = count % size
                held, count = ([[a[-rest:] for a in whole]], rest) if rest else ([], 0)


def batches_at(stream: Stream, step: int, place: str, size: int) -> Cut:
    """The batches of a stream from a step on, by the :attr:`Cut.place` of this step.

    :param size: rows of a step.
    """
    skip, _, state = place.partition(" ")
    return Cut(lambda note: stream._checked(note, state=_decoded(state)), size, step, int(skip))


def _encoded(state: Any) -> str | None:
    if state is None:
        return None
    if isinstance(state, bytes):
        return "base64 " + base64.b64encode(state).decode()
    try:
        text = json.dumps(state)
    except (TypeError, ValueError):
        return None
    return "json " + text if json.loads(text) == state else None


def _decoded(text: str) -> Any:
    kind, _, content = text.partition(" ")
    return base64.b64decode(content) if kind == "base64" else json.loads(content)
