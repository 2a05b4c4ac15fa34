"""A short name for what a step computes: equal in two processes if, and as good as only if, model, guide and objective are.

JAX traces the loss to a jaxpr, a graph of primitive operations. Every value in it gets a digest of the operation that makes it and
of the digests of what it is made from; that of the loss stands for all of it. So neither names and numbers that differ from process
to process (addresses, source lines, the order of operations that do not depend on each other) nor operations whose result
nobody uses have a say. Nor has the order of the terms of a sum: NumPyro adds up sites in that of a set of names.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from numpyro_orthgp.training.devices import to_host
from numpyro_orthgp.training.digest import digest, digest_of_array

__all__ = ["Program", "Unnamed", "exact_digest", "loss_only", "program_of"]

# Parameters of operations that say where or under what name they run, or how they are differentiated, but not what they are.
NOT_MATHEMATICS = re.compile(
    "name|.*sharding.*|.*layouts?|donated_invars|.*mesh|keep_unused|inline|compiler_options.*|backend|device|debug.*|"
    "jvp_jaxpr_fun|fwd_jaxpr_thunk|bwd|out_trees|memory_kinds?"
)
# Of these those that have no say in what is compiled.
NO_SAY = re.compile("name|debug.*|jvp_jaxpr_fun|fwd_jaxpr_thunk|bwd|out_trees")

SUMS: dict[str, tuple[int, ...]] = {
    "add": (1, 1),
    "add_any": (1, 1),
    "sub": (1, -1),
    "neg": (-1,),
}  # signs of the terms
MAX_TERMS = 1024  # of a sum whose order has no say


class Program(NamedTuple):
    """
    :param operations: digest of the operations, whatever the numbers in them.
    :param constants: digest of them with all numbers and arrays that are constants.
    """

    operations: str
    constants: str


def program_of(function: Callable[..., Any], *args: Any) -> Program:
    """
    :param args: pytrees of arrays or of their shapes and dtypes; their values have no say.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiled step says it
        closed = jax.make_jaxpr(function)(*args)
    return Program(*(digest("".join(_Digests(values).closed(closed)).encode()) for values in (False, True)))


class Unnamed(Exception):
    """Of an operation with a parameter that has no name of its own, such as a function of Python's."""


def exact_digest(closed: core.ClosedJaxpr) -> str:
    """Equal for programs that are the same operation by operation, so that one may run for the other.

    :raises Unnamed: if that cannot be known.
    """
    return digest("".join(_ExactDigests(values=True).closed(closed)).encode())


def loss_only(svi: Any) -> Any:
    """An SVI whose steps compute the loss and leave the parameters, so that the optimizer's rates have no say.

    What is not an ``SVI`` is returned as it is, with all that its ``update`` does.
    """
    optim = getattr(svi, "optim", None)
    if not hasattr(optim, "eval_and_update"):
        return svi
    other = copy.copy(svi)
    other.optim = _NoOptimizer(optim)
    return other


class _NoOptimizer:
    """An optimizer without its step; what else a subclass of ``SVI`` may ask of it is as it was."""

    def __init__(self, optim: Any) -> None:
        self._optim = optim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optim, name)

    def eval_and_update(self, fn: Callable[[Any], Any], state: Any, **_: Any) -> tuple[Any, Any]:
        return fn(self._optim.get_params(state)), state


class _Digests:
    """Digests of the values in jaxprs, each jaxpr once, wherever it is called.

    :param values: whether constants count by their values, or by shapes and dtypes only.
    """

    ignored = NOT_MATHEMATICS
    sums: dict[str, tuple[int, ...]] = SUMS

    def __init__(self, values: bool) -> None:
        self.values = values
        self.done: dict[int, tuple[Any, list[str]]] = {}  # the object too, so that its address stays its own
        self.terms: dict[str, list[tuple[int, str]]] = {}  # of sums

    def closed(self, closed: core.ClosedJaxpr) -> list[str]:
        """Of what a jaxpr returns."""
        if id(closed) not in self.done:
            self.done[id(closed)] = closed, self.outputs(closed.jaxpr, closed.consts)
        return self.done[id(closed)][1]

    def outputs(self, jaxpr: core.Jaxpr, consts: Sequence[Any] = ()) -> list[str]:
        known: dict[Any, str] = {var: f"input {i} {_type(var.aval)}" for i, var in enumerate(jaxpr.invars)}
        known |= {var: f"constant {_type(var.aval)}" for var in jaxpr.constvars}
        known |= {var: self.constant(x) for var, x in zip(jaxpr.constvars, consts, strict=False)}

        def of(atom: Any) -> str:
            return self.constant(atom.val, atom.aval) if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            if eqn.primitive.name in self.sums:
                known[eqn.outvars[0]] = self.sum(
                    self.sums[eqn.primitive.name], [of(x) for x in eqn.invars], eqn.outvars[0]
                )
                continue
            parameters = [f"{k}={self.parameter(v)}" for k, v in eqn.params.items() if not self.ignored.fullmatch(k)]
            words = [eqn.primitive.name, *sorted(parameters), *map(of, eqn.invars)]
            made = digest("\n".join(words).encode())
            known |= {var: f"{made} {i} {_type(var.aval)}" for i, var in enumerate(eqn.outvars)}
        return [of(atom) for atom in jaxpr.outvars]

    def sum(self, signs: Sequence[int], digests: Sequence[str], out: Any) -> str:
        parts = zip(signs, digests, strict=True)
        terms = sorted((sign * s, d) for sign, of in parts for s, d in self.terms.get(of, [(1, of)]))
        made = f"{digest(str(terms).encode())} {_type(out.aval)}"
        if len(terms) <= MAX_TERMS:
            self.terms[made] = terms
        return made

    def constant(self, x: Any, aval: Any = None) -> str:
        aval = jax.typeof(x) if aval is None else aval
        if not self.values:
            return f"constant {_type(aval)}"
        array = to_host(x)
        return f"constant {_type(aval)} " + (digest_of_array(array) if array.size > 1 else repr(array.tolist()))

    def parameter(self, x: Any) -> str:
        """Of a parameter of an operation, without addresses and in an order of its own where it has none."""
        if isinstance(x, core.ClosedJaxpr):
            return str(self.closed(x))
        if isinstance(x, core.Jaxpr):
            return str(self.outputs(x))
        if isinstance(x, dict):
            return str(sorted(f"{k}: {self.parameter(v)}" for k, v in x.items()))
        if isinstance(x, (set, frozenset)):
            return str(sorted(map(self.parameter, x)))
        if isinstance(x, (tuple, list)):
            return str([self.parameter(v) for v in x])
        if isinstance(x, (np.ndarray, jax.Array)):
            return self.constant(x)
        if isinstance(x, functools.partial):
            return self.parameter((x.func, x.args, x.keywords))
        return self.name(x)

    def name(self, x: Any) -> str:
        """Of any other object."""
        if callable(x) and hasattr(x, "__qualname__"):
            return f"{x.__module__}.{x.__qualname__}"
        return re.sub(r"0x[0-9a-fA-F]+", "", str(x))


class _ExactDigests(_Digests):
    """Of which equal ones mean the same operations, in sums too in the same order."""

    ignored = NO_SAY
    sums: dict[str, tuple[int, ...]] = {}

    def name(self, x: Any) -> str:
        name = f"{x.__module__}.{x.__qualname__}" if callable(x) and hasattr(x, "__qualname__") else str(x)
        if "<locals>" in name or "<lambda>" in name or re.search("0x[0-9a-fA-F]{6}", name):
            raise Unnamed(name)
        return name


def _type(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"
