"""Short names for what arrays hold: equal names, equal contents."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import numpy as np

from numpyro_orthgp.training.batches import on_disk

__all__ = ["digest", "digest_of_array", "digest_of_data"]

PIECE = 2**24  # bytes that one thread digests at a time
LARGE = 2**28  # bytes of a memory map of which only some rows are read
ROWS = 1024  # of these


def digest(content: bytes | np.ndarray) -> str:
    """Of bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of_array(array: np.ndarray, dtype: Any = None) -> str:
    """Of all entries, with shape and dtype.

    Threads share the pieces of a large array, since hashing is slower than memory.

    :param dtype: to cast to before; by default the array's own.
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


def digest_of_data(array: np.ndarray, dtype: Any) -> str:
    """Of an array of the data: all of it, but of a memory map of more than 256 MiB 1024 rows, with its file's size and time.

    :param dtype: that JAX casts to.
    """
    file = on_disk(array)
    if file is None or array.nbytes <= LARGE or not os.path.exists(file):
        return digest_of_array(array, dtype)
    rows = np.unique(np.linspace(0, len(array) - 1, ROWS).astype(int))
    status = os.stat(file)
    time = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
    return f"{digest_of_array(array[rows], dtype)} of {len(rows)} rows, a file of {status.st_size} bytes changed {time}"
