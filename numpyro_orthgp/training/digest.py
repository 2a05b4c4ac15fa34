"""Digests of array contents: equal digests mean equal contents."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import numpy as np

from numpyro_orthgp.training.batches import on_disk
from numpyro_orthgp.training.columns import Column

__all__ = ["digest", "digest_of_array", "digest_of_data"]

PIECE = 2**24  # bytes that one thread digests at a time
LARGE = 2**28  # bytes; of a larger memory map only some rows are read
ROWS = 1024  # number of these rows
SLICE = 64  # rows read at once from arrays that are read in slices


def digest(content: bytes | np.ndarray) -> str:
    """Digest of bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of_array(array: np.ndarray, dtype: Any = None) -> str:
    """Digest of all entries, shape and dtype.

    Several threads hash the pieces of a large array, since hashing is slower than reading memory.

    :param dtype: dtype to cast to first; by default the array's own.
    """
    dtype = array.dtype if dtype is None else np.dtype(dtype)
    rows = array.reshape(1) if array.ndim == 0 else array
    step = max(1, PIECE * len(rows) // max(rows.nbytes, 1))

    def piece(start: int) -> bytes:
        part = np.ascontiguousarray(rows[start : start + step], dtype)
        return hashlib.blake2b(part.reshape(-1).view(np.uint8), digest_size=16).digest()

    starts = range(0, len(rows), step)
    if len(starts) < 2:
        parts = [piece(start) for start in starts]
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
            parts = list(pool.map(piece, starts))
    return digest(b"".join([f"{dtype.name}{array.shape}".encode(), *parts]))


def digest_of_data(array: Any, dtype: Any) -> str:
    """Digest of an array of the data: of all rows, or, above 256 MiB on disk, of 1024 rows and the file's size and time, if any.

    :param array: NumPy's, or a :class:`~numpyro_orthgp.training.columns.Column`.
    :param dtype: the dtype to which JAX casts.
    """
    is_column = isinstance(array, Column)
    file = array.file if is_column else on_disk(array)
    if array.nbytes <= LARGE or not (is_column or (file is not None and os.path.exists(file))):
        return digest_of_array(array[:] if is_column else array, dtype)
    if is_column:  # in few slices
        starts = np.unique(np.linspace(0, len(array) - SLICE, ROWS // SLICE).astype(int))
        sample = np.concatenate([array[int(start) : int(start) + SLICE] for start in starts])
    else:
        sample = array[np.unique(np.linspace(0, len(array) - 1, ROWS).astype(int))]
    found = f"{digest_of_array(sample, dtype)} of {len(sample)} rows"
    if file is None or not os.path.exists(file):
        return found + f" of {len(array)}"
    status = os.stat(file)
    time = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
    return f"{found}, a file of {status.st_size} bytes changed {time}"
