"""A digest of what a function of arrays computes. It is equal in two processes if (and almost only if) the operations are.

JAX traces the function to a jaxpr, a graph of primitive operations. The digest of a value covers the operation that makes it and
the digests of the operation's inputs; the digest of the result covers all of them. So it does not depend on what differs between
processes (addresses, source lines, the order of independent operations) or on unused results. It does not depend on the order of
a sum's terms either, since NumPyro adds up sites in the order of a set of names.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from numpyro_orthgp.math.digest import digest, digest_of_array, to_host
from numpyro_orthgp.math.turns import in_turn

__all__ = ["Program", "Unnamed", "exact_digest", "program_of"]

# Parameters of operations for where or under what name they run, or how they are differentiated, but not for what they compute.
NOT_MATHEMATICS = re.compile(
    "name|.*sharding.*|.*layouts?|donated_invars|.*mesh|keep_unused|inline|compiler_options.*|backend|device|debug.*|"
    "jvp_jaxpr_fun|fwd_jaxpr_thunk|bwd|out_trees|memory_kinds?"
)
# Those among them that do not affect what is compiled.
NO_SAY = re.compile("name|debug.*|jvp_jaxpr_fun|fwd_jaxpr_thunk|bwd|out_trees")

SUMS: dict[str, tuple[int, ...]] = {
    "add": (1, 1),
    "add_any": (1, 1),
    "sub": (1, -1),
    "neg": (-1,),
}  # signs of the terms
MAX_TERMS = 1024  # of a sum whose order does not count


class Program(NamedTuple):
    """
    :param operations: digest of the operations, without the numbers in them.
    :param constants: digest of the operations with all constant numbers and arrays.
    """

    operations: str
    constants: str


def program_of(function: Callable[..., Any], *args: Any) -> Program:
    """
    :param args: pytrees of arrays or of their shapes and dtypes. Values do not count.
    """
    with in_turn(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiled step gives them
        closed = jax.make_jaxpr(function)(*args)
    return Program(*(digest("".join(_Digests(values).closed(closed)).encode()) for values in (False, True)))


class Unnamed(Exception):
    """Raised for an operation whose parameter has no digest, such as a Python function."""


def exact_digest(closed: core.ClosedJaxpr) -> str:
    """A digest that is equal for programs with exactly the same operations, so that one can replace the other.

    :raises Unnamed: if this cannot be known.
    """
    return digest("".join(_ExactDigests(values=True).closed(closed)).encode())


class _Digests:
    """Digests of the values in jaxprs. Each jaxpr is digested once, however often it is called.

    :param values: whether constants count by their values, or by shapes and dtypes only.
    """

    ignored = NOT_MATHEMATICS
    sums: dict[str, tuple[int, ...]] = SUMS

    def __init__(self, values: bool) -> None:
        self.values = values
        self.done: dict[int, tuple[Any, list[str]]] = {}  # holds the object too, so that no other gets its address
        self.terms: dict[str, list[tuple[int, str]]] = {}  # of sums

    def closed(self, closed: core.ClosedJaxpr) -> list[str]:
        """Digests of a jaxpr's results."""
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
        """Digest of an operation's parameter, without addresses. Unordered parameters are sorted."""
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
        """Digest of any other object."""
        if callable(x) and hasattr(x, "__qualname__"):
            return f"{x.__module__}.{x.__qualname__}"
        if hasattr(x, "callback_func"):  # what the host computes is not among the operations
            return f"{type(x).__name__} {self.called(x.callback_func)}"
        return re.sub(r"0x[0-9a-fA-F]+", "", str(x))

    def called(self, function: Any, depth: int = 4) -> str:
        """Digest of a Python function: its code, and the numbers, arrays and functions that it uses."""
        if isinstance(function, functools.partial):
            parts = [function.func, *function.args, *function.keywords.values()]
            return str([self.used(x, depth) for x in parts])
        code = getattr(function, "__code__", None)
        if code is None:
            return self.name(function)
        outer = getattr(function, "__globals__", {})
        values = [outer[name] for name in code.co_names if name in outer]
        values += [cell.cell_contents for cell in function.__closure__ or ()]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return str([_code(code), *(self.used(x, depth) for x in values)])

    def used(self, x: Any, depth: int) -> str:
        """Digest of something that a function uses: without addresses, so only of what is known to have none."""
        if isinstance(x, (np.ndarray, jax.Array)):
            return digest_of_array(to_host(x))
        if isinstance(x, (bool, int, float, complex, str, bytes, type(None))):
            return repr(x)
        if isinstance(x, (tuple, list)):
            return str([self.used(v, depth) for v in x])
        if depth and callable(x) and hasattr(x, "__code__"):
            return self.called(x, depth - 1)
        return type(x).__name__


class _ExactDigests(_Digests):
    """Digests that are equal only for the same operations in the same order, also in sums."""

    ignored = NO_SAY
    sums: dict[str, tuple[int, ...]] = {}

    def name(self, x: Any) -> str:
        name = f"{x.__module__}.{x.__qualname__}" if callable(x) and hasattr(x, "__qualname__") else str(x)
        if "<locals>" in name or "<lambda>" in name or re.search("0x[0-9a-fA-F]{6}", name):
            raise Unnamed(name)
        return name


def _code(code: CodeType) -> str:
    """Digest of bytecode, without names of files and numbers of lines."""
    plain = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in code.co_consts]
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in plain]
    return digest(repr((code.co_code, code.co_names, constants)).encode())


def _type(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"
