"""Functions as pytrees: the arrays that a function closes over are its leaves.

A kernel may be a plain function, and what it closes over may be parameters of a model::

    base = kernels.RBF(numpyro.param("lengthscale", 1.0))
    f = gp("f", lambda X1, X2=None: base(X1) if X2 is None else base(X1, X2), Z)

JAX cannot look into a function. So the function would carry arrays of a traced model out of ``jit``, where they are not valid. Here
these arrays are found: in the function's closure, in its default arguments, in those of functions that it closes over, and, if they
are traced, in attributes of objects and in classes that are defined within a function. A transformation of JAX then returns a
function that closes over the transformed arrays.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from numpyro.primitives import _PYRO_STACK, Messenger

__all__ = ["ARRAY_OF_ANOTHER_PROGRAM", "Closure", "NoSites", "as_pytree", "in_closure"]

ARRAY_OF_ANOTHER_PROGRAM = (
    "an array of a JAX program that has ended. The library cannot find it: it is in a global variable, or was kept from an earlier "
    "call. Let the function close over the array itself (a local variable, a kernel, a list, a dict, an attribute of an object)."
)

_EMPTY = object()  # a cell without contents
_WRAPPING: Any = type(jax.jit(lambda: None)), type(lru_cache(lambda: None))  # may keep arrays of earlier programs
_DESCRIPTORS = staticmethod, classmethod, property


def as_pytree(function: Callable[..., Any]) -> Any:
    """``function`` if it is a pytree of arrays, as most kernels are, else a pytree that calls it.

    Some leaves of equinox modules are functions or names, which no program could return.
    """
    of_arrays = not any(isinstance(leaf, str) or callable(leaf) for leaf in jax.tree.leaves(function))
    return function if of_arrays else Closure(function)


@jax.tree_util.register_pytree_node_class
class Closure:
    """A function whose leaves are the JAX arrays that it closes over, in whatever pytrees they are.

    NumPy arrays and known integers and booleans (they may be shapes or masks) are not leaves. An object that is no pytree, such as
    the owner of a method, has leaves only if its attributes, or methods of its class, hold traced arrays; then a copy of it gets
    others, and a class derived from its own. Two closures have the same structure if they have the same code, and if all other
    objects that they close over are equal, or identical if they cannot be compared.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # Of a rebuilt one. JAX may put anything in place of the arrays, such as shapes, and they stay leaves.
        self._parts: tuple[list[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with NoSites(repr(self.function)):
                return self.function(*args, **kwargs)
        except jax.errors.UnexpectedTracerError as error:
            raise TypeError(f"{self.function!r} uses {ARRAY_OF_ANOTHER_PROGRAM}") from error

    def __repr__(self) -> str:
        return repr(self.function)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        arrays: list[Any] = []
        return self._parts or (arrays, _take_apart(self.function, arrays, {}))

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Sequence[Any]) -> Closure:
        rebuilt = cls(_put_together(structure, iter(arrays), []))
        rebuilt._parts = list(arrays), structure
        return rebuilt


class NoSites(Messenger):
    """Refuses sites and random keys within a function: it runs any number of times, in loops of JAX and outside of the model."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "mutable":
            return
        what = "asks for a random key" if msg["type"] == "prng_key" else f"declares `{msg['name']}`"
        raise ValueError(
            f"{self.who} {what}. It is called any number of times, also outside of the model. Declare before it, and use the value "
            "in it: a = numpyro.sample('a', ...), then kernels.RBF(a), or Likelihood(f(X), lambda f: dist.Normal(a * f, s))."
        )


def in_closure() -> bool:
    """Whether a :class:`Closure` is running, which may be within a loop of JAX, and whose callers refuse random keys."""
    return any(isinstance(handler, NoSites) for handler in _PYRO_STACK)


class _Same:
    """A value beside the arrays, compared by equality where it has one."""

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash, self._hashable = hash((type(value), value)), True
        except TypeError:
            self._hash, self._hashable = id(value), False

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        if self.value is other.value:
            return True
        comparable = self._hashable and other._hashable and type(self.value) is type(other.value)
        return comparable and (self.value == other.value) is True


# What is taken apart: functions become ("function", globals, code, names, cells, defaults), and so on; arrays become ("array",).


def _take_apart(value: Any, arrays: list[Any], seen: dict[int, int]) -> tuple[Any, ...]:
    if _is_data(value):
        arrays.append(value)
        return ("array",)
    if isinstance(value, types.FunctionType):
        return _take_function_apart(value, arrays, seen)
    if isinstance(value, types.MethodType):
        return "method", *(_take_apart(part, arrays, seen) for part in (value.__func__, value.__self__))
    if isinstance(value, partial):
        parts = value.func, list(value.args), dict(value.keywords)
        return "partial", type(value), *(_take_apart(part, arrays, seen) for part in parts)
    if isinstance(value, _WRAPPING):
        return _take_wrapping_apart(value, arrays, seen)
    if isinstance(value, _DESCRIPTORS):
        return "descriptor", type(value), _take_apart(_parts_of(value)[0], arrays, seen)
    if isinstance(value, type):
        return _take_class_apart(value, arrays, seen)
    try:
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_function)
    except (ValueError, TypeError):
        if type(value) is not dict:  # of keys that have no order
            return "other", _Same(value)
        return "dict", tuple(map(_Same, value)), tuple(_take_apart(part, arrays, seen) for part in value.values())
    if jax.tree_util.treedef_is_leaf(tree):
        return _take_object_apart(value, arrays, seen)
    return "tree", tree, tuple(_take_apart(leaf, arrays, seen) for leaf in leaves)


def _take_wrapping_apart(value: Any, arrays: list[Any], seen: dict[int, int]) -> tuple[Any, ...]:
    """The function that was given to ``jax.jit`` or ``lru_cache``, if it closes over arrays; these keep those of a first call."""
    of_function, also_seen = list(arrays), dict(seen)
    parts = _take_apart(value.__wrapped__, of_function, also_seen)
    if len(of_function) == len(arrays):
        return "other", _Same(value)
    arrays[:] = of_function
    seen.update(also_seen)
    return parts


def _take_function_apart(function: types.FunctionType, arrays: list[Any], seen: dict[int, int]) -> tuple[Any, ...]:
    if id(function) in seen:  # it calls itself
        return "again", seen[id(function)]
    seen[id(function)] = len(seen)
    if function.__closure__ is None and function.__defaults__ is None and function.__kwdefaults__ is None:
        return "plain", _Same(function)
    cells = {n: _contents(c) for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)}
    # ``super()`` needs the class itself.
    parts = tuple(("other", _Same(c)) if n == "__class__" else _take_apart(c, arrays, seen) for n, c in cells.items())
    defaults = _take_apart((function.__defaults__, function.__kwdefaults__), arrays, seen)
    named = _Same((function.__name__, function.__qualname__))
    attributes = tuple((name, _Same(value)) for name, value in function.__dict__.items())
    return "function", function.__code__, _Same(function.__globals__), named, attributes, parts, defaults


def _take_object_apart(value: Any, arrays: list[Any], seen: dict[int, int]) -> tuple[Any, ...]:
    """An object that is no pytree: those of its attributes that hold traced arrays, and the others as they are."""
    if id(value) in seen:
        return "again", seen[id(value)]
    known: dict[int, tuple[Any, bool]] = {}
    attributes = _attributes(value)
    traced = {name: part for name, part in (attributes or {}).items() if _holds_traced(part, known)}
    if attributes is None or not (traced or _holds_traced(type(value), known)):
        return "other", _Same(value)
    seen[id(value)] = len(seen)
    of_class = _take_class_apart(type(value), arrays, seen)
    others = tuple((name, _Same(part)) for name, part in attributes.items() if name not in traced)
    return "object", of_class, others, tuple((n, _take_apart(part, arrays, seen)) for n, part in traced.items())


def _take_class_apart(cls: type, arrays: list[Any], seen: dict[int, int]) -> tuple[Any, ...]:
    """A class that was defined within a function: those of its members that hold traced arrays."""
    if id(cls) in seen:
        return "again", seen[id(cls)]
    known: dict[int, tuple[Any, bool]] = {}
    traced = {name: part for name, part in _members(cls).items() if _holds_traced(part, known)}
    if not traced:
        return "other", _Same(cls)
    seen[id(cls)] = len(seen)
    return "class", _Same(cls), tuple((name, _take_apart(part, arrays, seen)) for name, part in traced.items())


def _put_together(structure: tuple[Any, ...], arrays: Any, made: list[Any]) -> Any:
    kind, *parts = structure
    if kind == "array":
        return next(arrays)
    if kind == "other":
        return parts[0].value
    if kind == "again":
        return made[parts[0]]
    if kind == "plain":
        made.append(parts[0].value)
        return parts[0].value
    if kind == "method":
        function, owner = (_put_together(part, arrays, made) for part in parts)
        return types.MethodType(function, owner)
    if kind == "partial":
        func, args, keywords = (_put_together(part, arrays, made) for part in parts[1:])
        return parts[0](func, *args, **keywords)
    if kind == "descriptor":
        return parts[0](_put_together(parts[1], arrays, made))
    if kind == "dict":
        return {key.value: _put_together(part, arrays, made) for key, part in zip(*parts, strict=True)}
    if kind == "class":
        return _put_class_together(parts, arrays, made)
    if kind == "object":
        return _put_object_together(parts, arrays, made)
    if kind == "tree":
        return jax.tree.unflatten(parts[0], [_put_together(leaf, arrays, made) for leaf in parts[1]])
    code, scope, named, attributes, cells, defaults = parts
    empty = tuple(types.CellType() for _ in cells)
    function = types.FunctionType(code, scope.value, closure=empty)
    made.append(function)
    for cell, part in zip(empty, cells, strict=True):
        contents = _put_together(part, arrays, made)
        if contents is not _EMPTY:
            cell.cell_contents = contents
    function.__defaults__, function.__kwdefaults__ = _put_together(defaults, arrays, made)
    function.__name__, function.__qualname__ = named.value
    function.__dict__.update({name: value.value for name, value in attributes})
    return function


def _put_class_together(parts: Sequence[Any], arrays: Any, made: list[Any], place: int | None = None) -> Any:
    derived: Any = types.new_class(parts[0].value.__name__, (parts[0].value,))
    made.append(derived)
    if place is not None:  # that of its object, which its members may hold
        made[place] = derived.__new__(derived)
    for name, part in parts[1]:
        setattr(derived, name, _put_together(part, arrays, made))
    return derived


def _put_object_together(parts: Sequence[Any], arrays: Any, made: list[Any]) -> Any:
    (of_class, others, traced), place = parts, len(made)
    made.append(None)  # its place is before that of its class
    if of_class[0] == "class":
        _put_class_together(of_class[1:], arrays, made, place)
    else:
        kind = _put_together(of_class, arrays, made)
        made[place] = kind.__new__(kind)
    for name, part in (*((name, ("other", same)) for name, same in others), *traced):
        object.__setattr__(made[place], name, _put_together(part, arrays, made))
    return made[place]


def _holds_traced(value: Any, known: dict[int, tuple[Any, bool]]) -> bool:
    """Whether arrays of a program that is being traced are in an object, at any depth.

    :param known: what was looked at, by identity, with the objects themselves, whose identities are then not given again.
    """
    if isinstance(value, jax.core.Tracer):
        return _is_live(value)
    if id(value) not in known:
        known[id(value)] = value, False  # while it is looked at, too: objects may hold each other
        known[id(value)] = value, any([_holds_traced(part, known) for part in _parts_of(value)])
    return known[id(value)][1]


def _is_live(tracer: Any) -> bool:
    """Whether its program has not ended: an object may keep what it saw in an earlier one."""
    try:
        jax.lax.expand_dims(tracer, (0,))  # JAX says so where it is used
        return True
    except jax.errors.UnexpectedTracerError:
        return False


def _parts_of(value: Any) -> list[Any]:
    """What a function or an object holds directly."""
    if isinstance(value, types.FunctionType):
        return [*map(_contents, value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, _WRAPPING):
        return [value.__wrapped__]
    if isinstance(value, _DESCRIPTORS):
        return [value.fget if isinstance(value, property) else value.__func__]
    if isinstance(value, type):
        return list(_members(value).values())
    try:
        leaves, tree = jax.tree.flatten(value, is_leaf=_is_function)
    except (ValueError, TypeError):
        return list(value.values()) if type(value) is dict else []
    return [*(_attributes(value) or {}).values(), type(value)] if jax.tree_util.treedef_is_leaf(tree) else leaves


def _members(cls: type) -> dict[str, Any]:
    """What classes that were defined within a function give to their objects."""
    own = [c for c in reversed(cls.__mro__) if "<locals>" in c.__qualname__]
    return {name: part for c in own for name, part in vars(c).items() if name not in ("__dict__", "__weakref__")}


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object whose copy can have others; ``None`` for what is not made by its attributes alone."""
    kind = type(value)
    is_copied = kind.__new__ is object.__new__ or kind is types.SimpleNamespace
    if isinstance(value, type | types.ModuleType | jax.Array) or not is_copied:
        return None
    slots = [cls.__dict__.get("__slots__", ()) for cls in kind.__mro__]
    own = [name for names in slots for name in ((names,) if isinstance(names, str) else names)]
    names = [*getattr(value, "__dict__", {}), *(name for name in own if not name.startswith("__"))]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_data(value: Any) -> bool:
    return isinstance(value, jax.Array) and (
        isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jnp.inexact)
    )


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | partial | Partial)
