"""A cache of compiled programs. A fit that continues, grows or starts again does not compile again.

``jit`` caches programs by function, and each call of ``fit`` makes a new function. Here a program is identified by its content:
JAX traces it (a fifth of a second), its numbers and arrays become arguments, and the rest gets a digest
(:mod:`~numpyro_orthgp.math.program`). Programs with equal digests are the same function of their arguments. So the number of
rows, rates and values may change: they are numbers in the traced program itself. Numbers in its loops and branches are part of
the digest, and so are 0, 1, -1 and infinity, which compilers use for simplifications.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from numpyro_orthgp.closures import ARRAY_OF_ANOTHER_PROGRAM
from numpyro_orthgp.errors import is_concrete, with_checks
from numpyro_orthgp.math.compiled import ARRAYS, effort_for, is_within_program, quick_jit
from numpyro_orthgp.math.program import Unnamed, exact_digest
from numpyro_orthgp.math.turns import in_turn
from numpyro_orthgp.math.work import elements_of

__all__ = ["MOST_KEPT", "Traced", "compiled", "run_as_one", "run_checked", "run_kept", "traced"]

MOST_KEPT = 64  # programs; those used last stay

_kept: OrderedDict[Hashable, Any] = OrderedDict()


class Traced(NamedTuple):
    """A function whose numbers are arguments.

    :param key: equal for equal functions; ``None`` if equality cannot be known, such as with a callback to Python.
    :param leaves: maps numbers and the function's own arguments to the arrays that it returns.
    :param numbers: arrays and numbers that were constants.
    :param tree: the structure of the function's result.
    :param elements: how many numbers it computes.
    """

    key: str | None
    leaves: Callable[..., list[Any]]
    numbers: list[Any]
    tree: Any
    elements: int

    def __call__(self, numbers: list[Any], *args: Any) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves(numbers, *args))

    def without_numbers(self) -> Traced:
        return self._replace(numbers=[])


def traced(function: Callable[..., Any], *args: Any) -> Traced:
    """
    :param args: pytrees of arrays, or of their shapes and dtypes.
    """
    with in_turn():
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    opened, numbers = _with_numbers_as_arguments(closed)
    evaluate = core.jaxpr_as_fun(opened)

    def leaves(numbers: list[Any], *args: Any) -> list[Any]:
        return evaluate(*numbers, *jax.tree.leaves(args))

    try:
        # The digest covers what results depend on. All arguments count, used or not.
        types = [str(var.aval) for var in opened.jaxpr.invars]
        key = None if closed.effects else f"{exact_digest(opened)} {types} {len(numbers)} {jax.tree.structure(args)}"
    except Unnamed:
        key = None
    numbers = [_uncommitted(x) for x in numbers]
    return Traced(key, leaves, numbers, jax.tree.structure(shapes), elements_of(opened.jaxpr))


def run_checked(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` as one program, compiled to run once. Its values are checked as without ``jit``, but at the end.

    :param args: pytrees of arrays.
    """
    result, waiting = _run(traced(with_checks(function), *args), args, 0)
    waiting.inspect()
    return result


def run_kept(function: Callable[..., Any], *args: Any) -> Any:
    """``jax.jit(function)(*args)`` for a function that is a new object at each call: equal programs are compiled once.

    Within another program it is a part of that. Compiled for a few runs of some seconds.

    :param args: pytrees of arrays.
    """
    if is_within_program():
        return function(*args)
    program = traced(function, *args)
    return _run(program, args, effort_for(program.elements))


def run_as_one(function: Callable[..., Any], *args: Any) -> Any:
    """:func:`run_kept` for functions that check their values: checked as without ``jit``, but at the end.

    It is ``function(*args)`` within another program, and where something in ``args`` is traced, as in a gradient, or is no array.

    :param args: pytrees, also with functions in them (:class:`~numpyro_orthgp.closures.Closure`).
    """
    leaves, tree = jax.tree.flatten(args)
    if is_within_program() or not all(isinstance(leaf, ARRAYS) and is_concrete(leaf) for leaf in leaves):
        return function(*args)
    program = traced(with_checks(lambda *leaves: function(*jax.tree.unflatten(tree, leaves))), *leaves)
    result, waiting = _run(program, tuple(leaves), effort_for(program.elements))
    waiting.inspect()
    return result


def _run(program: Traced, args: tuple[Any, ...], effort: int) -> Any:
    run = compiled((program.key, effort) if program.key else None, lambda: quick_jit(program.leaves, effort))
    try:
        return jax.tree.unflatten(program.tree, run(program.numbers, *args))
    except jax.errors.UnexpectedTracerError as error:
        raise TypeError(f"A kernel, a mean or a likelihood uses {ARRAY_OF_ANOTHER_PROGRAM}") from error


def compiled(key: Hashable | None, make: Callable[[], Any]) -> Any:
    """The result of the first call of ``make`` with this key.

    :param key: ``None`` to keep nothing.
    """
    if key is None:
        return make()
    with in_turn():
        if key not in _kept:
            _kept[key] = make()
            while len(_kept) > MOST_KEPT:
                _kept.popitem(last=False)
        _kept.move_to_end(key)
        return _kept[key]


def _with_numbers_as_arguments(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[Any]]:
    """The program with its constants as first arguments, and the constants."""
    jaxpr = closed.jaxpr
    numbers, invars = list(closed.consts), list(jaxpr.constvars)

    def opened(atom: Any) -> Any:
        if not (isinstance(atom, core.Literal) and _may_differ(atom.val)):
            return atom
        numbers.append(np.asarray(atom.val, jnp.result_type(atom.aval)))
        invars.append(core.Var(jax.typeof(numbers[-1])))
        return invars[-1]

    eqns = [eqn.replace(invars=[opened(atom) for atom in eqn.invars]) for eqn in _needed(jaxpr)]
    # The names of arguments are kept for messages; there are more of these now.
    names = jaxpr.debug_info._replace(arg_names=("",) * (len(invars) + len(jaxpr.invars)), result_paths=None)
    jaxpr = jaxpr.replace(constvars=[], invars=[*invars, *jaxpr.invars], eqns=eqns, debug_info=names)
    return core.ClosedJaxpr(jaxpr, []), numbers


def _needed(jaxpr: core.Jaxpr) -> list[Any]:
    """The operations that results depend on, or that have an effect. A guide's first look at a model leaves many others."""
    used, needed = set(filter(_is_variable, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(filter(_is_variable, eqn.invars))
            needed.append(eqn)
    return needed[::-1]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _may_differ(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.floating) and math.isfinite(value) and value not in (0, 1, -1)


def _uncommitted(x: Any) -> Any:
    """The array, not committed to a device, as a constant would be."""
    is_plain = isinstance(x, jax.Array) and is_concrete(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if is_plain and x.committed:
        return np.asarray(x)
    return x
