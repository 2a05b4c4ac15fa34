"""Functions that are one program wherever they are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import Partial

from numpyro_orthgp.errors import is_concrete

__all__ = ["one_program"]

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)  # what `jit` takes

_F = TypeVar("_F", bound=Callable[..., Any])


def one_program(function: _F) -> _F:
    """``function``, compiled as a whole if it is called outside of any ``jit``, ``grad`` or ``vmap``; there it is what it was.

    JAX compiles what is called outside operation by operation, which takes several times as long.

    :param function: of pytrees of arrays.
    """
    compiled = jax.jit(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        return (compiled if _can_be_compiled(args) else function)(*args)

    return call  # type: ignore[return-value]


def _can_be_compiled(args: tuple[Any, ...]) -> bool:
    # A kernel that is a function may be a new one at each call, and would be compiled each time.
    leaves = jax.tree.leaves(args, is_leaf=lambda leaf: isinstance(leaf, Partial))
    return all(is_concrete(leaf) and isinstance(leaf, _ARRAYS) for leaf in leaves)
