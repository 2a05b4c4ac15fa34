"""What `fit` guarantees holds for every source of data: lazy arrays, tables, loaders, functions."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_orthgp as ogp
from numpyro_orthgp.training import Blocks, Source, Stream, checkpoint, columns, digest, orders
from numpyro_orthgp.training.arrays import as_array
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.loop import seed_of
from numpyro_orthgp.training.orders import BlockOrder, Part, RowOrder, parts_of, permuted
from numpyro_orthgp.training.streamed import Streamed
from numpyro_orthgp.training.streams import size_of
from tests.fitting import KEY, N, assert_close, assert_same_bits, data, make

SIZE, STEPS = 8, 40
BLOCKS = Blocks(size=9, held=2)


# ---------------------------------------------------------------- sources, made anew at each call as a new process would


def in_h5py(folder, arrays):
    h5py = pytest.importorskip("h5py")
    path = folder / "data.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.create_dataset("X", data=arrays[0], chunks=(7, 3))
            file["y"] = arrays[1]
    file = h5py.File(path, "r")
    return file["X"], file["y"]


def in_zarr(folder, arrays):
    zarr = pytest.importorskip("zarr")
    path = folder / "data.zarr"
    if not path.exists():
        group = zarr.open_group(path, mode="w")
        for name, array in zip("Xy", arrays, strict=True):
            group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(9, *array.shape[1:]))[:] = array
    group = zarr.open_group(path, mode="r")
    return group["X"], group["y"]


def in_memmap(folder, arrays):
    found = []
    for name, array in zip("Xy", arrays, strict=True):
        if not (folder / f"{name}.npy").exists():
            np.save(folder / f"{name}.npy", array)
        found.append(np.load(folder / f"{name}.npy", mmap_mode="r"))
    return tuple(found)


def arrow(arrays):
    pyarrow = pytest.importorskip("pyarrow")
    X, y = arrays
    return pyarrow.table({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": y, "name": ["x"] * len(y)})


def in_parquet(folder, arrays):
    table, path = arrow(arrays), folder / "data.parquet"
    if not path.exists():
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path, row_group_size=9)
    return columns(path, X=["a", "b", "c"], y="y")


def in_columns(arrays):
    """A sparse matrix in a format whose rows cannot be cut."""
    return pytest.importorskip("scipy.sparse").csc_array(arrays[0]), arrays[1]


def pieces(arrays, order, size):
    return [tuple(a[order[i : i + size]] for a in arrays) for i in range(0, len(order), size)]


class Loader:
    """As torch's: shuffles by a generator that goes on from epoch to epoch; the last batch of an epoch is short."""

    def __init__(self, arrays, size=6):
        self.arrays, self.size, self.generator = arrays, size, np.random.default_rng(5)
        self.dataset = range(len(arrays[0]))

    def __len__(self):
        return -(-len(self.dataset) // self.size)

    def __iter__(self):
        yield from map(list, pieces(self.arrays, self.generator.permutation(len(self.dataset)), self.size))


class TensorFlowLike:
    """As ``tf.data.Dataset``: NumPy's arrays come from a method."""

    def __init__(self, arrays):
        self.loader = Loader(arrays, SIZE)

    def __iter__(self):
        pytest.fail("arrays of its own kind were asked for")

    def as_numpy_iterator(self):
        return iter(self.loader)


class Own:
    """The protocol, without a base class."""

    def __init__(self, arrays):
        self.arrays, self.num_rows = arrays, len(arrays[0])

    def batches(self, step):
        for i in itertools.count(step):
            rows = np.random.default_rng([1, i]).choice(self.num_rows, SIZE, replace=False)
            yield {"X": self.arrays[0][rows], "y": jnp.asarray(self.arrays[1][rows])}


def grain_dataset(arrays):
    grain = pytest.importorskip("grain")
    rows = [tuple(np.asarray(a[i]) for a in arrays) for i in range(len(arrays[0]))]
    return grain.MapDataset.source(rows).shuffle(seed=4)


def generated(arrays):
    def make():
        generator = np.random.default_rng(2)
        for _ in range(3):
            yield from pieces(arrays, generator.permutation(len(arrays[0])), 10)

    return make


SOURCES = {
    "h5py": lambda folder, arrays: in_h5py(folder, arrays),
    "zarr": lambda folder, arrays: in_zarr(folder, arrays),
    "memmap": lambda folder, arrays: in_memmap(folder, arrays),
    "parquet": lambda folder, arrays: in_parquet(folder, arrays),
    "arrow": lambda folder, arrays: columns(arrow(arrays), X=["a", "b", "c"], y="y"),
    "sparse": lambda folder, arrays: in_columns(arrays),
    "grain.MapDataset": lambda folder, arrays: Stream(grain_dataset(arrays).batch(SIZE, drop_remainder=True), N),
    "grain.IterDataset": lambda folder, arrays: Stream(grain_dataset(arrays).to_iter_dataset().batch(SIZE), N),
    "list": lambda folder, arrays: Stream(pieces(arrays, np.arange(len(arrays[0])), 7), N, batch_size=SIZE),
    "as torch": lambda folder, arrays: Stream(Loader(arrays), batch_size=SIZE),
    "as tf.data": lambda folder, arrays: Stream(TensorFlowLike(arrays), N),
    "function": lambda folder, arrays: Stream(lambda: Loader(arrays), N, batch_size=SIZE),
    "generator": lambda folder, arrays: Stream(generated(arrays), N, batch_size=SIZE),
    "own": lambda folder, arrays: Own(arrays),
}
ON_DISK = ("h5py", "zarr", "memmap", "parquet", "arrow", "sparse")


def fit(kind, folder, arrays=None, svi=None, **options):
    """Of a source that is made anew."""
    source = SOURCES[kind](folder, data() if arrays is None else arrays)
    options = {"progress_bar": False, "steps_per_call": 3, "checkpoint_every": 5, "num_steps": STEPS} | options
    if kind in ON_DISK:
        options = {"batch_size": SIZE, "shuffle": BLOCKS} | options
    return ogp.fit(svi or make(), KEY, source, **options)


@pytest.fixture(scope="module", params=SOURCES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def whole(kind, folder):
    """The run without interruption."""
    return fit(kind, folder)


def batches_of(kind, folder, num):
    """What ``num`` steps should see, read by itself and not by `fit`."""
    source = SOURCES[kind](folder, data())
    if kind in ON_DISK:
        rows = Batches(source, SIZE, seed_of(KEY), shuffle=BLOCKS).row_numbers(0, num)
        return [tuple(a[row] for a in data()) for row in rows]
    if kind == "own":
        return [(b["X"], b["y"]) for b in itertools.islice(source.batches(0), num)]
    if kind == "grain.MapDataset":
        return [source.loader[i] for i in range(num)]
    if kind == "list":
        rows = np.resize(np.arange(N), num * SIZE)
    elif kind == "grain.IterDataset":  # begins anew
        epoch = list(source.loader)
        rows = None
    else:
        generator = np.random.default_rng(2 if kind == "generator" else 5)
        rows = np.concatenate([generator.permutation(N) for _ in range(num)])
        if kind == "generator":
            rows = np.resize(rows[: 3 * N], num * SIZE)
    if rows is None:
        joined = [np.concatenate([b[i] for b in epoch]) for i in (0, 1)]
        index = np.resize(np.arange(len(joined[0])), num * SIZE).reshape(num, SIZE)
        return [tuple(a[i] for a in joined) for i in index]
    return [tuple(a[row] for a in data()) for row in rows[: num * SIZE].reshape(num, SIZE)]


# ---------------------------------------------------------------- for every source


def test_steps_see_these_batches(kind, folder, whole):
    svi = make()
    update = jax.jit(svi.update)
    batches = batches_of(kind, folder, STEPS)
    state, losses = svi.init(KEY, *map(jnp.asarray, batches[0])), []
    for batch in batches:
        state, loss = update(state, *map(jnp.asarray, batch))
        losses.append(loss)
    assert_close((whole.losses, whole.state), (np.asarray(losses), state))
    assert whole.status == "finished"


def stop_at(step, error):
    def callback(progress):
        if progress.step >= step:
            raise error

    return callback


def test_an_interrupted_run_goes_on_exactly(kind, folder, whole, tmp_path):
    path = tmp_path / "run.npz"
    stopped = fit(kind, folder, checkpoint=path, callback=stop_at(17, KeyboardInterrupt))
    assert stopped.status == "interrupted" and len(stopped.losses) == 18
    seen = []
    assert_same_bits(tuple(fit(kind, folder, checkpoint=path, callback=seen.append)), tuple(whole))
    assert seen[0].step - len(seen[0].losses) == 18


def test_a_crash_goes_on_from_its_step(kind, folder, whole, tmp_path):
    path = tmp_path / "run.npz"
    with pytest.raises(OSError, match="a crash"):
        fit(kind, folder, checkpoint=path, callback=stop_at(13, OSError("a crash")))
    assert_same_bits(tuple(fit(kind, folder, checkpoint=path)), tuple(whole))


@pytest.mark.parametrize("has_file", [False, True])
def test_an_error_of_a_source_loses_no_step(tmp_path, has_file):
    """The reader is a call ahead of the device: the batch of step 10 is read during the second call of four steps."""
    arrays = data()

    class Failing(Own):
        fails = True

        def batches(self, step):
            for i, batch in enumerate(super().batches(step), step):
                if self.fails and i == 9:
                    raise OSError("the disk is gone")
                yield batch

    path, source, steps = tmp_path / "run.npz", Failing(arrays), {"num_steps": 20, "steps_per_call": 4}
    options = {"progress_bar": False, "checkpoint_every": 10**6} | steps | ({"checkpoint": path} if has_file else {})
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        ogp.fit(make(), KEY, source, callback=seen.append, **options)
    assert [p.step for p in seen] == [4, 8]
    if has_file:
        with np.load(path) as file:
            assert len(file["losses"]) == 8
        source.fails = False
        again = ogp.fit(make(), KEY, source, callback=seen.append, **options)
        assert seen[2].step - len(seen[2].losses) == 8
        assert_same_bits(tuple(again), tuple(ogp.fit(make(), KEY, Own(arrays), progress_bar=False, **steps)))


def test_a_full_disk_does_not_lose_the_fit(kind, folder, whole, tmp_path, monkeypatch):
    path, write, calls = tmp_path / "run.npz", checkpoint.write, []

    def fails_from_the_third(path, content):
        calls.append(path)
        if len(calls) > 2:
            raise OSError("no space left")
        write(path, content)

    monkeypatch.setattr(checkpoint, "write", fails_from_the_third)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fit(kind, folder, checkpoint=path)
    assert "could not be written after step 15: no space left" in str(said[0].message)
    assert_same_bits((result.params, result.losses), (whole.params, whole.losses))
    monkeypatch.undo()
    assert_same_bits(fit(kind, folder, checkpoint=path).params, whole.params)


def test_nan_returns_the_last_good_state(kind, tmp_path):
    """A row that is NaN: the step that meets it is found, and the state before it is the same however calls end."""
    X, y = data()
    batches = batches_of(kind, tmp_path, STEPS)
    for path in tmp_path.iterdir():  # of files that were made with the data as they are
        os.rename(path, tmp_path.parent / f"{tmp_path.name}-{path.name}")
    bad = 5
    y[np.flatnonzero(np.isin(y, batches[bad][1]) & ~np.isin(y, np.concatenate([b[1] for b in batches[:bad]])))[:1]] = (
        np.nan
    )
    assert np.isnan(y).any()
    states = []
    for steps_per_call in (1, 3, 5):
        with pytest.warns(RuntimeWarning, match=rf"loss of step {bad + 1} is (nan|inf)"):
            result = fit(kind, tmp_path, (X, y), steps_per_call=steps_per_call)
        assert (result.status, result.num_steps, len(result.losses)) == ("diverged", bad - 1, bad)
        states.append(result.state)
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[0], states[2])


def test_other_data_are_refused(kind, folder, tmp_path):
    path = tmp_path / "run.npz"
    fit(kind, folder, num_steps=5, checkpoint=path)
    X, y = data()
    with pytest.raises(ValueError, match=r"differ in the values of data"):
        fit(kind, tmp_path, (X, 2 * y), num_steps=10, checkpoint=path)


def test_a_result_has_its_rows(kind, whole):
    """Posteriors and checks are of all rows, or of the batch that a stream left."""
    args, keywords = whole._fitted.arguments(np.asarray([0, 3, 7]))
    X, y = args or (keywords["X"], keywords["y"])
    if kind in ON_DISK:
        assert_same_bits((X, y), tuple(a[[0, 3, 7]] for a in data()))
    else:
        assert X.shape == (3, 3) and np.isin(y, data()[1]).all()
        with pytest.raises(ValueError, match="as a stream, of which it keeps one batch"):
            whole._fitted.arguments()


# ---------------------------------------------------------------- processes

SCRIPT = """
import os, signal, sys
from pathlib import Path
import jax, pytest
jax.config.update("jax_enable_x64", True)
from tests.test_fit_sources import SOURCES, fit

folder = Path(sys.argv[1])
for kind in SOURCES:
    (folder / kind).mkdir()
    try:
        fit(kind, folder / kind, num_steps=17, checkpoint=folder / kind / "run.npz")
    except pytest.skip.Exception:  # its library is not installed
        pass
fit(kind, folder / kind, checkpoint=folder / kind / "run.npz", callback=lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "4321"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], cwd=Path(__file__).parents[1], env=env, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    return folder


def test_another_process_goes_on_with_the_same_bits(kind, killed, whole):
    assert_same_bits(tuple(fit(kind, killed / kind, checkpoint=killed / kind / "run.npz")), tuple(whole))


# ---------------------------------------------------------------- orders


def epochs_of(order, num_rows, epochs=3):
    return np.stack(
        [
            np.concatenate([order.rows(Part(e, i, min(i + 7, num_rows))) for i in range(0, num_rows, 7)])
            for e in range(epochs)
        ]
    )


@pytest.mark.parametrize(
    "num_rows, size, held", [(50, 9, 2), (50, 50, 2), (50, 1, 3), (48, 8, 6), (7, 3, 1), (1, 1, 2)]
)
def test_blocks_give_every_row_once(num_rows, size, held):
    order = BlockOrder(num_rows, size, held, (0, 1))
    found = epochs_of(order, num_rows)
    assert (np.sort(found, axis=1) == np.arange(num_rows)).all()
    again = BlockOrder(num_rows, size, held, (0, 1))
    for epoch in (2, 0, 1):  # any epoch by itself, in any order
        assert_same_bits(again.rows(Part(epoch, 0, num_rows)), found[epoch])
    assert num_rows < 8 or len({tuple(e) for e in found}) == 3


@pytest.mark.parametrize("kind_of_order", ["blocks", "computed"])
def test_rows_at_a_position_are_uniform(kind_of_order, monkeypatch):
    """Of blocks also where the last is short."""
    monkeypatch.setattr(orders, "LARGE", 4)
    num = 7 if kind_of_order == "blocks" else 40
    make_order = lambda s: BlockOrder(num, 3, 1, (s,)) if kind_of_order == "blocks" else RowOrder(num, 2, (s,))  # noqa: E731
    draws = np.stack([make_order(seed).rows(Part(1, 0, num)) for seed in range(3000)])
    counts = np.stack([np.bincount(column, minlength=num) for column in draws.T])
    assert (np.abs(counts - 3000 / num) < 4.5 * np.sqrt(3000 / num * (1 - 1 / num))).all()


@pytest.mark.parametrize("num", [1, 2, 3, 17, 64, 1000])
def test_computed_permutations(num, monkeypatch):
    keys = np.random.default_rng(num).integers(0, 2**64, 6, np.uint64)
    found = permuted(np.arange(num), num, keys)
    assert (np.sort(found) == np.arange(num)).all()
    assert_same_bits(permuted(np.arange(num)[::-1][:5], num, keys), found[::-1][:5])
    monkeypatch.setattr(orders, "LARGE", 0)
    assert (np.sort(epochs_of(RowOrder(num, 1, (2,)), num), axis=1) == np.arange(num)).all()


def test_pairs_of_a_computed_permutation_are_as_of_a_random_one(monkeypatch):
    """How often neighbours stay neighbours, and the correlation of place and row, over many seeds."""
    monkeypatch.setattr(orders, "LARGE", 4)
    num, seeds = 200, 400
    draws = np.stack([RowOrder(num, 2, (s,)).rows(Part(0, 0, num)) for s in range(seeds)])
    near = (np.abs(np.diff(draws, axis=1)) == 1).sum(1)  # 2 of a random permutation, with variance about 2
    assert abs(near.mean() - 2 * (num - 1) / num) < 4.5 * np.sqrt(2 / seeds)
    correlations = [np.corrcoef(np.arange(num), d)[0, 1] for d in draws]
    assert abs(np.mean(correlations)) < 4.5 / np.sqrt(num * seeds) and 0.8 < np.std(correlations) * np.sqrt(num) < 1.2


def test_an_order_costs_nothing_for_each_row():
    order = BlockOrder(10**12, 10**9, 1, (0,))
    assert order.num_blocks == 1000 and len(order.epoch(3).blocks) == 1000
    rows = RowOrder(10**12, 8, (0,)).rows(Part(3, 10**11, 10**11 + 8))
    assert len(set(rows.tolist())) == 8 and rows.max() < 10**12 and rows.max() > 10**10


def test_lazy_arrays_are_read_by_blocks_and_once_an_epoch(tmp_path):
    class Spy:
        chunks, shape, dtype = (3,), (N,), np.dtype(float)
        read = []

        def __getitem__(self, rows):
            self.read.append(rows)
            return data()[1][rows]

    batches = Batches((Spy(),), SIZE, (0,), shuffle=BLOCKS)
    assert batches.blocks == (9, 2)
    put = lambda shape, dtype, axis, read: jnp.asarray(read((slice(None),) * len(shape)))  # noqa: E731
    for step in range(0, 50, 5):
        got = batches.stacked(step, 5, 5, put)
        assert_same_bits(got.data[0], data()[1][np.asarray(got.rows)])
    lengths = [s.stop - s.start for s in Spy.read]
    assert max(lengths) == 9 and sum(lengths) <= 8 * (N + 2 * 9)  # the window where an epoch begins is read twice
    assert Batches((Spy(),), SIZE, (0,)).blocks == (N, 64)  # of a megabyte


# ---------------------------------------------------------------- words

X, y = data()


def run(source, svi=None, **options):
    return ogp.fit(
        svi or make(), KEY, source, **({"num_steps": 20, "progress_bar": False, "steps_per_call": 4} | options)
    )


def pairs(size=8, arrays=(X, y)):
    return pieces(arrays, np.arange(len(arrays[0])), size)


class Odd:
    """A source with other batches than it should have."""

    num_rows = N

    def __init__(self, *batches):
        self.given = batches

    def batches(self, step):
        return iter(self.given[step:])


EIGHT = (X[:8], y[:8])
WRONG = {
    "an iterator with a checkpoint": (lambda: Stream(iter(pairs()), N), {"checkpoint": "run.npz"}, ValueError,
        "`checkpoint` needs batches that can be read again.*an iterator gives them once.*function that makes it"),
    "an iterator that ends": (lambda: Stream(iter(pairs()), N), {}, ValueError, "ended after 6 batches.*a function that makes"),
    "a loader of unknown length": (lambda: Stream(pairs()), {}, ValueError,
        r"How many rows a list gives in an epoch is not known.*Stream\(loader, num_rows=N\).*sum\("),
    "no loader": (lambda: Stream(3, N), {}, TypeError, "`loader` must be an iterable of batches.*got int"),
    "an empty loader": (lambda: Stream(iter([]), N), {}, ValueError, "gave no batch"),
    "batch size": (lambda: Stream(pairs(), N), {"batch_size": 4}, ValueError,
        r"`batch_size` is the source's, 8; got 4. Leave it out, or say it in Stream\(loader, batch_size=4\)"),
    "groups": (lambda: Stream(pairs(), N), {"group_size": 2}, ValueError, "`group_size` is for arrays, whose"),
    "blocks of a stream": (lambda: Stream(pairs(), N), {"shuffle": BLOCKS}, ValueError, "`shuffle` is for arrays, whose"),
    "blocks of what": (lambda: (X, y), {"shuffle": True}, TypeError, "`shuffle` must be a .*Blocks; got bool"),
    "groups in blocks": (lambda: (X, y), {"shuffle": BLOCKS, "batch_size": 8, "group_size": 2}, ValueError,
        "Blocks must be whole groups: `size` must be a multiple of 2; got 9"),
    "a bare array": (lambda: Stream([X[:8]], N), {}, TypeError, "A batch must be a tuple of arrays.*gave a ndarray"),
    "lengths": (lambda: Stream([(X[:8], y[:7])], N), {}, ValueError, r"same number of rows.*got \[7, 8\]"),
    "text": (lambda: Stream([(X[:1], np.asarray(["a"]))], N), {}, TypeError, r"`data\[1\]` must hold numbers"),
    "other shapes": (lambda: Odd(EIGHT, (X[:7], y[:7])), {}, ValueError, "that of step 2 has .*Stream cuts batches of any size"),
    "too few rows": (lambda: Stream([EIGHT], 5), {}, ValueError, "A batch has 8 rows, and the source has N = 5"),
    "a class": (lambda: Odd, {}, TypeError, "not its class Odd"),
    "a loader that is not wrapped": (lambda: Loader((X, y)), {}, TypeError,
        r"`data` must be a tuple.*got Loader.*Stream\(loader, num_rows=N\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, options, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        run(source(), **options)


def test_lbfgs_needs_all_rows():
    with pytest.raises(
        TypeError, match="`data` must be arrays here, since every step uses all rows; a Stream only gives batches"
    ):
        ogp.fit_lbfgs(make(), KEY, Stream(pairs(), N))


def test_a_loader_that_shuffles_otherwise_is_refused_where_it_goes_on(tmp_path):
    """Of which the first batch is the same: a generator without a seed comes later."""

    class Drifts(Loader):
        def __iter__(self):
            yield from super().__iter__()
            self.generator = np.random.default_rng()

    path = tmp_path / "run.npz"
    run(Stream(Drifts((X, y), 8)), checkpoint=path)
    with pytest.raises(
        ValueError, match=r"gives another batch of step 20 than when the file was written.*seed of its own"
    ):
        run(Stream(Drifts((X, y), 8)), checkpoint=path, num_steps=24)
    assert len(run(Stream(Drifts((X, y), 8)), checkpoint=path, num_steps=24, resume="anyway").losses) == 24


def test_an_order_that_begins_batches_with_the_same_rows_is_another(tmp_path):
    """A digest of one row of a batch would not see it, nor one of two in fifty orders drawn at random."""
    orders = [np.arange(48), np.arange(48)]
    orders[1].reshape(-1, 8)[1:, 1:] = (
        orders[1].reshape(-1, 8)[1:, :0:-1].copy()
    )  # the first batch is in the fingerprint
    sources = [Stream(lambda rows=rows: pieces((X, y), rows, 8), 48) for rows in orders]
    path = tmp_path / "run.npz"
    run(sources[0], checkpoint=path)
    with pytest.raises(ValueError, match=r"gives another batch of step 20 than when the file was written"):
        run(sources[1], checkpoint=path, num_steps=24)


class WithState:
    """As grain's: an iterator whose state can be taken and set. Batches of any size; the order is by the epoch's seed."""

    def __init__(self, arrays, size, state=lambda i: {"next": i}, back=lambda s: s["next"]):
        self.arrays, self.size, self.read = arrays, size, []
        self.state, self.back = state, back

    def __iter__(self):
        return _Iterator(self)


class _Iterator:
    def __init__(self, loader):
        self.loader, self.at = loader, 0
        self.order = np.random.default_rng(6).permutation(len(loader.arrays[0]))

    def __iter__(self):
        return self

    def __next__(self):
        rows = self.order[self.at : self.at + self.loader.size]
        if not len(rows):
            raise StopIteration
        self.loader.read.append(self.at)
        self.at += self.loader.size
        return tuple(a[rows] for a in self.loader.arrays)

    def get_state(self):
        return self.loader.state(self.at)

    def set_state(self, state):
        self.at = self.loader.back(state)


STATES = {
    "dict": (lambda i: {"next": i}, lambda s: s["next"]),
    "bytes": (lambda i: bytes([i]), lambda s: s[0]),
    "neither": (lambda i: {3: object(), "next": i}, lambda s: s["next"]),  # no JSON: batches are read again
}


@pytest.mark.parametrize("size", [3, 8, 20])
@pytest.mark.parametrize("kind_of_state", STATES)
def test_a_loader_with_a_state_goes_on_without_reading_again(size, kind_of_state, tmp_path):
    make_loader = lambda: WithState((X, y), size, *STATES[kind_of_state])  # noqa: E731
    wanted = run(Stream(make_loader(), N, batch_size=8), num_steps=40).losses
    for stop in (
        1,
        9,
        20,
        31,
    ):  # within an epoch and across the ends of some; a batch may begin in the middle of a piece
        path, loader = tmp_path / f"{stop}.npz", make_loader()
        run(Stream(loader, N, batch_size=8), num_steps=stop, checkpoint=path)
        before, loader = len(loader.read), make_loader()
        assert_same_bits(run(Stream(loader, N, batch_size=8), num_steps=40, checkpoint=path).losses, wanted)
        again = len(loader.read) - -(
            -(40 - stop) * 8 // size
        )  # but for the first batch, that of the step before, and ends
        if kind_of_state != "neither":
            assert again <= 2 * -(-8 // size) + 9, (again, before)
    if kind_of_state == "dict" and size == 8:
        assert loader.read[:3] == [0, 32, 40], "it went straight to the piece before the last batch of step 31"


def test_a_state_that_a_loader_does_not_take(tmp_path, caplog):
    """Grain refuses states if its description of the data differs, be it by an address: batches are then read again."""

    def refuse(state):
        raise ValueError("another sampler")

    path = tmp_path / "run.npz"
    run(Stream(WithState((X, y), 8), N), checkpoint=path)
    with pytest.raises(ValueError, match="gives another batch of step 20"):
        run(Stream(WithState((X, y), 8, back=lambda s: 8), N), checkpoint=path, num_steps=24)
    resumed = run(Stream(WithState((X, y), 8, back=refuse), N), checkpoint=path, num_steps=24)
    assert "does not take the state in" in caplog.text and "another sampler" in caplog.text
    assert_same_bits(resumed.losses, run(Stream(WithState((X, y), 8), N), num_steps=24).losses)


def test_loaders_of_grain_go_on_by_their_state(tmp_path):
    """Beside one that reads again; elements are counted where they are read."""
    grain = pytest.importorskip("grain")

    class Counted:
        def __init__(self):
            self.read = 0

        def __len__(self):
            return N

        def __repr__(self):  # grain compares it
            return "Counted"

        def __getitem__(self, i):
            self.read += 1
            return X[i], y[i]

    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)

    def dataset(elements):
        return grain.MapDataset.source(elements).shuffle(seed=4).repeat().to_iter_dataset(ahead).batch(6)

    def loader(elements):
        sampler = grain.samplers.IndexSampler(N, grain.sharding.NoSharding(), shuffle=True, seed=1)
        return grain.DataLoader(
            data_source=elements,
            sampler=sampler,
            operations=[grain.transforms.Batch(6)],
            worker_count=0,
            read_options=ahead,
        )

    for i, make_loader in enumerate((dataset, loader)):
        path = tmp_path / f"{i}.npz"
        run(Stream(make_loader(Counted()), N, batch_size=8), num_steps=200, checkpoint=path)
        elements = Counted()
        resumed = run(Stream(make_loader(elements), N, batch_size=8), num_steps=204, checkpoint=path)
        assert elements.read < 100, elements.read  # and not 1632
        assert_same_bits(resumed.losses, run(Stream(make_loader(Counted()), N, batch_size=8), num_steps=204).losses)


def test_a_finished_run_reads_one_batch(tmp_path):
    path, source, seen = tmp_path / "run.npz", pairs(), []
    first = run(Stream(lambda: (seen.append(i) or p for i, p in enumerate(source)), N), checkpoint=path)
    seen.clear()
    again = run(Stream(lambda: (seen.append(i) or p for i, p in enumerate(source)), N), checkpoint=path)
    assert_same_bits(again.losses, first.losses)
    assert seen == [0]


def test_a_loader_may_use_its_arrays_again():
    def reusing():
        held = [np.empty((6, 3)), np.empty(6)]
        for start in range(0, 48, 6):
            for into, a in zip(held, (X, y), strict=True):
                into[:] = a[start : start + 6]
            yield tuple(held)

    wanted = run(Stream(pairs(6, (X[:48], y[:48])), 48, batch_size=8))
    found = run(Stream(reusing, 48, batch_size=8))
    assert_same_bits((found.losses, found._fitted.data), (wanted.losses, wanted._fitted.data))


def test_a_wrong_number_of_rows_is_said():
    with pytest.warns(
        UserWarning, match=r"`num_rows` says 500, but an epoch of the loader gave 50 rows.*Stream\(loader, 50\)"
    ):
        run(Stream(Loader((X, y), 8), 500))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Stream(Loader((X[:48], y[:48]), 8), N))  # a loader that drops a short last batch


def test_what_is_local_to_a_row_is_refused_of_streams():
    def local(y):
        with numpyro.plate("rows", N, subsample_size=len(y)):
            effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(effect, 0.5), obs=y)

    def shared(y):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N, subsample_size=len(y)):
            numpyro.sample("y", dist.Normal(effect, 0.5), obs=y)

    source = lambda: Stream(pairs(arrays=(y,)), N)  # noqa: E731
    svi = lambda model: SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())  # noqa: E731
    with pytest.raises(
        ValueError, match=r"`effect.*` has a value for each row of the data, but a stream does not say which rows"
    ):
        run(source(), svi(local), num_steps=2)
    assert run(source(), svi(shared), num_steps=2).status == "finished"


def test_numbers_of_lazy_arrays_and_streams_that_do_not_fit_are_refused(tmp_path):
    h5py = pytest.importorskip("h5py")
    large = np.full(N, 2**40)
    with h5py.File(tmp_path / "data.h5", "w") as file, jax.enable_x64(False):
        file["large"] = large
        for source, options in (((file["large"],), {"batch_size": 8}), (Stream(pairs(arrays=(large,)), N), {})):
            with pytest.raises(
                ValueError, match="is int64, which JAX casts to int32, where 1099511627776 does not fit"
            ):
                run(source, make(model=lambda y: None, guide=lambda y: None), **options)


@pytest.mark.parametrize("shuffle", [None, BLOCKS], ids=["rows", "blocks"])
@pytest.mark.parametrize("batch_size", [8, None], ids=["batches", "all rows"])
def test_numbers_of_memory_maps_that_do_not_fit_are_refused(batch_size, shuffle, tmp_path):
    """They wrapped around: a map is not read as a whole before the fit, and its rows were not looked at when they were read."""
    np.save(tmp_path / "y.npy", np.where(np.arange(N) == 40, 2**40, 1))
    large = np.load(tmp_path / "y.npy", mmap_mode="r")
    with jax.enable_x64(False), pytest.raises(ValueError, match="JAX casts to int32, where 1099511627776 does not fit"):
        run((large,), make(model=lambda y: None, guide=lambda y: None), batch_size=batch_size, shuffle=shuffle)


@pytest.mark.parametrize("first, later", [(int, float), (bool, float), (bool, int)])
@pytest.mark.parametrize("size", [8, 6], ids=["as they come", "cut"])
def test_batches_of_another_dtype_do_not_lose_digits(first, later, size):
    """As the parts of a text file: whole numbers only at first, and what came after was cut to whole numbers."""
    batches = [(X[i : i + size], y[i : i + size].astype(first if i < 12 else later)) for i in range(0, N, size)]
    with pytest.raises(
        ValueError, match=r"`data\[1\]` is (float|int)\d\d here and was (int\d\d|bool) before.*Convert all rows"
    ):
        run(Stream(batches, N, SIZE))
    wider = [(X[i : i + 8].astype("f4" if i > 8 else "f8"), y[i : i + 8]) for i in range(0, N, 8)]
    assert run(Stream(wider, N)).status == "finished"


@pytest.mark.parametrize("size", [8, 6], ids=["as they come", "cut"])
def test_what_is_no_whole_array_in_a_batch_is_refused(size):
    """In batches that are cut, masked entries were taken for numbers."""
    for kind, message in (
        (lambda a: np.ma.masked_greater(a, 0.0), r"`data\[0\]` is a masked array with entries missing"),
        (np.ndarray.tolist, r"must be an array; got float\. Convert lists"),
    ):
        with pytest.raises(TypeError, match=message):
            run(Stream([(kind(a) if i else a, b) for i, (a, b) in enumerate(pairs(size))], N, SIZE))
    other = [(a[:, : 3 - (i == 2)], b) for i, (a, b) in enumerate(pairs(size))]
    with pytest.raises(ValueError, match=r"Rows of batches must have one shape.*\(3,\), \(\)\] and then \[\(2,\)"):
        run(Stream(other, N, SIZE))


def test_batches_may_be_lazy_or_empty(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for i, (a, b) in enumerate(pairs(12)):
            file[f"X{i}"], file[f"y{i}"] = a, b
        lazy = [(file[f"X{i}"], file[f"y{i}"]) for i in range(5)]
        whole = run(Stream(pairs(12), N, SIZE))
        assert_same_bits(run(Stream(lazy, N, SIZE)).losses, whole.losses)
        empty = (X[:0], y[:0])  # as a filter leaves it
        assert_same_bits(run(Stream([empty, *lazy[:2], empty, *lazy[2:]], N, SIZE)).losses, whole.losses)
    with pytest.raises(ValueError, match="`loader` is a list without batches"):
        Stream([], N)
    with pytest.raises(ValueError, match="gave no batch"):
        run(Stream([empty], N))


@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_a_row_that_is_not_finite_is_named(kind):
    holes = y.copy()
    holes[33] = np.nan
    source = (X, holes) if kind == "arrays" else Stream(pairs(arrays=(X, holes)), N)
    where = "row 33" if kind == "arrays" else "a row"
    with pytest.warns(
        RuntimeWarning, match=rf"is inf, and its batch has NaN or infinity in {where} of `data\[1\]`: the fit"
    ):
        run(source, batch_size=8, steps_per_call=64)


def test_two_threads_do_not_fit_at_once():
    """Sites of both models came into one trace, or an assertion of NumPyro failed."""
    found = []

    def other(_):
        for fit in (lambda: run((X, y)), lambda: ogp.fit_lbfgs(make(), KEY, (X, y))):
            with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="Another thread is fitting a model"):
                pool.submit(fit).result()
        found.append(run((X, y), num_steps=4))  # the same thread may

    run((X, y), num_steps=4, callback=other)
    assert found and run((X, y), num_steps=4).status == "finished"


def test_tables_say_what_is_wrong(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = arrow((X, y))
    with pytest.raises(ValueError, match="There is no column 'z'; the table has 'a', 'b'"):
        columns(table, X=["a", "z"])
    with pytest.raises(TypeError, match="Column 'name' must hold numbers; it holds string"):
        columns(table, X="name")
    with pytest.raises(ValueError, match="Say which columns"):
        columns(table)
    with pytest.raises(TypeError, match=r"`table` must be a pyarrow.Table.*got dict"):
        columns({"a": X}, X="a")
    holes = pyarrow.table({"y": [1.0, None, 3.0]})
    with pytest.raises(ValueError, match="Column 'y' has 1 missing values among rows 0 to 3"):
        columns(holes, y="y")["y"][0:3]
    with pytest.raises(ValueError, match=r"test_fit_sources.py is not a complete parquet file"):
        columns(__file__, y="y")


def test_lists_of_a_fixed_size_are_as_many_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pair = pyarrow.list_(pyarrow.float64(), 2)
    table = pyarrow.table({"a": X[:, 0], "bc": pyarrow.array(X[:, 1:].tolist(), pair)})
    parquet.write_table(table, tmp_path / "data.parquet", row_group_size=9)
    for source in (table, tmp_path / "data.parquet"):
        found = columns(source, X=["a", "bc"], bc="bc")
        for rows in (slice(0, N), slice(5, 31), slice(7, 7)):
            assert_same_bits((found["X"][rows], found["bc"][rows]), (X[rows], X[rows, 1:]))
    for hole in ([1.0, None], None):
        holes = pyarrow.table({"e": pyarrow.array([[1.0, 2.0], hole], pair)})
        with pytest.raises(ValueError, match="Column 'e' has 1 missing values"):
            columns(holes, X="e")["X"][0:2]
    with pytest.raises(TypeError, match=r"Column 'e' must hold numbers; it holds list<.*lists with a fixed size"):
        columns(pyarrow.table({"e": [[1.0], [2.0]]}), X="e")


def test_files_of_a_table_have_the_same_columns(tmp_path):
    """Types of the first file had been taken for those of all: a column of integers there cut the fractions of others."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = {"whole": {"y": [1, 2]}, "real": {"y": [0.5, 1.5]}, "other": {"z": [0.5]}}
    path = {name: tmp_path / f"{name}.parquet" for name in tables}
    for name, table in tables.items():
        parquet.write_table(pyarrow.table(table), path[name])
    with pytest.raises(ValueError, match=r"Column 'y' is int64 in the first file, and double in file 2\. Write all"):
        columns([path["whole"], path["real"]], y="y")
    with pytest.raises(ValueError, match=r"Column 'y' is double in the first file, and not there in file 3"):
        columns([path["real"], path["real"], path["other"]], y="y")
    with pytest.raises(ValueError, match=r"is a folder\. Pass its files: columns\(sorted"):
        columns(tmp_path, y="y")
    with pytest.raises(TypeError, match=r"got FileSystemDataset.*columns\(dataset\.files"):
        columns(pytest.importorskip("pyarrow.dataset").dataset(path["real"]), y="y")
    twice = pyarrow.Table.from_arrays([pyarrow.array([1.0]), pyarrow.array([2.0])], names=["y", "y"])
    with pytest.raises(ValueError, match="The table has 2 columns 'y'"):
        columns(twice, y="y")


def test_tables_of_pandas_and_polars():
    pytest.importorskip("pyarrow")
    X, y = data()
    table = {"a": X[:, 0], "b": X[:, 1], "y": y}
    for library in (pytest.importorskip("pandas"), *map(_imported, ["polars"])):
        if library is not None:
            found = columns(library.DataFrame(table), X=["a", "b"], y="y")
            assert_same_bits((found["X"][3:7], found["y"][:]), (X[3:7, :2], y))


def _imported(name):
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@pytest.mark.skipif(np.dtype("longdouble").itemsize == 8, reason="these are plain numbers here")
def test_numbers_of_more_than_64_bits_say_how_to_make_fewer():
    X, y = data()
    with pytest.raises(TypeError, match=r"got an array of float128\. JAX has at most 64 bits: array\.astype\(float\)"):
        run((X.astype(np.longdouble), y), num_steps=1)


def test_what_is_no_array_says_how_to_make_one(tmp_path):
    pandas = pytest.importorskip("pandas")
    X, y = data()
    whole = pandas.DataFrame({"a": pandas.Categorical(["u", "v"] * 25), "b": y})
    fields = np.zeros(50, [("X", float), ("y", float)])
    for wrong, message in (
        ({1: X}.keys(), r"got dict_keys\. Convert lists first"),
        (whole, r"got an array of object\. Pass table\.to_numpy\(float\)"),
        (fields, r"Pass its fields, each by itself: array\['X'\]"),
        (X.astype("m8[s]"), r"must hold numbers; got an array of timedelta64.*days since a start"),
        (X.astype(object), r"got an array of object\. .*array\.astype\(float\)"),
        (y.astype("S4"), r"got an array of \|S4\. Labels become codes by np\.unique\(array, return_inverse=True\)"),
    ):
        with pytest.raises(TypeError, match=message):
            Batches((wrong, y), 8, (0,))
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["X"], file["none"] = X, h5py.Empty("f8")
        with pytest.raises(TypeError, match=r"got File\. Pass the arrays in it, each by itself"):
            Batches((file, y), 8, (0,))
        with pytest.raises(ValueError, match="first axis of N rows; got an empty dataset"):
            Batches((file["none"], y), 8, (0,))


@pytest.mark.parametrize("form", ["csr_matrix", "coo_array", "lil_matrix", "bsr_array"])
def test_sparse_matrices_give_the_rows_that_they_hold(form):
    """All rows at once, in batches of a stream, and in new inputs; elsewhere they are refused in words."""
    sparse = pytest.importorskip("scipy.sparse")
    X = np.where(data()[0] > 0.3, data()[0], 0)
    held, y = getattr(sparse, form)(X), data()[1]
    batches = Batches((held, y), SIZE, (0,), shuffle=BLOCKS)
    assert_same_bits(batches.between(0, 3 * SIZE)[0][0], X[batches.row_numbers(0, 3).ravel()])
    assert_same_bits(run((held, y)).losses, run((X, y)).losses)

    def cut(kind):
        return run(Stream(lambda: ((kind(X[i : i + 7]), y[i : i + 7]) for i in range(0, N, 7)), N, SIZE))

    assert_same_bits(cut(getattr(sparse, form)).losses, cut(np.asarray).losses)
    with pytest.raises(TypeError, match=rf"got {form} of float\d\d\. A sparse matrix is not one: pass X\.toarray\(\)"):
        ogp.init.kmeans(KEY, held, 4)


def test_a_large_sparse_matrix_is_known_by_all_of_its_rows(monkeypatch):
    """No file tells that one was changed, so a checkpoint must not go by a sample."""
    sparse = pytest.importorskip("scipy.sparse")
    monkeypatch.setattr(digest, "LARGE", 100)
    monkeypatch.setattr(digest, "SLICE", 4)
    monkeypatch.setattr(digest, "ROWS", 8)
    held = sparse.csr_array(X)
    known = digest.digest_of_data(as_array("X", held), float)
    for row in range(N):
        changed = X.copy()
        changed[row] += 1
        assert digest.digest_of_data(as_array("X", sparse.csr_array(changed)), float) != known


def test_a_fit_of_a_sparse_matrix_predicts_and_is_checked_at_others():
    sparse = pytest.importorskip("scipy.sparse")

    def model(X, y=None, *, N):
        f = ogp.gp("f", ogp.kernels.RBF(1.0), jnp.asarray(data()[0][:4]))
        with numpyro.plate("data", N, subsample_size=len(X)):
            numpyro.sample("y", ogp.likelihoods.Gaussian(f(X), 0.3), obs=y)

    svi = SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), Trace_ELBO())
    X, y = data()
    new = sparse.csc_array(X[:6])
    result = ogp.fit(svi, KEY, (sparse.csr_array(X), y), batch_size=10, num_steps=4, N=N, progress_bar=False)
    assert_same_bits(result.predict(new)["y"].mean, result.predict(X[:6])["y"].mean)
    reports = [result.check(held_out=(held, y[:6]), num_samples=25) for held in (new, X[:6])]
    assert str(reports[0]) == str(reports[1])


def test_files_of_a_table_follow_each_other(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    for i, rows in enumerate((slice(0, 20), slice(20, 27), slice(27, 50))):
        parquet.write_table(arrow((X[rows], y[rows])), tmp_path / f"{i}.parquet", row_group_size=6)
    found = columns([tmp_path / f"{i}.parquet" for i in range(3)], X=["a", "b", "c"], y="y")
    assert found["X"].shape == (N, 3) and found["y"].chunks == (6,)
    for rows in (slice(0, 50), slice(3, 4), slice(5, 31), slice(19, 28), slice(50, 50), slice(2, 40, 7)):
        assert_same_bits((found["X"][rows], found["y"][rows]), (X[rows], y[rows]))
    with pytest.raises(ValueError, match="Columns are read forwards"):  # there were no rows in it
        found["X"][::-1]


def test_files_may_differ_in_what_they_allow(tmp_path):
    """One program writes columns as never missing, another does not: arrow raised an error in the middle of the fit."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    X, y = data()
    table = arrow((X, y))
    sure = pyarrow.schema([f.with_nullable(False) for f in reversed(list(table.schema))], metadata={"of": "another"})
    parquet.write_table(table.slice(0, 20), tmp_path / "0.parquet", row_group_size=6)
    parquet.write_table(table.slice(20).select(sure.names).cast(sure), tmp_path / "1.parquet", row_group_size=6)
    found = columns([tmp_path / "0.parquet", tmp_path / "1.parquet"], X=["a", "b", "c"], y="y")
    assert_same_bits((found["X"][:], found["y"][15:30]), (X, y[15:30]))


def test_large_lazy_arrays_are_known_by_some_rows(tmp_path, monkeypatch):
    kinds = {k: SOURCES[k](tmp_path, (X, y)) for k in ("h5py", "zarr")}
    full = {k: [digest.digest_of_data(Batches(v, 8, (0,)).arrays[0], float)] for k, v in kinds.items()}
    assert full["h5py"] == full["zarr"] == [digest.digest_of_data(X, float)]
    monkeypatch.setattr(digest, "LARGE", 100)
    monkeypatch.setattr(digest, "SLICE", 4)
    monkeypatch.setattr(digest, "ROWS", 16)
    some = {k: digest.digest_of_data(Batches(v, 8, (0,)).arrays[0], float) for k, v in kinds.items()}
    assert "of 16 rows, a file of" in some["h5py"] and "of 16 rows, 7 files of" in some["zarr"]


def test_a_source_is_known_by_what_it_has():
    assert isinstance(Own((X, y)), Source) and isinstance(Stream(pairs(), N), Source) and not isinstance(X, Source)
    assert Streamed(Own((X, y)), None, (0,)).bytes_per_step == 8 * 4 * 8
    assert [p for p in parts_of(3, 12, 5)] == [(0, 3, 5), (1, 0, 5), (2, 0, 2)]


# ---------------------------------------------------------------- reading ahead


class Watched:
    """An array that is read by slices, and notes by whom; it may break, or wait until it is let go."""

    chunks = (9,)

    def __init__(self, array, breaks_at=None):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.threads, self.breaks_at, self.second = [], breaks_at, threading.Event()

    def __getitem__(self, rows):
        self.threads.append(threading.current_thread() is threading.main_thread())
        if len(self.threads) == 3:  # windows have two blocks
            self.second.set()
        if len(self.threads) == self.breaks_at:
            raise OSError("the disk is gone")
        return self.array[rows]


def test_a_thread_reads_the_next_window_and_no_more():
    X = Watched(data()[0])
    batches = Batches((X,), 4, (0,), shuffle=BLOCKS)
    batches.until(6)
    put = lambda shape, dtype, axis, read: read((slice(None),) * len(shape))  # noqa: E731
    batches.stacked(0, 1, 1, put)
    assert X.second.wait(60)  # nobody has asked for it yet
    found = [batches.stacked(step, 1, 1, put).data[0] for step in range(6)]
    assert X.threads[:2] == [True, True] and not any(X.threads[2:4])
    plain = Batches((data()[0],), 4, (0,), shuffle=BLOCKS)  # in turn: nobody says how many steps there are
    assert_same_bits(found, [plain.stacked(step, 1, 1, put).data[0] for step in range(6)])
    _, end = batches.order.window_at(23)
    assert batches._ahead == {} or end < 24, "a window that no step wants"


def test_files_are_read_by_one_thread_at_a_time():
    """Also where another window is asked for than the one that is being read, as after a step that failed."""
    reading, both = threading.Lock(), []

    class Alone(Watched):
        def __getitem__(self, rows):
            both.append(not reading.acquire(blocking=False))
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.05)
            if not both[-1]:
                reading.release()
            return super().__getitem__(rows)

    batches = Batches((Alone(data()[0]),), 4, (0,), shuffle=BLOCKS)
    batches.until(12)
    wanted = Batches((data()[0],), 4, (0,), shuffle=BLOCKS)
    for start in (0, 32, 0, 40):
        assert_same_bits(batches.between(start, start + 4), wanted.between(start, start + 4))
    assert not any(both)


def test_windows_follow_each_other_as_rows_do():
    """``window_at`` beside the slots that are read, over the ends of epochs."""
    order = BlockOrder(50, 9, 2, (3,))
    position = 0
    while position < 170:
        key, end = order.window_at(position)
        assert end > position
        seen = {(s.epoch, s.window) for part in parts_of(position, end, 50) for s in order.slots(part)}
        assert seen == {key} and order.window_at(end - 1) == (key, end)
        position = end


def test_what_a_reading_thread_raises_ends_the_fit(tmp_path):
    whole = ogp.fit(make(), KEY, data(), batch_size=SIZE, num_steps=STEPS, shuffle=BLOCKS, progress_bar=False)
    options = {"batch_size": SIZE, "num_steps": STEPS, "shuffle": BLOCKS, "progress_bar": False, "steps_per_call": 1}
    options |= {"checkpoint": tmp_path / "run.npz", "checkpoint_every": 1}
    X, y = data()
    broken = Watched(X, breaks_at=20)
    with pytest.raises(OSError, match="the disk is gone"):
        ogp.fit(make(), KEY, (broken, y), **options)
    assert not broken.threads[19]
    resumed = ogp.fit(make(), KEY, (Watched(X), y), **options)
    assert_same_bits(tuple(resumed[:3]), tuple(whole[:3]))


def test_a_folder_of_zarr_that_goes_away_ends_the_fit(tmp_path):
    """zarr itself reads zeros then."""
    source = in_zarr(tmp_path, data())
    gone = lambda _: shutil.rmtree(tmp_path / "data.zarr", ignore_errors=True)  # noqa: E731
    with pytest.raises(FileNotFoundError, match=r"data.zarr/[Xy] was there when the fit began, and is gone"):
        run(source, batch_size=8, shuffle=BLOCKS, num_steps=40, callback=gone)


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_zarr_does_not_have_are_said(version, tmp_path, monkeypatch):
    """zarr reads them as zeros, also if their files were lost."""
    zarr = pytest.importorskip("zarr")
    X, y = data()
    group = zarr.open_group(tmp_path / "data.zarr", mode="w", zarr_format=version)
    for name, array in (("X", X), ("y", y)):
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(10, *array.shape[1:]))[:] = array
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run((group["X"], group["y"]), batch_size=8)
    monkeypatch.setattr(zarr.Array, "nchunks_initialized", property(lambda self: pytest.fail("zarr counted chunks")))
    ogp.tabular.stored.table_of(group["y"])  # zarr takes longer for that than for reading them
    monkeypatch.undo()
    (tmp_path / "data.zarr" / ("y/3" if version == 2 else "y/c/3")).unlink()
    with pytest.warns(UserWarning, match=r"1 of 5 chunks of `data\[1\]` are not stored in .*y, and .* read as 0\.0"):
        run((group["X"], group["y"]), batch_size=8)
    with pytest.warns(UserWarning, match="1 of 5 chunks of `X` are not stored"):
        ogp.tabular.stored.table_of(group["y"])


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_of_zarr_that_were_cut_short_are_refused(version, tmp_path):
    """Blosc, which version 2 takes by default, reads other numbers from them without an error."""
    zarr = pytest.importorskip("zarr")
    codec = pytest.importorskip("numcodecs").Blosc() if version == 2 else zarr.codecs.BloscCodec()
    rows = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    path = tmp_path / "X.zarr"
    array = zarr.create_array(
        path, shape=rows.shape, dtype=rows.dtype, chunks=(50, 3), compressors=codec, zarr_format=version
    )
    array[:] = rows
    assert as_array("X", array)[0:200].shape == rows.shape
    chunk = path / ("2.0" if version == 2 else "c/2/0")
    chunk.write_bytes(chunk.read_bytes()[:-5])
    for read in (lambda: as_array("X", array), lambda: ogp.tabular.stored.table_of(array)):
        with pytest.raises(
            ValueError, match=r"2.0 has \d+ bytes, fewer than it was written with: the chunk was cut short"
        ):
            read()


def test_small_batches_are_checked_quickly():
    """Names of what is wrong are made only where something may be wrong."""
    batch = (np.zeros((8, 3), np.float32), np.zeros(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.tree_util, "tree_flatten_with_path", lambda *_: pytest.fail("names were made"))
        assert size_of(batch) == 8
    assert size_of({"X": np.ma.masked_array(batch[0]), "y": jnp.zeros(8)}) == 8
    for wrong in (np.array(["a"] * 8), np.ma.masked_array(np.zeros(8), mask=np.arange(8) == 1), np.array(1.0)):
        with pytest.raises((TypeError, ValueError), match=r"`data\[1\]`"):
            size_of((batch[0], wrong))


def test_datasets_that_changed_or_are_closed_are_said(tmp_path):
    h5py = pytest.importorskip("h5py")
    file = h5py.File(tmp_path / "data.h5", "w")
    dataset = file.create_dataset("X", data=X, chunks=(7, 3), maxshape=(None, 3))
    shorter = lambda _: dataset.resize((9, 3))  # noqa: E731
    with pytest.raises(
        ValueError, match=r"9 rows from \d+ on gave an array of shape .*were changed after the fit began"
    ):
        run((dataset, y), batch_size=8, shuffle=BLOCKS, num_steps=40, callback=shorter)
    file.close()
    with pytest.raises(ValueError, match=r"A dataset of h5py is closed\. Keep its file open"):
        run((dataset, y), batch_size=8)


def test_a_loader_of_torch_itself(tmp_path):
    """Not only what looks like one."""
    torch = pytest.importorskip("torch")
    tensors = torch.utils.data.TensorDataset(*map(torch.tensor, data()))

    def loader():
        seeded = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(tensors, batch_size=7, shuffle=True, generator=seeded)

    def run(num_steps, **options):
        return ogp.fit(make(), KEY, Stream(loader, N, SIZE), num_steps=num_steps, progress_bar=False, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(13, checkpoint=tmp_path / "run.npz")
        assert_same_bits(tuple(run(STEPS, checkpoint=tmp_path / "run.npz")[:3]), tuple(run(STEPS)[:3]))
    assert Stream(loader()).num_rows == N


def test_a_list_of_batches_goes_on_in_the_middle_of_an_epoch():
    """Batches of one size are asked for by their positions; none before is read."""

    class Counted(list):
        asked = ()

        def __getitem__(self, i):
            self.asked = (*self.asked, i)
            return super().__getitem__(i)

    loader = Counted((np.full(2, i), np.full(2, 10 * i)) for i in range(5))
    stream = Stream(loader, 10)
    for step in (0, 3, 8):
        found = [int(batch[0][0]) for batch in itertools.islice(stream.batches(step), 7)]
        assert found == [(step + k) % 5 for k in range(7)]
    loader.asked = ()
    next(iter(stream.batches(8)))
    assert set(loader.asked) <= {0, 3, 4}  # the first and the last tell the size
