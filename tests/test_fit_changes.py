"""A run is stopped, something changes, and the same call goes on: the change is refused, or said, whatever it is.

Data on disk are as large as files of which only some rows are read: a change of other rows must show as well.
"""

from __future__ import annotations

import os
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp.training import Blocks, Stream, columns, digest
from tests.fitting import KEY, data

N, B = 64, 16
SCALE = {"of the host": 2.0}


def model_of(prior=1.0, noise=0.5, offset=None, on_host=None, factor=1.0):
    """Each number in a place of its own: a prior, a likelihood, a closure, a function of the host."""
    offset = np.zeros(3) if offset is None else offset

    def model(X, y=None, *, shift=0.0, weights=None, kind="plain"):
        w = numpyro.sample("w", dist.Normal(0.0, prior).expand([3]).to_event(1))
        mean = factor * (X + offset) @ w + shift
        if weights is not None:
            mean = mean + weights["a"][0]
        if kind == "tanh":
            mean = jnp.tanh(mean)
        if on_host is not None:
            mean = mean + jax.pure_callback(on_host, jax.ShapeDtypeStruct((), X.dtype), jax.lax.stop_gradient(X[0, 0]))
        with numpyro.handlers.scale(scale=N / len(X)):
            numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)

    return model


def guide(X, y=None, **_):
    numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.full(3, 0.2)), 0.1).to_event(1))


def run(path, num_steps, arrays=None, *, optimizer=None, loss=None, model=None, key=KEY, **options):
    svi = SVI(model or model_of(), guide, optimizer or optax.adam(0.05), loss or Trace_ELBO())
    options = {"batch_size": B, "steps_per_call": 2, "progress_bar": False} | options
    return ogp.fit(svi, key, data(N) if arrays is None else arrays, num_steps=num_steps, checkpoint=path, **options)


def closing_over(number):
    return lambda x: np.asarray(number * x)


def using_arrays(array):
    return lambda x: np.asarray(array.sum() * x)


COMPUTE, CONSTANTS = "what model, guide and objective compute", "constants of model, guide or objective"
CHANGES = {
    # what changes: before, after, what is refused
    "a prior": ({}, {"model": model_of(prior=2.0)}, CONSTANTS),
    "a noise": ({}, {"model": model_of(noise=0.6)}, CONSTANTS),
    "the last digit of a noise": ({}, {"model": model_of(noise=np.nextafter(0.5, 1))}, CONSTANTS),
    "an array in a closure": ({}, {"model": model_of(offset=np.asarray([0, 0, 1e-9]))}, CONSTANTS),
    "a number in a closure": ({}, {"model": model_of(factor=1.5)}, CONSTANTS),
    "a keyword": ({"shift": 0.1}, {"shift": 0.2}, "the keyword shift"),
    "a keyword that is an array": ({"shift": np.zeros(B)}, {"shift": np.full(B, 0.1)}, "the keyword shift"),
    "an array within a keyword": ({"weights": {"a": np.zeros(2)}}, {"weights": {"a": np.ones(2)}}, CONSTANTS),
    "a keyword of text": ({}, {"kind": "tanh"}, "the keyword kind"),
    "a function of the host": (
        {"model": model_of(on_host=closing_over(1.0))}, {"model": model_of(on_host=closing_over(2.0))}, COMPUTE),
    "an array of the host": (
        {"model": model_of(on_host=using_arrays(np.ones(2)))}, {"model": model_of(on_host=using_arrays(np.ones(3)))}, COMPUTE),
    "code of the host": (
        {"model": model_of(on_host=lambda x: np.asarray(x))}, {"model": model_of(on_host=lambda x: np.asarray(-x))}, COMPUTE),
    "the objective": ({}, {"loss": Trace_ELBO(num_particles=2)}, COMPUTE),
    "the size of batches": ({}, {"batch_size": 8}, "batch_size"),
    "the size of groups": ({}, {"group_size": 4}, "group_size"),
    "blocks": ({"shuffle": Blocks(8, 2)}, {"shuffle": Blocks(8, 4)}, "blocks"),
    "the key": ({}, {"key": jax.random.PRNGKey(4)}, "seed"),
    "windows": ({}, {"early_stopping": ogp.EarlyStopping(2, every=3)}, "every"),
    "moments of the optimizer": ({}, {"optimizer": optax.sgd(0.1)}, "state"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_program_is_refused(name, tmp_path):
    before, after, message = CHANGES[name]
    path = tmp_path / "run.npz"
    run(path, 4, **before)
    assert len(run(path, 6, **before).losses) == 6  # as it is, it goes on
    with pytest.raises(ValueError, match=rf"run.npz is of another run: they differ in .*{message}"):
        run(path, 8, **after)


def test_64_bits_are_part_of_a_run(tmp_path):
    path = tmp_path / "run.npz"
    run(path, 4)
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"differ in .*float64.*float32"):
        run(path, 8)


@pytest.mark.parametrize(
    "optimizer, what",
    [
        (optax.adam(0.01), "has other numbers, such as a rate, than in"),
        (optax.adam(0.05, b1=0.8), "has other numbers, such as a rate, than in"),
        (optax.adabelief(0.05), "computes other steps than in"),
        (optax.adamw(0.05), "computes other steps than in"),
    ],
)
def test_another_optimizer_is_said(optimizer, what, tmp_path):
    path = tmp_path / "run.npz"
    run(path, 4)
    with pytest.warns(UserWarning, match=rf"The optimizer {what} the run in `checkpoint` .*run.npz. The fit goes on"):
        assert len(run(path, 6, optimizer=optimizer).losses) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(path, 8, optimizer=optimizer)  # it is now this run's


# ---------------------------------------------------------------- data


def changed(arrays, rows=slice(37, 38)):
    X, y = (a.copy() for a in arrays)
    X[rows] += 0.25
    return X, y


def write_memmap(folder, arrays):
    for name, array in zip("Xy", arrays, strict=True):
        if not (folder / name).exists():
            np.memmap(folder / name, array.dtype, "w+", shape=array.shape)
        on_disk = np.memmap(folder / name, array.dtype, "r+", shape=array.shape)
        on_disk[...] = array
        on_disk.flush()


def read_memmap(folder):
    return np.memmap(folder / "X", float, "r", shape=(N, 3)), np.memmap(folder / "y", float, "r", shape=(N,))


def write_h5py(folder, arrays):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "data.h5", "a") as file:
        for name, array in zip("Xy", arrays, strict=True):
            file.require_dataset(name, array.shape, array.dtype)[...] = array


def read_h5py(folder):
    file = pytest.importorskip("h5py").File(folder / "data.h5")
    return file["X"], file["y"]


def write_zarr(folder, arrays):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(folder / "data.zarr", mode="a")
    for name, array in zip("Xy", arrays, strict=True):
        if name not in group:
            group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(8, *array.shape[1:]))
        group[name][...] = array


def read_zarr(folder):
    group = pytest.importorskip("zarr").open_group(folder / "data.zarr", mode="r")
    return group["X"], group["y"]


def table_of(arrays):
    X, y = arrays
    return pytest.importorskip("pyarrow").table({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": y})


def write_parquet(folder, arrays):
    parquet = pytest.importorskip("pyarrow.parquet")
    for i, rows in enumerate((slice(0, 32), slice(32, N))):
        parquet.write_table(table_of([a[rows] for a in arrays]), folder / f"{i}.parquet", row_group_size=8)


NAMES = {"X": ["a", "b", "c"], "y": "y"}


def read_parquet(folder):
    return columns([folder / "0.parquet", folder / "1.parquet"], **NAMES)


def read_opened_parquet(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    return columns([parquet.ParquetFile(folder / f"{i}.parquet") for i in range(2)], **NAMES)


def read_arrow(folder):
    return columns(
        pytest.importorskip("pyarrow.parquet").read_table([folder / "0.parquet", folder / "1.parquet"]), **NAMES
    )


def read_private_memmap(folder):
    _, y = read_memmap(folder)
    mine = np.memmap(folder / "X", float, "c", shape=(N, 3))
    if (folder / "private").exists():  # the change is in memory alone
        mine[37] += 0.25
    return mine, y


def write_private(folder, arrays):
    if (folder / "X").exists():
        (folder / "private").touch()
    else:
        write_memmap(folder, arrays)


def write_in_memory(folder, arrays):
    np.savez(folder / "data.npz", *arrays)


def read_in_memory(folder):
    with np.load(folder / "data.npz") as file:
        return file["arr_0"], file["arr_1"]


def read_stream(folder):
    X, y = read_in_memory(folder)
    return Stream(lambda: ((X[i : i + B], y[i : i + B]) for i in range(0, N, B)), N)


STORES = {
    "in memory": (write_in_memory, read_in_memory),
    "memmap": (write_memmap, read_memmap),
    "private memmap": (write_private, read_private_memmap),
    "h5py": (write_h5py, read_h5py),
    "zarr": (write_zarr, read_zarr),
    "parquet files": (write_parquet, read_parquet),
    "opened parquet": (write_parquet, read_opened_parquet),
    "arrow": (write_parquet, read_arrow),
    "stream": (write_in_memory, read_stream),
}


@pytest.mark.parametrize("store", STORES)
def test_rows_changed_in_place_are_refused(store, tmp_path, monkeypatch):
    """One row of the middle, which is not among the few that are read of large files."""
    monkeypatch.setattr(digest, "LARGE", 100)
    monkeypatch.setattr(digest, "ROWS", 4)
    monkeypatch.setattr(digest, "SLICE", 2)
    write, read = STORES[store]
    path = tmp_path / "run.npz"
    options = {
        "batch_size": None if store == "stream" else B,
        "shuffle": None if store in ("in memory", "stream") else Blocks(8, 2),
    }
    write(tmp_path, data(N))
    run(path, 3, read(tmp_path), **options)  # the last batch of the stream has row 37
    assert len(run(path, 3, read(tmp_path), **options).losses) == 3
    write(tmp_path, changed(data(N)))
    message = "gives another batch of step 3" if store == "stream" else re.escape("the values of data[") + r"['0]?X?"
    with pytest.raises(ValueError, match=message):
        run(path, 6, read(tmp_path), **options)


def test_the_state_of_files_is_that_of_each(tmp_path):
    """Two files that change places have one size together, and one last time."""
    files = [tmp_path / name for name in ("a", "b")]

    def state_of(sizes):
        for file, size in zip(files, sizes, strict=True):
            file.write_bytes(bytes(size))
            os.utime(file, ns=(10**18, 10**18))
        return digest._state_of([str(tmp_path)]), digest._state_of(list(map(str, files)))

    first, swapped = state_of((10, 20)), state_of((20, 10))
    assert first[0] == first[1] and swapped[0] == swapped[1]
    assert first[0] != swapped[0] and "2 files of 30 bytes" in first[0] and "2 files of 30 bytes" in swapped[0]
