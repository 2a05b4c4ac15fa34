"""Arrays as the host sees them, and digests of their contents: equal digests mean equal contents."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["PIECE", "digest", "digest_of_array", "from_host", "to_host"]

PIECE = 2**24  # bytes that one thread digests at a time


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


def to_host(x: Any) -> np.ndarray:
    """A replicated array as a NumPy array; for a typed PRNG key, its words."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = x.addressable_data(0)
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def from_host(array: np.ndarray, like: Any) -> jax.Array:
    """The inverse of :func:`to_host`. The result is of the same kind as ``like``."""
    x = jnp.asarray(array)
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if _is_key(like) else x


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
