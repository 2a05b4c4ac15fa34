"""Kernels as pytrees: hyperparameters are leaves, functions in fields are static structure.

Some leaves of equinox modules are functions, such as an activation. JAX would take these leaves for arrays. In the pytree of a
kernel they are static structure (:class:`Parted`), so a subclass may contain a network.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from numpyro_orthgp.closures import Closure

__all__ = ["Parted", "register"]

_FUNCTIONS = types.FunctionType | types.MethodType | partial


def register(cls: type) -> None:
    """Make a subclass of ``Kernel`` a frozen dataclass and a pytree."""
    # Not `jax.tree_util.register_dataclass`: it unflattens through `__init__`, whose checks would reject the
    # gradients, optimizer states and placeholders that tree transformations put into the same structure.
    dataclasses.dataclass(frozen=True, eq=False)(cls)
    cls.__setattr__ = _refuse_change  # type: ignore[assignment]
    fields = dataclasses.fields(cls)
    meta = tuple(field.name for field in fields if field.metadata.get("static"))
    data = tuple(field.name for field in fields if not field.metadata.get("static"))

    def flatten(kernel: Any) -> tuple[tuple, tuple]:
        return _as_children([getattr(kernel, name) for name in data]), tuple(getattr(kernel, name) for name in meta)

    def flatten_with_keys(kernel: Any) -> tuple[tuple, tuple]:
        children, aux = flatten(kernel)
        return tuple(zip(map(jax.tree_util.GetAttrKey, data), children, strict=True)), aux

    def unflatten(aux: tuple, children: Iterable) -> Any:
        kernel: Any = object.__new__(cls)
        for name, value in zip(data + meta, (*_as_fields(tuple(children)), *aux), strict=True):
            object.__setattr__(kernel, name, value)
        return kernel

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def _refuse_change(kernel: Any, name: str, value: Any) -> NoReturn:
    """In the words of this package, where a user changes a kernel or writes an ``__init__``."""
    raise dataclasses.FrozenInstanceError(
        f"cannot assign to field {name!r} of {type(kernel).__name__}: kernels do not change. Make another one, "
        f"dataclasses.replace(kernel, {name}=...). A kernel of your own has no __init__: declare the field in the class, "
        f"`{name}: float = kernels.hyperparameter(1.0)`, or kernels.static(...) for an option."
    )


def _as_children(values: Sequence[Any]) -> tuple[Any, ...]:
    """Fields of a kernel as children of its pytree."""
    return tuple(Parted(value) if _has_functions(value) else value for value in values)


def _as_fields(children: Sequence[Any]) -> tuple[Any, ...]:
    """The fields of :func:`_as_children`."""
    return tuple(child.value if isinstance(child, Parted) else child for child in children)


@jax.tree_util.register_pytree_node_class
class Parted:
    """A pytree with functions among its leaves. Functions become structure, and the arrays that they close over leaves."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, tuple[Any, ...]]]:
        leaves, tree = jax.tree.flatten(self.value)
        kept = tuple(leaf if _is_structure(leaf) else None for leaf in leaves)
        children = [Closure(leaf) if _is_function(leaf) else leaf for leaf in leaves if not _is_structure(leaf)]
        return children, (tree, kept)

    @classmethod
    def tree_unflatten(cls, structure: tuple[Any, tuple[Any, ...]], children: Sequence[Any]) -> Parted:
        tree, kept = structure
        left = iter(children)
        leaves = [next(left) if leaf is None else leaf for leaf in kept]
        return cls(jax.tree.unflatten(tree, [_as_it_was(leaf) for leaf in leaves]))


def _as_it_was(leaf: Any) -> Any:
    """A function itself. An object stays wrapped: what was traced in it is known no longer."""
    return leaf.function if isinstance(leaf, Closure) and isinstance(leaf.function, _FUNCTIONS) else leaf


def _has_functions(value: Any) -> bool:
    if isinstance(value, jax.Array | np.ndarray | int | float | Closure):
        return False
    return any(_is_function(leaf) or _is_structure(leaf) for leaf in jax.tree.leaves(value))


def _is_function(leaf: Any) -> bool:
    """Whether a leaf is a function, or a callable object, that may close over data."""
    return isinstance(leaf, _FUNCTIONS) or (callable(leaf) and bool(jax.tree.leaves(Closure(leaf))))


def _is_structure(leaf: Any) -> bool:
    """Whether a leaf is static: neither data nor a Python function that may close over data. Examples: names, jitted functions."""
    if isinstance(leaf, str):
        return True
    return callable(leaf) and not hasattr(leaf, "dtype") and not _is_function(leaf) and not isinstance(leaf, type)
