"""Arrays of the data: what is accepted as one, and reading its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.foreign import as_numpy
from numpyro_orthgp.training.columns import Column, is_lazy

__all__ = ["MAX_ROWS", "NOT_TRACED", "as_array", "check_range", "is_plain", "num_rows", "on_disk", "read_rows"]

NOT_TRACED = "A fit compiles its own steps, and cannot be within jax.jit, vmap or grad: call it outside of them."
MAX_ROWS = 2**31 - 1  # row numbers must fit into JAX's int32


def read_rows(name: str, array: Any, dtype: Any, rows: Any) -> np.ndarray:
    """Rows, cast. Numbers on disk are checked here to fit the dtype; those in memory were checked as a whole.

    :param rows: a slice; or row numbers of any shape, unless the array is read in slices.
    """
    part = array[rows] if isinstance(rows, slice) else np.take(array, rows, axis=0)
    if isinstance(array, Column) or on_disk(array):
        check_range(name, part, dtype)
    return np.asarray(part, dtype)


def is_plain(leaf: Any) -> bool:
    """Whether it is an array of NumPy of which nothing else need be checked: nothing masked or lazy, rows of numbers."""
    return type(leaf) is np.ndarray and leaf.dtype.kind in "biuf" and leaf.dtype.itemsize <= 8 and leaf.ndim > 0


def as_array(name: str, leaf: Any) -> Any:
    """A numeric array of rows: NumPy's, or a :class:`~numpyro_orthgp.training.columns.Column` if it is read in slices.

    :raises TypeError: for other objects, masked entries, or entries that are not numbers.
    :raises ValueError: without a first axis.
    """
    if is_plain(leaf):
        return leaf
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(NOT_TRACED)
    if not is_lazy(leaf) and not hasattr(leaf, "__array__"):
        raise TypeError(f"`{name}` must be an array; got {type(leaf).__name__}. {_way_to_array(leaf)}")
    if np.ma.is_masked(leaf):
        raise TypeError(
            f"`{name}` is a masked array with entries missing, which a model cannot see. Pass array.filled(...) and the mask as an "
            "array of its own, for numpyro.handlers.mask."
        )
    if is_lazy(leaf) and leaf.shape is None:
        raise ValueError(f"`{name}` must have a first axis of N rows; got an empty dataset.")
    array = Column(leaf) if is_lazy(leaf) else np.asarray(as_numpy(name, leaf))
    of_numbers = jnp.issubdtype(array.dtype, np.number) or array.dtype == bool
    if array.dtype.kind == "m" or array.dtype.char in "gG" or not of_numbers:
        raise TypeError(
            f"`{name}` must hold numbers; got an array of {array.dtype}.{_way_to_numbers(leaf, array.dtype)}"
        )
    if isinstance(array, Column):
        array.check_stored(name)
    if array.ndim == 0:
        raise ValueError(
            f"`{name}` must have a first axis of N rows; got a single number. Pass constants as keywords, and let a loader give "
            "batches, not single rows."
        )
    return array


def _way_to_array(leaf: Any) -> str:
    if hasattr(leaf, "collect"):
        return "Collect it, or write it to a file (sink_parquet) and pass training.columns(file, ...)."
    if hasattr(leaf, "keys"):
        return "Pass the arrays in it, each by itself: (file['X'], file['y'])."
    return "Convert lists first: np.asarray(...)."


def _way_to_numbers(leaf: Any, dtype: Any) -> str:
    if dtype.names:
        return f" Pass its fields, each by itself: array[{dtype.names[0]!r}]."
    if hasattr(leaf, "to_numpy"):
        return " Pass table.to_numpy(float), with NaN for missing entries. Categories become codes by inputs_of(table)."
    if dtype.char in "gG":
        return " JAX has at most 64 bits: array.astype(float)."
    if dtype.kind in "mM":
        return (
            " Take days since a start, or what the model is to see of it: (array - array[0]) / np.timedelta64(1, 'D')."
        )
    return {
        "O": " Numbers that are objects become numbers by array.astype(float).",
        "U": " Labels become codes by np.unique(array, return_inverse=True)[1].",
        "S": " Labels become codes by np.unique(array, return_inverse=True)[1].",
    }.get(dtype.kind, "")


def check_range(name: str, array: Any, dtype: Any) -> None:
    """Raise an error if a cast would wrap integers around, drop what is after the point, or make numbers infinite."""
    if array.dtype == dtype:
        return
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(
            f"`{name}` is {array.dtype} here and was {np.dtype(dtype)} before, which cannot hold it. Convert all rows to one "
            "dtype, such as np.float32."
        )
    if array.dtype.kind not in "fiu" or not array.size:
        return
    limits = jnp.iinfo(dtype) if jnp.issubdtype(dtype, np.integer) else jnp.finfo(dtype)
    extremes = [x for x in (array.min().item(), array.max().item()) if np.isfinite(x)]
    too_large = [x for x in extremes if not limits.min <= x <= limits.max]
    if too_large:
        raise ValueError(
            f"`{name}` is {array.dtype}, which JAX casts to {np.dtype(dtype)}, where {too_large[0]} does not fit. Subtract an "
            "offset or rescale before, or use 64 bits (numpyro.enable_x64())."
        )


def on_disk(array: np.ndarray) -> str | None:
    """The file of a memory map, or of a view of one; ``None`` for arrays in memory."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return None if array.filename is None else str(array.filename)
        array = array.base  # type: ignore[assignment]
    return None


def num_rows(names: list[str], arrays: list[np.ndarray]) -> int:
    lengths = {name: len(a) for name, a in zip(names, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} in {name}" for name, length in lengths.items())
        raise ValueError(
            f"Arrays of `data` must have the same number of rows; got {listed}. Pass arrays that are not rows of "
            "the data, such as inducing points, as keywords: fit(svi, rng_key, (X, y), ..., Z=Z)."
        )
    if not any(lengths.values()):
        raise ValueError("`data` must hold at least one row; got " + (f"{lengths}." if lengths else "no arrays."))
    num = next(iter(lengths.values()))
    if num > MAX_ROWS:
        raise ValueError(f"`data` have {num} rows; at most {MAX_ROWS} are possible. Pass them as a training.Stream.")
    return num
