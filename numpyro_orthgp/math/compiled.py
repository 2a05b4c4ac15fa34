"""Functions that are one program wherever they are called.

JAX compiles what is called outside of ``jit`` operation by operation. ``one_program`` wraps the decomposition of the prior, the
moments of ``f(X)`` and ``f.joint(X)``, collapsed bounds and their optimum. So ``svi.init``, which NumPyro does not compile, and
calls at a prompt take fewer than half the programs. Under ``jit`` and ``vmap`` it does nothing. Where a kernel is a plain
function it does nothing either, since each new function would be compiled anew. Under ``grad`` alone the program is
differentiated as a whole: NumPyro takes a gradient that way before NUTS and its automatic guides start.

``quick_jit`` is for programs that run so seldom that compiling them is what takes the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from numpyro_orthgp.closures import Closure
from numpyro_orthgp.errors import is_concrete, with_checks
from numpyro_orthgp.math.ranks import broadcasting
from numpyro_orthgp.processes import refuse_fork

__all__ = ["ARRAYS", "can_be_compiled", "effort_for", "is_within_program", "one_program", "quick_jit", "quick_options"]

ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)  # what `jit` takes

MUCH_WORK = 2**27  # elements, for which quickly compiled loops take longer than JAX's by a fifth of a second or more

SMALL_ARGUMENTS = 2**14  # elements
_LEVEL = "xla_backend_optimization_level"

_F = TypeVar("_F", bound=Callable[..., Any])


def one_program(function: _F) -> _F:
    """``function``, compiled as a whole if it is called outside of any ``jit`` or ``vmap``; there it is what it was.

    JAX compiles what is called outside operation by operation, which takes several times as long, and so it does to a gradient,
    which NumPyro takes once before NUTS or an automatic guide starts. Of small arguments it is compiled in less time too.

    :param function: of pytrees of arrays; keywords are what it is compiled for, such as sizes.
    """
    function = broadcasting(function)

    @lru_cache
    def compiled(names: tuple[str, ...], effort: int) -> Any:
        return jax.jit(with_checks(function), static_argnames=names, compiler_options=quick_options(effort))

    @wraps(function)
    def call(*args: Any, **sizes: Any) -> Any:
        refuse_fork()
        if not can_be_compiled(args):
            return function(*args, **sizes)
        result, waiting = compiled(tuple(sizes), _effort_of(args))(*args, **sizes)
        waiting.inspect()
        return result

    return call  # type: ignore[return-value]


def can_be_compiled(args: Any) -> bool:
    """Whether a program of these arguments, a pytree, can be kept for others like them."""
    # A kernel that is a function may be a new one at each call, and would be compiled each time.
    leaves = jax.tree.leaves(args, is_leaf=lambda leaf: isinstance(leaf, Closure | Partial))
    return all(isinstance(leaf, ARRAYS) and _is_known(leaf) for leaf in leaves)


def _is_known(leaf: Any) -> bool:
    # Under `grad` alone a tracer knows its value, and JAX differentiates the program as a whole.
    return is_concrete(leaf) or leaf.to_concrete_value() is not None


def _effort_of(args: Any) -> int:
    """The effort that pays at a prompt, where a program of small arguments runs for a millisecond or two, a few times."""
    leaves = jax.tree.leaves(args)
    small = sum(map(np.size, leaves)) <= SMALL_ARGUMENTS
    return 1 if small and _is_alone(leaves) else 2


def _is_alone(leaves: list[Any]) -> bool:
    """Whether a program of these is no part of another, and no derivative of one: XLA takes options of whole programs only."""
    return all(map(is_concrete, leaves)) and not is_within_program()


def is_within_program() -> bool:
    """Whether operations are part of a program that is being traced."""
    return not is_concrete(jnp.zeros(()))


def quick_jit(function: Callable[..., Any], effort: int, **options: Any) -> Callable[..., Any]:
    """``jax.jit`` with :func:`quick_options`, where it is not part of another program, whose options hold.

    :param options: of ``jax.jit``.
    """
    within = jax.jit(function, **options)

    @lru_cache(maxsize=1)
    def alone() -> Any:  # made when it is called: to ask for the platform starts it
        return jax.jit(function, compiler_options=quick_options(effort), **options)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_fork()
        return (alone() if _is_alone(jax.tree.leaves((args, kwargs))) else within)(*args, **kwargs)

    return call


@lru_cache
def quick_options(effort: int) -> dict[str, Any] | None:
    """Options of XLA by which a program is compiled in less time; ``None`` where it has no such options.

    Of a collapsed bound with its gradient in float64 (``benchmarks/quick_compiles.py``), effort 0 takes a sixth of the time, and
    the program up to twice as long: for what runs once, or a few times. Effort 1 takes half, and the program is as fast. Steps of
    ``fit`` in float32 are slower by a tenth to a quarter with it, and run thousands of times: they are compiled as JAX does.

    On GPUs XLA tries several kernels for each product while it compiles. With effort 0 it takes the first.

    Loops over nodes of integrals take seven times as long with either: see :func:`effort_for`.

    :param effort: 0 or 1, or 2 for a program that is compiled as JAX does.
    """
    if _LEVEL in os.environ.get("XLA_FLAGS", ""):  # as they have it who chose it
        return None
    for options in _options(jax.default_backend(), effort):
        try:
            jax.jit(lambda x: x + 1, compiler_options=options)(0)
            return options
        except Exception:  # an XLA that does not know them
            continue
    return None


def effort_for(elements: int) -> int:
    """The effort with which a program that runs a few times is compiled and run soonest.

    :param elements: that it computes (``math/work.py``).
    """
    return 2 if elements > MUCH_WORK else 1


def _options(platform: str, effort: int) -> list[dict[str, Any]]:
    """What to try, best first."""
    if effort > 1:
        return []
    if platform == "gpu":
        return [] if effort else [{"xla_gpu_autotune_level": 0}]
    level = {_LEVEL: effort}
    return [{**level, "xla_cpu_use_fusion_emitters": False}, level] if platform == "cpu" else []
