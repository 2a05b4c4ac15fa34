"""Whether the dtype of a model's numbers resolves the differences between rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_orthgp.math.resolution import coarse_columns

__all__ = ["arguments_of", "coarse_of"]


def arguments_of(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arrays among a model's arguments, under the user's names."""
    try:
        given = inspect.signature(model).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of what has no signature
        given = {f"argument {i}": a for i, a in enumerate(args)} | kwargs
    leaves, _ = jax.tree_util.tree_flatten_with_path(given)
    names = [(path[0].key + jax.tree_util.keystr(path[1:]), leaf) for path, leaf in leaves]
    return {name: leaf for name, leaf in names if isinstance(leaf, (np.ndarray, jax.Array)) and leaf.ndim}


def coarse_of(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each array with columns that its dtype does not resolve; equal arrays get one sentence.

    :param arrays: by name.
    """
    found: dict[tuple[Any, ...], str] = {}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, np.floating):
            continue
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # a model casts what is NumPy's
        coarse = coarse_columns(np.asarray(array, dtype), np.asarray(array))
        if coarse:
            found.setdefault(tuple(coarse), coarse[0].words(name, dtype))
    return tuple(found.values())
