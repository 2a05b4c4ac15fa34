"""Functions that are one program wherever they are called.

JAX compiles what is called outside of ``jit`` operation by operation. ``one_program`` wraps the decomposition of the prior, the
moments of ``f(X)`` and ``f.joint(X)``, collapsed bounds and their optimum. So ``svi.init``, which NumPyro does not compile, and
calls at a prompt take fewer than half the programs. Under ``jit`` and ``vmap`` it does nothing. Where a kernel is a plain
function it does nothing either, since each new function would be compiled anew. Under ``grad`` alone the program is
differentiated as a whole: NumPyro takes a gradient that way before NUTS and its automatic guides start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import Partial

from numpyro_orthgp.closures import Closure
from numpyro_orthgp.errors import is_concrete, with_checks
from numpyro_orthgp.math.ranks import broadcasting

__all__ = ["can_be_compiled", "one_program"]

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)  # what `jit` takes

_F = TypeVar("_F", bound=Callable[..., Any])


def one_program(function: _F) -> _F:
    """``function``, compiled as a whole if it is called outside of any ``jit`` or ``vmap``; there it is what it was.

    JAX compiles what is called outside operation by operation, which takes several times as long, and so it does to a gradient,
    which NumPyro takes once before NUTS or an automatic guide starts.

    :param function: of pytrees of arrays.
    """
    function = broadcasting(function)
    compiled = jax.jit(with_checks(function))

    @wraps(function)
    def call(*args: Any) -> Any:
        if not can_be_compiled(args):
            return function(*args)
        result, waiting = compiled(*args)
        waiting.inspect()
        return result

    return call  # type: ignore[return-value]


def can_be_compiled(args: Any) -> bool:
    """Whether a program of these arguments, a pytree, can be kept for others like them."""
    # A kernel that is a function may be a new one at each call, and would be compiled each time.
    leaves = jax.tree.leaves(args, is_leaf=lambda leaf: isinstance(leaf, Closure | Partial))
    return all(isinstance(leaf, _ARRAYS) and _is_known(leaf) for leaf in leaves)


def _is_known(leaf: Any) -> bool:
    # Under `grad` alone a tracer knows its value, and JAX differentiates the program as a whole.
    return is_concrete(leaf) or leaf.to_concrete_value() is not None
