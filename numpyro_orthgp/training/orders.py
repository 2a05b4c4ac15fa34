"""Orders of the rows in an epoch: permutations of rows, of groups of rows, and of blocks on disk.

The rows of all steps are one endless sequence of epochs. Every order finds the row at any position without going through earlier
positions. Each epoch has every row once, and the row at any one position is uniformly distributed, which keeps minibatch losses
unbiased. For more than ``LARGE`` single rows the permutation is computed, not drawn, and the distribution is as uniform as this
pseudo-random permutation. Orders depend only on the seed and the epoch number (``numpy.random.Philox``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpyro_orthgp.errors import check_integer

__all__ = [
    "ROUNDS", "BlockOrder", "Blocks", "Part", "RowOrder", "Turns", "generator_of", "parts_of", "permuted", "rows_between",
    "spread",
]  # fmt: skip

LARGE = 2**24  # from this many rows on, an order is computed position by position, not drawn as a whole
ROUNDS = 6  # of a Feistel network. With four, neighbours stay together more often than by chance


@dataclass(frozen=True)
class Blocks:
    """Block shuffles, for data on disk: blocks of consecutive rows are read in random order, and a few are held in memory.

    Each epoch reads every block once, in one piece. The rows of ``held`` random blocks are shuffled together and cut into batches;
    then come the next ``held`` blocks. The cost of an epoch's order grows with the number of blocks. The rows of a batch come from
    ``held`` places in the data. If rows are sorted, for example by time, a batch covers fewer places than random rows would, and
    its gradient has more variance, but no bias. To reduce the variance, use more and smaller blocks, or shuffle the data once when
    they are written.

    :param size: rows of a block; by default about a megabyte, rounded to whole chunks of the stored data.
    :param held: blocks that are shuffled together; by default 64, or fewer if these exceed 128 MB.
    :raises ValueError: if one is not a positive integer.
    """

    size: int | None = None
    held: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "held"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))


class Part(NamedTuple):
    """Positions of one epoch."""

    epoch: int
    first: int
    last: int


def parts_of(start: int, stop: int, length: int) -> Iterator[Part]:
    """Positions ``start`` to ``stop`` of the endless sequence, epoch by epoch.

    :param length: positions of an epoch.
    """
    while start < stop:
        epoch, first = divmod(start, length)
        last = min(first + stop - start, length)
        yield Part(epoch, first, last)
        start += last - first


def generator_of(seed: tuple[int, ...], *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def spread(generator: np.random.Generator, num: int, size: int) -> np.ndarray:
    """A random order of ``num`` items in which each run of ``size`` items has one from each of ``size`` stretches.

    Consecutive groups are near each other, and nearby rows have similar losses. So the mean of a batch with one item per stretch
    has less variance than with items drawn at random (stratified sampling). Each item still comes once.
    """
    order = generator.permutation(num)
    stretch = np.arange(num) * size // num
    order = order[np.argsort(stretch[order], kind="stable")]  # by stretches, in random order within each
    rank = np.arange(num) - np.searchsorted(stretch, stretch)
    return order[np.lexsort((stretch, rank))]


def permuted(index: np.ndarray, num: int, keys: np.ndarray) -> np.ndarray:
    """The image of ``index`` under a pseudo-random permutation of 0..num-1. Cost and memory do not depend on ``num``.

    A Feistel network permutes all numbers with the least even number of bits that ``num`` fits into. Images beyond ``num`` go
    through it again until they are not (cycle walking, Black and Rogaway 2002), fewer than four times on average.

    :param keys: keys of the rounds, uint64.
    """
    half = np.uint64(max(1, ((num - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = np.asarray(index, np.uint64)
    wild = np.arange(out.size)
    while wild.size:
        left, right = out[wild] >> half, out[wild] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        out[wild] = (left << half) | right
        wild = wild[out[wild] >= num]
    return out.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RowOrder:
    """Rows, or groups of consecutive rows, in random order.

    :param num_rows: N.
    :param batch_size: rows of a step.
    :param group_size: rows that stay together.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: tuple[int, ...], group_size: int = 1) -> None:
        self.num_rows, self.batch_size, self.seed, self.group_size = num_rows, batch_size, seed, group_size
        # Rows of an epoch. A short last group would not fit into batches of whole groups.
        self.length = num_rows // group_size * group_size
        self._orders: dict[int, np.ndarray] = {}

    def rows(self, part: Part) -> np.ndarray:
        if self.group_size == 1 and self.num_rows > LARGE:
            keys = generator_of(self.seed, part.epoch).integers(0, 2**64, ROUNDS, np.uint64)
            return permuted(np.arange(part.first, part.last), self.num_rows, keys)
        return self.order(part.epoch)[part.first : part.last]

    def order(self, epoch: int) -> np.ndarray:
        """All row numbers in the order of an epoch, shape (N,); with groups all but those of a short one."""
        if epoch not in self._orders:
            # Two orders are kept, since steps may cross the end of an epoch.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
            generator = generator_of(self.seed, epoch)
            self._orders[epoch] = self._rows(generator) if self.group_size == 1 else self._groups(generator)
        return self._orders[epoch]

    def _rows(self, generator: np.random.Generator) -> np.ndarray:
        order = np.arange(self.num_rows, dtype=np.int32)
        generator.shuffle(order)
        return order

    def _groups(self, generator: np.random.Generator) -> np.ndarray:
        """Whole groups in random order. The surplus rows replace as many rows of a random group, or are left out.

        Each row is left out with the same probability, so that losses are unbiased.
        """
        G, N, num = self.group_size, self.num_rows, self.length
        order = spread(generator, num // G, self.batch_size // G)[:, None] * G + np.arange(G)
        left = N - num
        if left and generator.uniform() < num / N:
            order[generator.integers(len(order)), generator.choice(G, left, replace=False)] = np.arange(num, N)
        return order.ravel()


def rows_between(order: Any, start: int, stop: int) -> np.ndarray:
    """The row numbers at these positions of an order's endless sequence."""
    rows = [order.rows(part) for part in parts_of(start, stop, order.length)]
    return np.concatenate(rows) if rows else np.zeros(0, np.int32)


class Turns:
    """Assigns the positions of an epoch to owners, each of which has its own rows.

    Owners take turns in proportion to their rows, as evenly as whole numbers allow. So each owner's share of a batch is nearly its
    share of the data (proportional stratified sampling). The sequence of an epoch is rotated by a random number. So each position
    belongs to an owner with a probability equal to the owner's share of rows. As an owner's rows are in random order, every row is
    equally likely at a position. An owner's turns before a position are counted directly, without going through earlier positions.

    :param lengths: number of rows of each owner.
    """

    def __init__(self, lengths: Sequence[int], seed: tuple[int, ...]) -> None:
        self.lengths, self.num_rows, self.seed = lengths, sum(lengths), seed

    def before(self, positions: Any) -> np.ndarray:
        """How many rows of each owner come before these positions of the endless sequence, shape (positions, owners).

        :param positions: whole numbers.
        """
        # Products of two row counts must fit in.
        positions = np.asarray(positions, np.int64 if self.num_rows < 2**31 else object)
        epoch, position = positions // self.num_rows, positions % self.num_rows
        shifts = {e: int(generator_of(self.seed, int(e)).integers(self.num_rows)) for e in set(epoch.tolist())}
        shift = np.asarray([shifts[e] for e in epoch.tolist()], epoch.dtype)
        return epoch[:, None] * np.asarray(self.lengths) + self._cyclic(position + shift) - self._cyclic(shift)

    def _cyclic(self, position: np.ndarray) -> np.ndarray:
        """The same for the sequence without rotation, repeated endlessly."""
        turns, rest = position // self.num_rows, position % self.num_rows
        found, left = [], self.num_rows
        for length in self.lengths:
            # This owner's share of the positions left for it and later owners. It never falls as the position grows.
            own = rest * length // left
            found.append(own + turns * length)
            rest, left = rest - own, left - length
        return np.stack(found, 1)


class _Epoch(NamedTuple):
    blocks: np.ndarray  # in random order
    ends: np.ndarray  # positions at which windows end
    shift: int
    replaced: np.ndarray  # rows whose places surplus rows take


class Slot(NamedTuple):
    """Location of rows: the window of an epoch, and the ``places`` in the concatenated blocks of the window."""

    epoch: int
    window: int
    places: np.ndarray


class BlockOrder:
    """Blocks in random order. The rows of ``held`` blocks (a window) are shuffled together.

    The sequence of windows is then rotated by a random number. Without the rotation, the rows of a shorter last block would be at
    some positions more often than at others.

    With groups, a window's groups are shuffled and stay whole. If N is not a multiple of their size, surplus rows are as in
    :class:`RowOrder`: they take the places of rows of a random group, or are left out.

    :param num_rows: N.
    :param size: rows of a block, whole groups; the last one may have fewer.
    :param held: blocks in a window.
    :param group_size: rows that stay together.
    :param batch_size: rows of a step, whose groups come from as many stretches of a window.
    """

    def __init__(
        self, num_rows: int, size: int, held: int, seed: tuple[int, ...], group_size: int = 1, batch_size: int = 1
    ) -> None:
        self.num_rows, self.size, self.held, self.seed = num_rows, size, held, seed
        self.group_size, self.batch_size = group_size, batch_size
        self.length = num_rows // group_size * group_size
        self.num_blocks = -(-self.length // size)
        self._epochs: dict[int, _Epoch] = {}
        self._places: dict[tuple[int, int], np.ndarray] = {}

    def epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            self._epochs = {e: o for e, o in self._epochs.items() if abs(e - number) == 1}
            generator = generator_of(self.seed, number)
            blocks = generator.permutation(self.num_blocks)
            lengths = np.minimum(self.size, self.length - blocks * self.size)
            ends = np.cumsum(np.add.reduceat(lengths, np.arange(0, self.num_blocks, self.held)))
            shift = int(generator.integers(self.length // self.group_size)) * self.group_size
            self._epochs[number] = _Epoch(blocks, ends, shift, self._replaced(generator))
        return self._epochs[number]

    def _replaced(self, generator: np.random.Generator) -> np.ndarray:
        """The rows whose places the surplus rows take; each row is left out with the same probability."""
        G, left = self.group_size, self.num_rows - self.length
        if not left or generator.uniform() >= self.length / self.num_rows:
            return np.zeros(0, int)
        return generator.integers(self.length // G) * G + generator.choice(G, left, replace=False)

    def window_at(self, position: int) -> tuple[tuple[int, int], int]:
        """The epoch and window of a position of the endless sequence, and the position where the next window starts."""
        number, place = divmod(position, self.length)
        _, ends, shift, _ = self.epoch(number)
        shifted = (place + shift) % self.length
        window = int(np.searchsorted(ends, shifted, "right"))
        return (number, window), position + min(int(ends[window]) - shifted, self.length - place)

    def blocks(self, epoch: int, window: int) -> list[slice]:
        """The rows of a window, block by block, in the order of the data; last the surplus rows, if they are in this window."""
        found = [slice(start, min(start + self.size, self.length)) for start in self._starts(epoch, window).tolist()]
        return [*found, slice(self.length, self.num_rows)] if self._replaced_places(epoch, window).size else found

    def _starts(self, epoch: int, window: int) -> np.ndarray:
        return np.sort(self.epoch(epoch).blocks[window * self.held : (window + 1) * self.held]) * self.size

    def _replaced_places(self, epoch: int, window: int) -> np.ndarray:
        """Places of the replaced rows among the concatenated blocks; empty if they are in another window."""
        replaced, starts = self.epoch(epoch).replaced, self._starts(epoch, window)
        if not replaced.size:
            return replaced
        block = np.flatnonzero(starts == replaced[0] // self.size * self.size)
        return replaced % self.size + block[0] * self.size if block.size else replaced[:0]

    def slots(self, part: Part) -> Iterator[Slot]:
        """Locations of the rows at these positions."""
        _, ends, shift, _ = self.epoch(part.epoch)
        for turn in parts_of(
            part.first + shift, part.last + shift, self.length
        ):  # across the end of the rotated sequence
            position = turn.first
            while position < turn.last:
                window = int(np.searchsorted(ends, position, "right"))
                begin = int(ends[window - 1]) if window else 0
                last = min(turn.last, int(ends[window]))
                yield Slot(part.epoch, window, self.places(part.epoch, window)[position - begin : last - begin])
                position = last

    def places(self, epoch: int, window: int) -> np.ndarray:
        """The order of the rows of a window."""
        key = (epoch, window)
        if key not in self._places:
            self._places = dict(list(self._places.items())[-1:])
            num, generator = self._num_places(epoch, window), generator_of(self.seed, epoch, window)
            self._places[key] = np.arange(num, dtype=np.int32 if num < 2**31 else np.int64)
            if self.group_size == 1:
                generator.shuffle(self._places[key])
            else:
                self._places[key] = self._groups(generator, num, self._replaced_places(epoch, window))
        return self._places[key]

    def _num_places(self, epoch: int, window: int) -> int:
        """Positions of a window."""
        return int(np.minimum(self.size, self.length - self._starts(epoch, window)).sum())

    def _groups(self, generator: np.random.Generator, num: int, replaced: np.ndarray) -> np.ndarray:
        G = self.group_size
        places = (spread(generator, num // G, max(1, self.batch_size // G))[:, None] * G + np.arange(G)).ravel()
        if replaced.size:
            place_of = np.argsort(places)
            places[place_of[replaced]] = np.arange(num, num + replaced.size)
        return places

    def rows(self, part: Part) -> np.ndarray:
        found = []
        for epoch, window, places in self.slots(part):
            starts, num = self._starts(epoch, window), self._num_places(epoch, window)
            own = np.minimum(places, num - 1)
            rows = starts[own // self.size] + own % self.size  # a short block is the last of its window
            found.append(np.where(places < num, rows, places - num + self.length))
        return np.concatenate(found)
