"""Lazy arrays, read only where rows are needed: h5py datasets, zarr arrays, columns of parquet and arrow tables, sparse matrices.

An array is lazy if it is sparse (``training/sparse.py``) or has ``chunks``, as in h5py, zarr and dask, beside ``shape``, ``dtype``
and slices of rows. Slices are fast to read, so batches of lazy arrays come from block shuffles (``training/orders.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from numpyro_orthgp.foreign import as_numpy
from numpyro_orthgp.training.chunks import check_chunks
from numpyro_orthgp.training.sparse import SparseRows, is_sparse

__all__ = ["Column", "columns", "default_blocks", "in_memory", "is_lazy", "rows_of"]

BLOCK_BYTES = 2**20  # of all arrays together
HELD, HELD_BYTES = 64, 2**27


def is_lazy(leaf: Any) -> bool:
    """Whether an array is read in slices.

    :raises ValueError: for a dataset of a file that is closed.
    """
    if isinstance(leaf, np.ndarray):
        return False
    if type(leaf).__module__.startswith("h5py.") and not leaf:
        raise ValueError(
            "A dataset of h5py is closed. Keep its file open as long as the fit and its result are in use."
        )
    return is_sparse(leaf) or all(hasattr(leaf, name) for name in ("chunks", "shape", "dtype"))


class Column:
    """An array that is read only in slices of rows.

    :param leaf: an array of h5py, zarr or another library, with ``shape``, ``dtype``, ``chunks`` and slices, or a sparse matrix.
    """

    def __init__(self, leaf: Any) -> None:
        leaf = SparseRows(leaf) if is_sparse(leaf) else leaf
        self.leaf: Any = leaf
        self.shape, self.dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        if any(n != n for n in self.shape):  # dask's, where rows were picked
            raise ValueError("The number of rows of an array is not known: call its compute_chunk_sizes() first.")
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self._folders = [f for f in self.files if os.path.isdir(f)]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        """
        :raises FileNotFoundError: if a folder is gone: zarr takes what is missing for zeros.
        :raises TypeError: for masked entries.
        :raises ValueError: if the array is not as long as it was.
        """
        found, num = as_numpy("data", self.leaf[rows]), len(range(*rows.indices(len(self))))
        if np.ma.is_masked(found):
            raise TypeError(
                f"An array of {type(self.leaf).__module__.partition('.')[0]} is masked, with {np.ma.count_masked(found)} entries "
                f"missing among {num} rows from {rows.indices(len(self))[0]} on. Fill them in (dask.array.ma.filled), and pass "
                "the mask as an array of its own."
            )
        found = np.asarray(found)
        if found.shape != (num, *self.shape[1:]):
            raise ValueError(
                f"{num} rows from {rows.indices(len(self))[0]} on gave an array of shape {found.shape}: the data were changed "
                "after the fit began."
            )
        for folder in self._folders:
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"{folder} was there when the fit began, and is gone.")
        return found

    @property
    def chunk(self) -> int:
        """Number of rows that are stored together."""
        first = self.leaf.chunks[0] if self.leaf.chunks else 1
        return max(1, int(np.max(first)))

    @property
    def files(self) -> list[str]:
        """The array's files, for h5py and parquet, or its folder, for zarr. Empty if they are not known."""
        leaf, store = self.leaf, getattr(self.leaf, "store", None)
        found = getattr(leaf, "files", None) or [getattr(getattr(leaf, "file", None), "filename", None)]
        if store is not None and hasattr(store, "root"):
            found = [os.path.join(store.root, leaf.path)]
        return [str(f) for f in found if isinstance(f, (str, os.PathLike)) and os.path.exists(f)]

    def check_stored(self, name: str) -> None:
        """Check the chunks in a folder of zarr, which does not say all that it cannot read.

        :raises ValueError: for a chunk that was cut short.
        """
        if self._folders:
            check_chunks(name, self.leaf, self._folders[0])

    @property
    def is_unmarked(self) -> bool:
        """Whether only the rows tell that they were changed: of a table, or of parquet files that came opened, without a path."""
        return bool(getattr(self.leaf, "is_unmarked", False))


def rows_of(leaf: Any, rows: Any = None) -> np.ndarray:
    """Rows of an array. A lazy array is read in slices.

    :param rows: a slice or sorted row numbers; by default all rows.
    """
    if not is_lazy(leaf):
        if not isinstance(leaf, np.ndarray | jax.Array):
            leaf = np.asarray(leaf)  # a table takes numbers of rows for labels, or for columns
        return np.asarray(leaf if rows is None else leaf[rows])
    rows = slice(None) if rows is None else rows
    column = Column(leaf)
    if isinstance(rows, slice):
        return column[rows]
    rows = np.asarray(rows)
    if not rows.size:
        return column[:0]
    # Reads few slices, each about as long as the rows stored together, and takes the wanted rows from each.
    pieces = np.split(rows, np.flatnonzero(np.diff(rows // max(column.chunk, 1024))) + 1)
    return np.concatenate([column[int(p[0]) : int(p[-1]) + 1][p - p[0]] for p in pieces])


def in_memory(tree: Any) -> Any:
    """All arrays of a tree, lazy ones read as a whole."""
    return jax.tree.map(lambda leaf: rows_of(leaf) if is_lazy(leaf) else leaf, tree)


def default_blocks(arrays: Sequence[Any], size: int | None, held: int | None, group_size: int = 1) -> tuple[int, int]:
    """Default number of rows in a block, and of blocks in memory. Blocks consist of whole groups."""
    num_rows = max(1, len(arrays[0]))
    row_bytes = max(1, sum(a.nbytes for a in arrays) // num_rows)
    if size is None:
        chunk = max([a.chunk for a in arrays if isinstance(a, Column)], default=1)
        wanted = max(1, BLOCK_BYTES // row_bytes)
        unit = math.lcm(chunk, group_size)  # or whole groups alone, where blocks would be much too long
        unit = unit if unit <= 4 * max(wanted, chunk) else group_size
        size = -(-wanted // unit) * unit
    elif size % group_size:
        raise ValueError(f"Blocks must be whole groups: `size` must be a multiple of {group_size}; got {size}.")
    size = min(size, num_rows // group_size * group_size)
    return size, held or max(2, min(HELD, HELD_BYTES // (size * row_bytes)))


def columns(table: Any, **names: str | Sequence[str]) -> dict[str, Any]:
    """Columns of parquet files or of a table, as ``data`` for a fit. They are read only where rows are needed.

    ::

        file = pyarrow.parquet.ParquetFile("data.parquet")
        data = ogp.training.columns(file, X=["a", "b"], y="y")  # arguments of the model: X and y
        result = ogp.fit(svi, rng_key, data, batch_size=1024, num_epochs=10, N=len(data["y"]), Z=Z)

    A parquet file is read in whole row groups. Blocks of a block shuffle are as long as the longest row group. Write row groups of
    some ten thousand rows: 64 row groups of a million rows do not fit into memory.

    :param table: a ``pyarrow.parquet.ParquetFile``, its path, a list of paths whose rows are concatenated, or a
        ``pyarrow.Table``, which may be memory-mapped, or a table of pandas or polars. Needs pyarrow.
    :param names: for each argument of the model, the name of its column, shape (N,), or a list of names, shape (N, number). A
        column of lists of a fixed size counts as so many columns.
    :return: lazy arrays by argument, with ``shape``, ``dtype``, ``chunks`` and slices.
    :raises ImportError: without pyarrow.
    :raises TypeError: for other objects, or columns that are not numeric.
    :raises ValueError: for columns that do not exist, or are not of one type in all files; when rows are read, for missing values.
    """
    reader = _Reader(table)
    wanted = {name: [given] if isinstance(given, str) else _listed(given) for name, given in names.items()}
    if not wanted or not all(wanted.values()):
        raise ValueError("Say which columns are which argument of the model: columns(table, X=['a', 'b'], y='y').")
    unknown = sorted({c for given in wanted.values() for c in given} - set(reader.schema.names))
    if unknown:
        raise ValueError(
            f"There is no column {unknown[0]!r}; the table has {', '.join(map(repr, reader.schema.names))}."
        )
    reader.names = sorted({c for given in wanted.values() for c in given})
    reader.check_names()
    return {name: _TableColumn(reader, given, isinstance(names[name], str)) for name, given in wanted.items()}


def _listed(names: Any) -> list[str]:
    """Names of columns; none if they are something else, such as numbers."""
    names = list(names) if isinstance(names, Iterable) else []
    return names if all(isinstance(name, str) for name in names) else []


class _Reader:
    """Reads slices of rows from files or a table. Keeps the last slice, since several arguments of the model read the same one."""

    def __init__(self, table: Any) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ImportError("Parquet and arrow tables need pyarrow: pip install pyarrow.") from error
        self.names: list[str] = []
        self.files: list[Any] = []
        self.table = None
        self.last: tuple[tuple[int, int], Any] | None = None
        self.concat, self.make = pyarrow.concat_tables, pyarrow.table
        self.paths: list[Any] = []
        if hasattr(table, "__arrow_c_stream__") and hasattr(table, "shape"):
            table = pyarrow.table(table)  # of pandas or polars
        if isinstance(table, pyarrow.Table):
            self.table, self.schema, self.num_rows, self.chunk = table, table.schema, table.num_rows, 1
            return
        given = table if isinstance(table, (list, tuple)) else [table]
        if not given or not all(isinstance(f, (str, os.PathLike, parquet.ParquetFile)) for f in given):
            raise TypeError(
                "`table` must be a pyarrow.Table, a table of pandas or polars, a pyarrow.parquet.ParquetFile or the path or paths "
                f"of such files; got {type(table).__name__}. Collect a lazy table, or write it to a file (sink_parquet). Of a "
                "pyarrow.dataset pass its files: columns(dataset.files, ...)."
            )
        self.paths = [f for f in given if isinstance(f, (str, os.PathLike))]
        if folders := [f for f in self.paths if os.path.isdir(f)]:
            raise ValueError(
                f"{folders[0]} is a folder. Pass its files: columns(sorted(Path(folder).glob('*.parquet')), ...)."
            )
        self.files = [f if isinstance(f, parquet.ParquetFile) else _opened(f, parquet) for f in given]
        self.schema = self.files[0].schema_arrow
        self.groups = [(f, i) for f in self.files for i in range(f.num_row_groups)]
        lengths = [f.metadata.row_group(i).num_rows for f, i in self.groups]
        self.ends = np.cumsum(lengths)
        self.num_rows, self.chunk = int(sum(lengths)), max([1, *lengths])

    def check_names(self) -> None:
        """
        :raises ValueError: if a column comes twice, is not in all files, or has other types in others.
        """
        for name in self.names:
            if self.schema.names.count(name) > 1:
                raise ValueError(
                    f"The table has {self.schema.names.count(name)} columns {name!r}. Give each a name of its own."
                )
            for i, file in enumerate(self.files):
                schema = file.schema_arrow
                found = schema.field(name).type if name in schema.names else "not there"
                if found != self.schema.field(name).type:
                    raise ValueError(
                        f"Column {name!r} is {self.schema.field(name).type} in the first file, and {found} in file {i + 1}. Write "
                        "all files with the same columns and types."
                    )

    def read(self, start: int, stop: int) -> Any:
        if self.last is None or self.last[0] != (start, stop):
            self.last = ((start, stop), self._read(start, stop))
        return self.last[1]

    def _read(self, start: int, stop: int) -> Any:
        if self.table is not None:
            return self.table.select(self.names).slice(start, stop - start)
        first, last = int(np.searchsorted(self.ends, start, "right")), int(np.searchsorted(self.ends, stop, "left"))
        parts = [f.read_row_group(i, columns=self.names, use_threads=True) for f, i in self.groups[first : last + 1]]
        # Files may differ in whether a column may lack values, and arrow puts equal schemas together only.
        parts = [self.make({name: part[name] for name in self.names}) for part in parts]
        begin = int(self.ends[first - 1]) if first else 0
        return self.concat(parts).slice(start - begin, stop - start)


def _opened(path: Any, parquet: Any) -> Any:
    try:
        return parquet.ParquetFile(path, memory_map=True)
    except ValueError as error:  # arrow's does not name the file
        raise ValueError(f"{path} is not a complete parquet file: {error}") from error


class _TableColumn:
    """One argument of the model: a column, or several side by side."""

    def __init__(self, reader: _Reader, names: list[str], is_one: bool) -> None:
        self.reader, self.names = reader, names
        kinds = [reader.schema.field(name).type for name in names]
        self.widths = [getattr(kind, "list_size", 1) for kind in kinds]  # a list of fixed size has as many columns
        self.is_one = is_one = is_one and not hasattr(kinds[0], "list_size")
        self.shape = (reader.num_rows,) if is_one else (reader.num_rows, sum(self.widths))
        self.chunks = (reader.chunk, *self.shape[1:])
        self.files, self.is_unmarked = reader.paths, len(reader.paths) < max(1, len(reader.files))
        types = []
        for name, kind in zip(names, kinds, strict=True):
            try:
                types.append(np.dtype(getattr(kind, "value_type", kind).to_pandas_dtype()))
            except (NotImplementedError, TypeError):
                types.append(np.dtype(object))
            if types[-1].kind not in "biuf" or (hasattr(kind, "value_type") and not hasattr(kind, "list_size")):
                raise TypeError(
                    f"Column {name!r} must hold numbers; it holds {kind}. Write categories as codes (see inputs_of), times and "
                    "decimals as numbers, and lists with a fixed size."
                )
        self.dtype = np.result_type(*types)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        if not isinstance(rows, slice):
            raise TypeError(f"Columns are read in slices of rows, X[start:stop]; got {type(rows).__name__}.")
        start, stop, step = rows.indices(self.shape[0])
        if step < 0:
            raise ValueError("Columns are read forwards: X[start:stop][::-1], not X[stop:start:-1].")
        if stop <= start:
            return np.empty((0, *self.shape[1:]), self.dtype)
        table = self.reader.read(start, stop)
        out, end = np.empty((table.num_rows, sum(self.widths)), self.dtype), 0
        for name, width in zip(self.names, self.widths, strict=True):
            column = table[name]
            entries = column.combine_chunks().flatten() if hasattr(column.type, "list_size") else column
            if missing := column.null_count or entries.null_count:
                raise ValueError(
                    f"Column {name!r} has {missing} missing values among rows {start} to {stop}, which a model cannot "
                    "see. Fill or drop them before."
                )
            out[:, end : end + width] = np.asarray(entries).reshape(-1, width)
            end += width
        return out[::step, 0] if self.is_one else out[::step]
