"""Rows a second from arrays, files and loaders, beside a loop whose data are on the device.

    python -m benchmarks.sources [--rows 10000000] [--folder DIR] [--read 10000000] [--batch-size 1024] [--num-inducing 32]

Made-up data, 8 inputs and an output in float32, are written to each kind of file. "cold" is after the system was told to forget
the file's pages, "warm" the same again. "read" is rows a second of batches alone, "fit" of a fit of an SVGP, from the end of its
first call to the device to the end of its last. The loop on the device draws its rows there and takes the same steps, the best of
three. Of single rows a two-hundredth is read cold, since an epoch of them would soon have the file in memory; of grain's too, as
they are slow. The sparse matrix has the same numbers, none of which is zero.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import lax, random
from numpyro.infer import SVI, TraceMeanField_ELBO

import numpyro_orthgp as ogp
from numpyro_orthgp import kernels, likelihoods
from numpyro_orthgp.training import Blocks, Stream, columns
from numpyro_orthgp.training.batches import Batches
from numpyro_orthgp.training.streamed import Streamed

DIM, PIECE, STEPS = 8, 2**16, 16
NAMES = [f"x{i}" for i in range(DIM)]


def model(X: Any, y: Any = None, *, N: int, Z: Any) -> None:
    f = ogp.gp("f", kernels.RBF(numpyro.param("lengthscale", jnp.ones(()))), Z)
    with numpyro.plate("data", N, subsample_size=len(X)):
        numpyro.sample("y", likelihoods.Gaussian(f(X), 0.3), obs=y)


def pieces(num: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    for start in range(0, num, PIECE):
        X = rng.normal(size=(min(PIECE, num - start), DIM)).astype(np.float32)
        y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=len(X)).astype(np.float32)
        yield slice(start, start + len(X)), X, y.astype(np.float32)


def write(folder: Path, num: int) -> None:
    """The same rows in every format."""
    import h5py
    import pyarrow
    import pyarrow.parquet as parquet
    import zarr

    shapes = {"X": (num, DIM), "y": (num,)}
    maps = {k: np.lib.format.open_memmap(folder / f"{k}.npy", "w+", np.float32, s) for k, s in shapes.items()}
    group = zarr.open_group(folder / "data.zarr", mode="w")
    chunk = min(PIECE, num)
    stored = {
        k: group.create_array(k, shape=s, dtype="f4", chunks=(chunk, *s[1:]), compressors=None)
        for k, s in shapes.items()
    }
    schema = pyarrow.schema([(name, pyarrow.float32()) for name in (*NAMES, "y")])
    options = {"compression": "none", "use_dictionary": False}
    with (
        h5py.File(folder / "data.h5", "w") as file,
        parquet.ParquetWriter(folder / "data.parquet", schema, **options) as table,
    ):
        sets = {k: file.create_dataset(k, s, "f4", chunks=(min(4096, num), *s[1:])) for k, s in shapes.items()}
        for rows, X, y in pieces(num):
            for found in (maps, stored, sets):
                found["X"][rows], found["y"][rows] = X, y
            table.write_table(pyarrow.table([*X.T, y], schema=schema), row_group_size=PIECE)
    for array in maps.values():
        array.flush()
    os.sync()


def forget(folder: Path) -> None:
    """Tell the system that pages of these files are not needed."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def opened(folder: Path, kind: str) -> Any:
    if kind == "parquet":
        return columns(folder / "data.parquet", X=NAMES, y="y")
    if kind == "h5py":
        import h5py

        file = h5py.File(folder / "data.h5")
        return file["X"], file["y"]
    if kind == "zarr":
        import zarr

        group = zarr.open_group(folder / "data.zarr", mode="r")
        return group["X"], group["y"]
    maps = tuple(np.load(folder / f"{k}.npy", mmap_mode="r") for k in "Xy")
    if kind == "sparse":
        from scipy.sparse import csr_array

        return csr_array(maps[0]), np.array(maps[1])
    return tuple(np.array(a) for a in maps) if kind == "in memory" else maps


class Throttled:
    """A dataset of h5py on a disk that reads no faster than told."""

    def __init__(self, leaf: Any, speed: float) -> None:
        self.leaf, self.speed = leaf, speed
        self.shape, self.dtype, self.chunks = leaf.shape, leaf.dtype, leaf.chunks or (PIECE,)

    def __getitem__(self, rows: slice) -> np.ndarray:
        begin = time.perf_counter()
        found = self.leaf[rows]
        time.sleep(max(0.0, found.nbytes / self.speed - (time.perf_counter() - begin)))
        return found


def reading_ahead(folder: Path, speed: float, batch: int, num: int, constants: dict[str, Any], rounds: int) -> float:
    """Rows a second of fits that read windows ahead over those of fits that do not, from a throttled disk; in turns, medians."""
    found: dict[bool, list[float]] = {True: [], False: []}
    ahead = Batches.until
    try:
        for i in range(2 * rounds):
            is_ahead = bool((i + i // 2) % 2)
            Batches.until = ahead if is_ahead else lambda self, step: None  # type: ignore[method-assign]
            data = tuple(Throttled(leaf, speed) for leaf in opened(folder, "h5py"))
            found[is_ahead].append(fitting(data, None, batch, num, constants))
    finally:
        Batches.until = ahead  # type: ignore[method-assign]
    return float(np.median(found[True]) / np.median(found[False]))


def grain_stream(folder: Path, batch: int) -> Stream:
    """Rows by grain, in the order of its own permutation."""
    import grain

    X, y = opened(folder, "in memory")

    class Rows:
        def __len__(self) -> int:
            return len(y)

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            return X[i], y[i]

    return Stream(lambda: grain.MapDataset.source(Rows()).shuffle(seed=0).to_iter_dataset().batch(batch), len(y))


# Name, what it is opened as, how it is shuffled, and whether it is on disk.
KINDS: list[tuple[str, str, Blocks | None, bool]] = [
    ("NumPy, single rows", "in memory", None, False),
    ("NumPy, blocks", "in memory", Blocks(), False),
    ("scipy.sparse, blocks", "sparse", None, False),
    ("memmap, single rows", "memmap", None, True),
    ("memmap, blocks", "memmap", Blocks(), True),
    ("h5py, blocks", "h5py", None, True),
    ("zarr, blocks", "zarr", None, True),
    ("parquet, blocks", "parquet", None, True),
    ("grain, row by row", "grain", None, False),
]  # fmt: skip


def put(shape: Any, dtype: Any, axis: int, read: Callable[[Any], np.ndarray]) -> Any:
    return jnp.asarray(read((slice(None),) * len(shape)))


def reading(data: Any, shuffle: Blocks | None, batch: int, num: int) -> float:
    """Rows a second of batches alone, without the order of the first epoch."""
    source = Streamed(data, None, (0,)) if isinstance(data, Stream) else Batches(data, batch, (0,), shuffle=shuffle)
    if isinstance(source, Batches):
        source.row_numbers(0, 1)
    started, per_call = time.perf_counter(), STEPS * batch
    for call in range(max(1, num // per_call)):
        jax.block_until_ready(source.stacked(call * STEPS, STEPS, STEPS, put).data)
    return max(1, num // per_call) * per_call / (time.perf_counter() - started)


def fitting(data: Any, shuffle: Blocks | None, batch: int, num: int, constants: dict[str, Any]) -> float:
    """Rows a second of a fit."""
    times: list[tuple[float, int]] = []
    options = {} if isinstance(data, Stream) else {"batch_size": batch, "shuffle": shuffle}
    steps = max(3 * STEPS, num // batch)
    ogp.fit(
        svi(), random.PRNGKey(0), data, num_steps=steps, steps_per_call=STEPS, progress_bar=False,
        callback=lambda p: times.append((time.perf_counter(), p.step)), **options, **constants,
    )  # fmt: skip
    (first, begun), (last, done) = times[0], times[-1]
    return (done - begun) * batch / (last - first)


def svi() -> SVI:
    return SVI(model, ogp.AutoSparseGP(model), optax.adam(0.01), TraceMeanField_ELBO())


def on_device(data: Any, batch: int, num: int, constants: dict[str, Any]) -> float:
    """Rows a second of a loop that draws rows on the device."""
    X, y = (jnp.asarray(a) for a in data)
    inference = svi()
    state = inference.init(random.PRNGKey(0), X[:batch], y[:batch], **constants)

    @jax.jit
    def run(carry: Any) -> Any:
        def step(_: int, carry: Any) -> Any:
            state, key = carry
            key, own = random.split(key)
            rows = random.randint(own, (batch,), 0, len(y))
            return inference.update(state, X[rows], y[rows], **constants)[0], key

        return lax.fori_loop(0, STEPS, step, carry)

    carry = jax.block_until_ready(run((state, random.PRNGKey(1))))
    started, calls = time.perf_counter(), max(2, num // (batch * STEPS))
    for _ in range(calls):
        carry = jax.block_until_ready(run(carry))
    return calls * STEPS * batch / (time.perf_counter() - started)


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**7)
    parser.add_argument("--read", type=int, default=10**7, help="rows that are read in each measurement")
    parser.add_argument(
        "--folder", type=Path, help="where the files go, on the disk that is meant; by default a temporary one"
    )
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--num-inducing", type=int, default=32)
    parser.add_argument("--disk", type=float, nargs="*", default=[], help="only this: gain of reading ahead, GB/s")
    parser.add_argument("--rounds", type=int, default=3, help="of these")
    args = parser.parse_args(argv)
    batch, found = args.batch_size, {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write(folder, args.rows)
        constants = {
            "N": args.rows,
            "Z": np.random.default_rng(1).normal(size=(args.num_inducing, DIM)).astype(np.float32),
        }
        for speed in args.disk:
            found[f"{speed} GB/s"] = [reading_ahead(folder, 1e9 * speed, batch, args.read, constants, args.rounds)]
            print(f"a disk of {speed} GB/s: {found[f'{speed} GB/s'][0]:.2f} times the rows a second", flush=True)
        if args.disk:
            return found
        fit = max(on_device(opened(folder, "in memory"), batch, args.read // 2, constants) for _ in range(3))
        print(f"{args.rows} rows, batches of {batch}, M = {args.num_inducing}; thousands of rows a second")
        print(f"{'':24}{'read cold':>10}{'read warm':>10}{'fit cold':>10}{'fit warm':>10}")
        print(f"{'on the device':24}{'':>30}{fit / 1e3:10.0f}", flush=True)
        found["on the device"] = [fit]
        for label, kind, shuffle, is_on_disk in KINDS:
            speeds = []
            for measure in (reading, fitting):
                for cold in (True, False):
                    of_single = cold and label == "memmap, single rows"
                    if (cold and not is_on_disk) or (of_single and measure is fitting):
                        speeds.append(float("nan"))
                        continue
                    gc.collect()  # of maps, whose pages stay
                    if cold:
                        forget(folder)
                    num = args.read // (200 if kind == "grain" or of_single else 1)
                    data = grain_stream(folder, batch) if kind == "grain" else opened(folder, kind)
                    more = (constants,) if measure is fitting else ()
                    speeds.append(measure(data, shuffle, batch, num, *more))  # type: ignore[operator]
            found[label] = speeds
            print(
                f"{label:24}" + "".join(f"{'-':>10}" if np.isnan(s) else f"{s / 1e3:10.0f}" for s in speeds), flush=True
            )
    return found


if __name__ == "__main__":
    main()
