"""Data that a loader gives batch by batch: the protocol :class:`Source`, and :class:`Stream`, which makes loaders sources.

Shuffling, decoding, workers and reading ahead are the loader's. What is here is what a fit needs beside: batches of one size, the
number of rows, and the same batches again when a run goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.errors import check_integer
from numpyro_orthgp.training.batches import Batch, Put, as_array, check_range

__all__ = ["Source", "Stream", "Streamed"]

MARKS = 4096  # steps back of which digests are kept: more than two calls to the device have


@runtime_checkable
class Source(Protocol):
    """What may be the ``data`` of a fit beside arrays: anything with these two.

    The class of the source need not derive from this one. For kill and resume to stay exact, ``batches`` must give the same for the
    same step, in any process. A source that cannot sets ``is_resumable = False``, and ``checkpoint=`` is refused.
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
    iterable: ``grain.IterDataset`` or        by reading and dropping what was seen; exact if a loader that is made anew
    ``DataLoader``, torch ``DataLoader``,     gives the same batches (seed it: ``generator=``, ``seed=``)
    ``tf.data.Dataset``
    function without arguments that makes     the same, and a second fit in one process begins anew too
    one of these, or a generator
    iterator                                  not: refused with ``checkpoint=``
    ========================================  ========================================================================

    A loader that ends is begun anew: that is an epoch. Its batches may be of any size, a short last one too: they are cut anew into
    batches of one size, over the ends of epochs. A generator's function that ends is called again and gives the same order, unless
    it shuffles by a random number that it keeps. Where an epoch gives fewer or more rows than ``num_rows`` says, a fit warns.

    :param loader: see the table; its batches are tuples, lists or dicts of arrays (of NumPy, torch, TensorFlow, JAX).
    :param num_rows: N; by default ``len(loader.dataset)``, which loaders of torch have.
    :param batch_size: rows of a step; by default those of the loader's first batch.
    :raises TypeError: for what is no loader.
    :raises ValueError: if the number of rows is not said and not known.
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
        """The batches from a step on; those before are dropped unless the loader is indexed by them."""
        first = 0
        if step and self.is_even():
            first, step = step, 0
        return itertools.islice(_cut(self._pieces(first), self.batch_size), step, None)

    def is_even(self) -> bool:
        """Whether the loader is indexed by batches of one size, which are those of the steps."""
        if callable(self.loader) or not _is_indexed(self.loader):
            return False
        sizes = {_size(_plain(self.loader[i])) for i in (0, len(self.loader) - 1)}
        return len(sizes) == 1 and self.batch_size in (None, *sizes)

    def _pieces(self, first: int) -> Iterator[Any]:
        """What the loader gives, epoch after epoch."""
        loader = self.loader() if callable(self.loader) and not _is_loader(self.loader) else self.loader
        if _is_indexed(loader) and type(loader).__module__.partition(".")[0] == "grain":
            # Of an index beyond its length it draws the order of the next epoch.
            yield from (_plain(loader[i]) for i in itertools.count(first))
        if _is_indexed(loader):
            yield from (_plain(loader[i]) for i in range(first % len(loader), len(loader)))
        while True:
            rows = 0
            for batch in _once(loader):
                piece = _plain(batch)
                rows += _size(piece)
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


def _plain(batch: Any) -> Any:
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


def _size(batch: Any) -> int:
    """Rows of a batch.

    :raises ValueError: if its arrays have different numbers of them.
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
        num = _size(piece)
        size, tree = size or num, found
        if not held and num == size:
            yield piece
            continue
        held.append([np.array(leaf) for leaf in leaves])  # copies: a loader may use its arrays again
        count += num
        if count >= size:
            whole = [np.concatenate(parts) for parts in zip(*held, strict=True)]
            for start in range(0, count - size + 1, size):
                yield jax.tree.unflatten(tree, [a[start : start + size] for a in whole])
            rest = count % size
            held, count = ([[a[-rest:] for a in whole]], rest) if rest else ([], 0)


class Streamed:
    """Batches of a source, as the loop asks for them: the same interface as :class:`~numpyro_orthgp.training.batches.Batches`.

    :param source: a :class:`Source`.
    :param batch_size: that the user said; None for the source's.
    :param seed: words of the run's key, which have no say in the rows.
    :raises TypeError: for batches that are not numeric arrays in a tuple or dict.
    :raises ValueError: for a ``batch_size`` that is not the source's, and a source that gives nothing.
    """

    is_full = False
    group_size = 1
    blocks = None

    def __init__(self, source: Source, batch_size: int | None, seed: tuple[int, ...]) -> None:
        if isinstance(source, type):
            raise TypeError(f"`data` must be a source, not its class {source.__name__}.")
        self.source, self.seed = source, seed
        self.num_rows = check_integer("num_rows", source.num_rows)
        self.counts: list[int] = getattr(source, "counts", [])
        self.counts.clear()
        self.steps, self.at = iter(source.batches(0)), 0
        self.recent: dict[int, Batch] = {}
        self.marks: dict[int, str] = {}
        self.expected: tuple[int, str, str] | None = None
        # The first batch is looked at before it is taken, and not every source can give it twice.
        first = next(self.steps, None)
        if first is None:
            raise ValueError("The source of `data` gave no batch.")
        self.steps = itertools.chain([first], self.steps)
        leaves, self.tree = jax.tree_util.tree_flatten_with_path(_plain(first))
        self.names = ["data" + jax.tree_util.keystr(path) for path, _ in leaves]
        self.arrays = [np.array(as_array(name, leaf)) for name, (_, leaf) in zip(self.names, leaves, strict=True)]
        self.dtypes = [jax.dtypes.canonicalize_dtype(a.dtype.newbyteorder("=")) for a in self.arrays]
        self.batch_size = _size(first)
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
        """The first batch, as the data that a result is asked about."""
        return jax.tree.unflatten(self.tree, self.arrays)

    def everything(self, put: Put) -> Batch:
        raise ValueError("A source of `data` gives batches, not all rows at once.")

    def go_to(self, step: int) -> None:
        """Be at a step, by the source or, where it has begun and a new beginning may differ, by dropping what comes before."""
        if step == self.at:
            return
        if step > self.at and isinstance(self.source, Stream) and not self.source.is_even():
            next(itertools.islice(self.steps, step - self.at - 1, None), None)
        else:
            self.steps = iter(self.source.batches(step))
        self.at = step

    def mark(self, step: int) -> str | None:
        """A digest of the first row of the batch before a step; None if it was not read here."""
        return self.marks.get(step)

    def expect(self, step: int, mark: str | None, name: str) -> None:
        """Where a run goes on, the batch before its next step must be the one that it was: looked at if a step is taken.

        :param mark: of that batch when the file was written.
        :param name: of the file.
        """
        if step and mark is not None:
            self.expected = step, mark, name

    def _check_expected(self) -> None:
        """
        :raises ValueError: if it is another one.
        """
        if self.expected is None:
            return
        (step, mark, name), self.expected = self.expected, None
        self.go_to(step - 1)
        batch = next(self.steps, None)
        self.at = step
        if batch is None or _mark(jax.tree.leaves(_plain(batch))) != mark:
            raise ValueError(
                f"`checkpoint` {name}: the source of `data` gives another batch of step {step} than when the file was written, so "
                "it cannot go on exactly. Shuffle by a seed of its own, and make the loader anew for each call of `fit`: "
                "Stream(lambda: make_loader(), N). Or pass resume='anyway' to go on with what it gives."
            )

    def stacked(self, step: int, num: int, capacity: int, put: Put) -> Batch:
        """Batches of ``num`` steps from ``step`` on, arrays of shape (capacity, B, ...) of which the rest is zeros.

        Those of the last calls are kept, to which a fit may return, since not every source can.

        :raises ValueError: for a source that ends, or whose batches change their shapes.
        """
        if step in self.recent:
            return self.recent[step]
        self._check_expected()
        self.go_to(step)
        shapes = [(capacity, self.batch_size, *shape) for shape in self.row_shapes]
        stacks = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]
        for i in range(num):
            batch = next(self.steps, None)
            if batch is None:
                raise ValueError(
                    f"The source of `data` ended after {self.at + i} batches, and the fit wants more. Ask for fewer steps, or pass "
                    "what can be begun anew: a loader, or a function that makes the iterator."
                )
            self._put_batch(_plain(batch), [stack[i] for stack in stacks], self.at + i)
        self.at += num
        self._warn_of_counts()
        arrays = [
            put(shape, dtype, 1, lambda index, a=stack: a[index])  # type: ignore[misc]
            for shape, dtype, stack in zip(shapes, self.dtypes, stacks, strict=True)
        ]
        self.recent = dict(list(self.recent.items())[-2:])
        self.recent[step] = Batch(jax.tree.unflatten(self.tree, arrays), None)
        return self.recent[step]

    def _warn_of_counts(self) -> None:
        """Once: loaders that leave a short last batch out are meant to, as are generators of several epochs."""
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
        leaves, tree = jax.tree.flatten(batch)
        arrays = [as_array(name, leaf) for name, leaf in zip(self.names, leaves, strict=False)]
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
    content = b"".join(np.asarray(a[0]).tobytes() for a in arrays)
    return hashlib.blake2b(content, digest_size=8).hexdigest()
