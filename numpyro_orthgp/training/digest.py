"""Digests of arrays of the data, also of such as are on disk."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

import numpy as np

from numpyro_orthgp.math.digest import PIECE, digest, digest_of_array
from numpyro_orthgp.training.arrays import on_disk
from numpyro_orthgp.training.columns import Column

__all__ = ["digest_of_data"]

LARGE = 2**28  # bytes; of larger arrays on disk only some rows are read
ROWS = 1024  # number of these rows
SLICE = 64  # rows read at once from arrays that are read in slices


def digest_of_data(array: Any, dtype: Any) -> str:
    """Digest of an array of the data: of all rows, or, above 256 MiB on disk, of 1024 rows and of the sizes and times of files.

    A private memory map (``mode="c"``) may differ from its file, so all of its rows count. So do those of tables, and of
    parquet files that came opened, whose paths are not known.

    :param array: NumPy's, or a :class:`~numpyro_orthgp.training.columns.Column`.
    :param dtype: the dtype to which JAX casts.
    """
    is_column = isinstance(array, Column)
    files = array.files if is_column else [f for f in (on_disk(array),) if f is not None and os.path.exists(f)]
    if array.nbytes <= LARGE or not (is_column or (files and not _is_private(array))):
        return digest_of_array(array[:] if is_column else array, dtype)
    if is_column and array.is_unmarked:
        step = max(1, PIECE * len(array) // array.nbytes)
        return digest("".join(digest_of_array(array[i : i + step], dtype) for i in range(0, len(array), step)).encode())
    if is_column:  # in few slices
        starts = np.unique(np.linspace(0, len(array) - SLICE, ROWS // SLICE).astype(int))
        sample = np.concatenate([array[int(start) : int(start) + SLICE] for start in starts])
    else:
        sample = array[np.unique(np.linspace(0, len(array) - 1, ROWS).astype(int))]
    return f"{digest_of_array(sample, dtype)} of {len(sample)} rows{_state_of(files) or f' of {len(array)}'}"


def _is_private(array: Any) -> bool:
    """Whether changes of a memory map stay in memory."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return bool(array.mode == "c")
        array = array.base
    return False


def _state_of(files: list[str]) -> str:
    """Sizes and times of files, and of the files in folders."""
    inner = [os.path.join(folder, f) for name in files for folder, _, found in os.walk(name) for f in sorted(found)]
    all_of = [os.stat(f) for f in sorted(inner) or files]
    if not all_of:
        return ""
    size, last = sum(s.st_size for s in all_of), max(s.st_mtime for s in all_of)
    time = datetime.fromtimestamp(last, UTC).isoformat()
    if len(all_of) == 1:
        return f", a file of {size} bytes changed {time}"
    each = digest(str([(s.st_size, s.st_mtime_ns) for s in all_of]).encode())[:8]
    return f", {len(all_of)} files of {size} bytes, {each}, the last changed {time}"
