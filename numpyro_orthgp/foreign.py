"""Arrays of other libraries: tables, tensors, masked arrays. JAX takes them, but wraps large integers around and drops masks."""

from __future__ import annotations

import array
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.processes import refuse_fork

__all__ = [
    "KnownTables", "as_jax", "as_numpy", "as_outputs", "check_labels_of_rows", "check_labels_of_tables", "filled", "in_bits_of_now",
    "refuse_other_order", "without_mask",
]  # fmt: skip

_BUFFERS = (memoryview, array.array)
_OF_NUMPY = (np.ndarray, np.generic, *_BUFFERS)


def as_numpy(name: str, x: Any) -> Any:
    """Tables, tensors, buffers and NumPy's scalars as arrays of NumPy. Others stay as they are.

    :raises TypeError: for tensors that NumPy cannot read.
    """
    if isinstance(x, _BUFFERS):
        return np.asarray(x)
    if isinstance(x, list | tuple) and any(isinstance(e, _OF_NUMPY) for e in jax.tree.leaves(x)):
        with suppress(Exception):  # of unequal lengths, or with tracers, which JAX reports
            rows = np.asarray(x)
            return rows if rows.dtype.kind in "biuf" else x
    if isinstance(x, jax.Array | np.ndarray) or not hasattr(x, "__array__"):
        return x
    if isinstance(getattr(x, "_meta", None), np.ma.MaskedArray):
        return x.compute()  # dask's, whose __array__ drops masks
    try:
        return np.asanyarray(x)
    except (TypeError, RuntimeError) as error:
        if not hasattr(x, "detach"):
            raise
        raise TypeError(
            f"`{name}` is a tensor of torch that NumPy cannot read: {error} Pass tensor.detach().cpu().float().numpy(), and a "
            "sparse one after to_dense()."
        ) from error


def as_jax(x: Any) -> jax.Array:
    """An array of JAX. Within a program that is traced its values stay known, where ``jnp.asarray`` would return a tracer."""
    refuse_fork()
    if isinstance(x, jax.Array):
        return x
    with jax.ensure_compile_time_eval():
        return jnp.asarray(x)


def in_bits_of_now(tree: Any) -> Any:
    """Arrays of JAX that have 64 bits from before ``jax_enable_x64`` was switched off, with 32: JAX does not mix the two."""

    def cast(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.number):
            return x
        now = jax.dtypes.canonicalize_dtype(x.dtype)
        return x if now == x.dtype else x.astype(now)

    return jax.tree.map(cast, tree)


def without_mask(name: str, x: Any, remedy: str) -> Any:
    """``x`` as :func:`as_numpy` has it, a masked array in which nothing is masked as a plain one: JAX takes no others.

    :raises TypeError: for a masked array with entries missing.
    """
    x = as_numpy(name, x)
    if np.ma.is_masked(x):
        raise TypeError(
            f"`{name}` is a masked array with {np.ma.count_masked(x)} entries missing, which JAX does not see. {remedy}"
        )
    return np.asarray(x) if isinstance(x, np.ma.MaskedArray) else x


def filled(x: Any) -> Any:
    """A masked array of NumPy with NaN or NaT where entries are missing. Others stay as they are."""
    if not np.ma.is_masked(x):
        return x
    if x.dtype.kind in "biuf":
        return x.astype(float).filled(np.nan)
    return x.filled(np.datetime64("NaT")) if x.dtype.kind == "M" else np.asarray(x)


def as_outputs(name: str, y: Any, remedy: str) -> jax.Array:
    """Outputs as an array of JAX.

    :raises TypeError: for a masked array with entries missing, with a ``remedy``, for complex numbers, text, categories and other
        objects.
    :raises ValueError: for integers that JAX would wrap around.
    """
    y = without_mask(name, y, remedy)
    if isinstance(y, np.ndarray) and y.dtype.kind not in "biufcV":  # V: of ml_dtypes
        raise TypeError(
            f"`{name}` must hold numbers; got an array of {y.dtype}. Labels become codes by np.unique({name}, return_inverse=True)"
            f"[1], and numbers that are objects by np.asarray({name}, float)."
        )
    if isinstance(y, np.ndarray) and not y.dtype.isnative:
        y = y.astype(y.dtype.newbyteorder("="))  # JAX has no others
    if isinstance(y, np.ndarray) and y.dtype.kind in "iu":
        limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(y.dtype))
        wrapped = y[(y < limits.min) | (y > limits.max)]
        if wrapped.size:
            raise ValueError(
                f"`{name}` is {y.dtype} and holds {wrapped[0]}, which JAX would wrap around in {limits.dtype}. Take another "
                "unit, or use 64 bits (numpyro.enable_x64())."
            )
    if jnp.iscomplexobj(y):
        raise TypeError(
            f"`{name}` must hold real numbers; got {y.dtype}. Pass real and imaginary parts as two outputs."
        )
    return as_jax(y)


def refuse_other_order(X: Any, tables: dict[frozenset[str], list[str]]) -> None:
    """Refuse a table with the columns of an earlier one in another order: a kernel reads columns by their place.

    :param tables: columns of earlier tables, by their set; those of X are added.
    :raises ValueError: with the two orders.
    """
    columns = [str(column) for column in getattr(X, "columns", ())]
    known = tables.setdefault(frozenset(columns), columns)
    if known != columns:
        raise ValueError(
            f"A table has the columns {', '.join(columns)}, and one before it had them in the order {', '.join(known)}. Kernels "
            f"read columns by their place, so a lengthscale would be that of another column. Pass X[{known}], or an array if you "
            "mean it."
        )


def check_labels_of_rows(name: str, own: Any, other: str, index: Any) -> None:
    """Refuse pandas' rows that have the labels of others in another order, and warn if only some are at other places.

    :param name, other: names of the two.
    :param own, index: labels of their rows, if they have any.
    :raises ValueError: with the first such row.
    """
    if not hasattr(own, "equals") or not hasattr(index, "equals") or own.equals(index):
        return
    if not (own.is_unique and index.is_unique):
        return
    place = own.get_indexer(index)  # of each row of X in y, by its label
    moved = (place >= 0) & (place != np.arange(len(index)))
    if not moved.any():
        return
    row = int(np.argmax(moved))
    label = index[row : row + 1].tolist()[0]
    where = f"row {row} of {other} has the label {label!r}, that of row {place[row]} of {name}, and rows are taken as they stand."
    if (place >= 0).all():
        raise ValueError(
            f"`{name}` has the rows of `{other}` in another order by their labels: {where} Did you mean "
            f"{name}.loc[{other}.index]? If not, pass {name}.to_numpy()."
        )
    warnings.warn(
        f"Labels of the rows of `{other}` and `{name}` do not agree: {where} If labels say which rows belong together, take "
        f"those that both have; if not, pass {name}.to_numpy(), which has no labels.",
        UserWarning,
        stacklevel=2,
    )


def check_labels_of_tables(names: Sequence[str], tables: Sequence[Any]) -> None:
    """:func:`check_labels_of_rows` of tables that belong together row by row: of each with the first of its length.

    :raises ValueError: with the first row that is elsewhere.
    """
    first: dict[int, tuple[str, Any]] = {}
    for name, table in zip(names, tables, strict=True):
        own: Any = getattr(table, "index", None)
        if hasattr(own, "equals"):
            check_labels_of_rows(name, own, *first.setdefault(len(own), (name, own)))


class KnownTables(dict[frozenset[str], list[str]]):
    """The order of the columns of tables, by their set. All are equal: as static data of a pytree they cause no recompilation.

    .. attribute:: labels

        Labels of rows, if they are known.
    """

    labels: Any = None

    @classmethod
    def of(cls, *tables: Any) -> KnownTables:
        """
        :param tables: tables, lists of them, or other arrays.
        :raises ValueError: if two have the same columns in another order.
        """
        known = cls()
        for given in tables:
            for one in given if isinstance(given, list | tuple) else [given]:
                refuse_other_order(one, known)
        return known

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownTables)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return 0
