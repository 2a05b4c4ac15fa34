"""Data from loaders, batch by batch: the protocol :class:`Source`, and :class:`Stream`, which turns a loader into a source.

The loader does the shuffling, decoding, workers and reading ahead. This module adds what else a fit needs: batches of one size, the
number of rows, and the same batches again when a run continues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from numpyro_orthgp.errors import check_integer

__all__ = ["Source", "Stream", "plain", "size_of"]


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


class Stream:
    """A loader as a :class:`Source`.

    ::

        loader = grain.MapDataset.source(rows).shuffle(seed=0).to_iter_dataset().batch(1024)
        result = ogp.fit(svi, rng_key, ogp.training.Stream(loader, len(rows)), num_epochs=10, N=len(rows))

    ========================================  ========================================================================
    loader                                    how a run goes on
    ========================================  ========================================================================
    indexed: ``grain.MapDataset``, a list     by the index, at once
    of batches
    iterable: ``grain.IterDataset`` or        by reading and dropping what was seen; exact if a newly made loader
    ``DataLoader``, torch ``DataLoader``,     gives the same batches (seed it: ``generator=``, ``seed=``)
    ``tf.data.Dataset``
    function without arguments that makes     the same, and a second fit in one process starts again too
    one of these, or a generator
    iterator                                  not: ``checkpoint=`` raises an error
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
        self.loader, self.num_rows = loader, check_integer("num_rows", num_rows)
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size)
        self.is_resumable = not isinstance(loader, Iterator)
        self.counts: list[int] = []  # rows of the epochs that ended

    def batches(self, step: int) -> Iterator[Any]:
        """The batches from a step on. Earlier ones are read and dropped, unless the loader is indexed by steps."""
        first = 0
        if step and self.is_even():
            first, step = step, 0
        return itertools.islice(_cut(self._pieces(first), self.batch_size), step, None)

    def is_even(self) -> bool:
        """Whether the loader is indexed by batches, all of the size of a step."""
        if callable(self.loader) or not _is_indexed(self.loader):
            return False
        sizes = {size_of(plain(self.loader[i])) for i in (0, len(self.loader) - 1)}
        return len(sizes) == 1 and self.batch_size in (None, *sizes)

    def _pieces(self, first: int) -> Iterator[Any]:
        """The loader's batches, epoch after epoch."""
        loader = self.loader() if callable(self.loader) and not _is_loader(self.loader) else self.loader
        if _is_indexed(loader) and type(loader).__module__.partition(".")[0] == "grain":
            # For an index beyond its length the loader draws the order of the next epoch.
            yield from (plain(loader[i]) for i in itertools.count(first))
        if _is_indexed(loader):
            yield from (plain(loader[i]) for i in range(first % len(loader), len(loader)))
        while True:
            rows = 0
            for batch in _once(loader):
                piece = plain(batch)
                rows += size_of(piece)
                yield piece
            if not rows or isinstance(self.loader, Iterator):
                return
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


def size_of(batch: Any) -> int:
    """Rows of a batch.

    :raises ValueError: if its arrays have different numbers of rows.
    """
    lengths = {len(a) if np.ndim(a) else 0 for a in jax.tree.leaves(batch)}
    if len(lengths) != 1 or not min(lengths):
        raise ValueError(f"Arrays of a batch must have the same number of rows, at least one; got {sorted(lengths)}.")
    return lengths.pop()


def _cut(pieces: Iterator[Any], size: int | None) -> Iterator[Any]:
    """Batches of ``size`` rows, by default of as many as the first piece has."""
    held: list[list[np.ndarray]] = []
    count, tree = 0, None
    for piece in pieces:
        leaves, found = jax.tree.flatten(piece)
        if tree is not None and found != tree:
            raise ValueError(f"Batches must have the same structure; the loader gave {tree} and then {found}.")
        num = size_of(piece)
        size, tree = size or num, found
        if not held and num == size:
            yield piece
            continue
        # Copies, as a loader may reuse its arrays. Two calls, as torch tensors do not support a copy argument.
        held.append([np.array(np.asarray(leaf)) for leaf in leaves])
        count += num
        if count >= size:
            whole = [np.concatenate(parts) for parts in zip(*held, strict=True)]
            for start in range(0, count - size + 1, size):
                yield jax.tree.unflatten(tree, [a[start : start + size] for a in whole])
            rest = count % size
            held, count = ([[a[-rest:] for a in whole]], rest) if rest else ([], 0)
